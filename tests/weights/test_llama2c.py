"""llama2.c checkpoints are converted to Hugging Face folders, which transformers loads bit for bit."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from headwater.errors import BadFile
from headwater.families import llama2c
from headwater.text.load import load_tokenizer

D_MODEL, D_FF, LAYERS, HEADS, KV_HEADS, LENGTH = 32, 48, 2, 4, 2, 16
PIECES = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{n:02X}>".encode() for n in range(256)), b"a", b"b", b" ", b"ab"]


def tensors() -> dict[str, torch.Tensor]:
    """The tensors of a LLaMA in the public layout, by name."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(PIECES), hidden_size=D_MODEL, intermediate_size=D_FF, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
    )  # fmt: skip
    return dict(transformers.LlamaForCausalLM(config).state_dict())


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """RoPE rows of each head from two halves to interleaved pairs: 0, n, 1, n + 1, …"""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_llama2c(folder: Path) -> tuple[Path, Path]:
    """The same as a llama2.c file and its tokenizer."""
    state_dict, layers = tensors(), [f"model.layers.{i}." for i in range(LAYERS)]
    order = [state_dict["model.embed_tokens.weight"]]
    order += [state_dict[at + "input_layernorm.weight"] for at in layers]
    order += [interleaved(state_dict[at + "self_attn.q_proj.weight"], HEADS) for at in layers]
    order += [interleaved(state_dict[at + "self_attn.k_proj.weight"], KV_HEADS) for at in layers]
    for name in ("self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm"):
        order += [state_dict[f"{at}{name}.weight"] for at in layers]
    for name in ("gate", "down", "up"):
        order += [state_dict[f"{at}mlp.{name}_proj.weight"] for at in layers]
    order += [state_dict["model.norm.weight"], torch.zeros(2, LENGTH, D_MODEL // HEADS // 2)]
    header = struct.pack("<7i", D_MODEL, D_FF, LAYERS, HEADS, KV_HEADS, len(PIECES), LENGTH)
    weights, tokenizer = folder / "model.bin", folder / "tokenizer.bin"
    weights.write_bytes(header + b"".join(tensor.contiguous().numpy().tobytes() for tensor in order))
    rows = (struct.pack("<fi", -float(n), len(piece)) + piece for n, piece in enumerate(PIECES))
    tokenizer.write_bytes(struct.pack("<i", max(map(len, PIECES))) + b"".join(rows))
    return weights, tokenizer


def test_a_checkpoint_is_converted_to_a_folder(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    llama2c.convert_llama2c(*write_llama2c(tmp_path), tmp_path / "public")
    model, expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "public"), tensors()
    result = dict(model.state_dict())
    assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    tokenizer = load_tokenizer(tmp_path / "public")
    assert tokenizer.decode(tokenizer.encode("ab a")).strip() == "ab a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:20], "too short"),
        (lambda raw: raw[:-4], "must have"),
        (lambda raw: bytearray(28) + raw[28:], "cannot be those"),
        (lambda raw: raw + b"\0" * 4, "must have"),
    ],
)
def test_a_wrong_file_is_refused(change, words: str, tmp_path: Path):
    weights, _ = write_llama2c(tmp_path)
    with pytest.raises(BadFile, match=words):
        llama2c.read_llama2c(change(bytearray(weights.read_bytes())), "x.bin")
