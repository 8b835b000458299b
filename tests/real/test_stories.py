"""stories260K, a LLaMA of one megabyte: what it writes is known to the letter."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.families.hf_folder import LoadedModel, load_hf_folder
from headwater.generation.api import generate
from headwater.weights.safetensors import write_safetensors
from headwater.weights.transforms import rope_interleaved_to_halves

STORY = (
    " Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball."
)


@pytest.fixture(scope="module")
def story_files(public_files: Path) -> Path:
    return public_files / "weights" / "stories260K"


def read_bin(path: Path) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """llama2.c's first format: seven integers, then all tensors of a kind together, layer after layer."""
    raw = path.read_bytes()
    d, hidden, layers, heads, kv_heads, vocab, length = struct.unpack("<7i", raw[:28])
    values, at = torch.from_numpy(np.frombuffer(raw, "<f4", offset=28).copy()), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count : at].view(shape)

    kv = d // heads * kv_heads
    kinds = [
        ("input_layernorm", (d,)), ("self_attn.q_proj", (d, d)), ("self_attn.k_proj", (kv, d)),
        ("self_attn.v_proj", (kv, d)), ("self_attn.o_proj", (d, d)), ("post_attention_layernorm", (d,)),
        ("mlp.gate_proj", (hidden, d)), ("mlp.down_proj", (d, hidden)), ("mlp.up_proj", (hidden, d)),
    ]  # fmt: skip
    tensors = {"model.embed_tokens.weight": take(vocab, d)}
    for name, shape in kinds:
        for i, tensor in enumerate(take(layers, *shape)):
            tensors[f"model.layers.{i}.{name}.weight"] = tensor
    tensors["model.norm.weight"] = take(d)
    for i in range(layers):  # rotary pairs stand side by side there
        for name, count in (("q", heads), ("k", kv_heads)):
            key = f"model.layers.{i}.self_attn.{name}_proj.weight"
            tensors[key] = rope_interleaved_to_halves(tensors[key], count)
    config = {
        "model_type": "llama", "hidden_size": d, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": length, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }  # fmt: skip
    return config, tensors


def read_pieces(path: Path, count: int) -> list[bytes]:
    raw, at, pieces = path.read_bytes(), 4, []
    for _ in range(count):
        size = struct.unpack_from("<i", raw, at + 4)[0]
        pieces.append(raw[at + 8 : at + 8 + size])
        at += 8 + size
    return pieces


@pytest.fixture(scope="module")
def stories(story_files, tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("stories")
    config, tensors = read_bin(story_files / "stories260K.bin")
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {name: tensor.contiguous() for name, tensor in tensors.items()})
    return load_hf_folder(folder)


def message_of(stories: LoadedModel, pieces: list[bytes]) -> str:
    ids = generate(stories.model, [1], max_tokens=60).ids
    return b"".join(pieces[n] for n in ids).decode()


def test_the_story_begins_as_it_must(stories, story_files):
    assert message_of(stories, read_pieces(story_files / "tok512.bin", 512)).startswith(STORY)


def test_a_wrong_order_of_pairs_would_show(stories, story_files):
    pieces = read_pieces(story_files / "tok512.bin", 512)
    attn = stories.model.decoder.layers[0].self_attn
    right = attn.q.weight.data
    attn.q.weight.data = rope_interleaved_to_halves(right, 8).contiguous()
    try:
        assert not message_of(stories, pieces).startswith(STORY)
    finally:
        attn.q.weight.data = right
