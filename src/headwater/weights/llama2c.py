"""Small LLaMA models in the llama2.c format, turned into a public folder.

    seven int32   d_model, d_ff, layers, heads, kv_heads, vocab (negative: an output table of its own follows), places
    float32       tokens, then for all layers: norm, q, k, v, out, norm, gate, down, up; last norm; two rotary tables

Rows of q and k hold rotary pairs side by side; the public layout wants them as two halves (changes.py). The tokenizer's
file is an int32 (its longest piece), then for each piece: a float32 score, an int32 length, and its bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.weights.changes import halves_from_pairs
from headwater.weights.files import atomic, read_bounded
from headwater.weights.finite import check_finite
from headwater.weights.tensors import write

MOST_BYTES, MOST_LAYERS = 2 << 30, 200


def convert(weights: str | Path, tokenizer: str | Path, folder: str | Path) -> Path:
    """Write config.json, model.safetensors and tokenizer.json."""
    from headwater.text.tokenizer import Tokenizer  # text stands beside weights, not below

    raw = bytearray(read_bounded(weights, MOST_BYTES))
    config, tensors = read(raw, weights)
    spec, roles = _tokenizer(read_bounded(tokenizer, 64 << 20), config["vocab_size"], tokenizer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "model.safetensors", tensors)
    Tokenizer(spec, roles, where=tokenizer).save(folder)
    with atomic(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    return folder


def read(raw: bytearray, where: object) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The public config and the public tensors of a file's bytes."""
    if len(raw) < 28:
        raise BadFile(f"{where}: not a llama2.c file: it is too short to be one")
    width, inner, layers, heads, kv_heads, vocab, places = struct.unpack("<7i", raw[:28])
    tied, vocab = vocab > 0, abs(vocab)
    sizes = (width, inner, layers, heads, kv_heads, vocab, places)
    if not all(0 < n < 1 << 20 for n in sizes) or layers > MOST_LAYERS or width % (2 * heads) or heads % kv_heads:
        raise BadFile(f"{where}: not a llama2.c file: its sizes {sizes} can not be those of a model")
    narrow, turns = width // heads * kv_heads, places * (width // heads // 2)
    layer, attn = "model.layers.{i}.", "model.layers.{i}.self_attn."
    rows = [
        ("model.embed_tokens.weight", (vocab, width)), (layer + "input_layernorm.weight", (layers, width)),
        (attn + "q_proj.weight", (layers, width, width)), (attn + "k_proj.weight", (layers, narrow, width)),
        (attn + "v_proj.weight", (layers, narrow, width)), (attn + "o_proj.weight", (layers, width, width)),
        (layer + "post_attention_layernorm.weight", (layers, width)),
        (layer + "mlp.gate_proj.weight", (layers, inner, width)),
        (layer + "mlp.down_proj.weight", (layers, width, inner)),
        (layer + "mlp.up_proj.weight", (layers, inner, width)),
        ("model.norm.weight", (width,)),
        ("", (turns,)), ("", (turns,)), *([] if tied else [("lm_head.weight", (vocab, width))]),
    ]  # fmt: skip
    count = sum(torch.Size(shape).numel() for _, shape in rows)
    if len(raw) != 28 + 4 * count:
        raise BadFile(f"{where}: must have {28 + 4 * count:,} bytes for the sizes it claims, it has {len(raw):,}")
    flat = torch.frombuffer(raw, dtype=torch.float32, offset=28)
    tensors: dict[str, Tensor] = {}
    for (name, shape), part in zip(rows, flat.split([torch.Size(shape).numel() for _, shape in rows]), strict=True):
        if "{i}" in name:
            tensors |= {
                name.format(i=n): _turned(name, matrix, heads, kv_heads) for n, matrix in enumerate(part.view(shape))
            }
        elif name:
            tensors[name] = part.view(shape)
        if name:
            check_finite(part, name, where)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": places, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": tied, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return config, tensors


def _turned(name: str, rows: Tensor, heads: int, kv_heads: int) -> Tensor:
    which = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
    return rows if which is None else halves_from_pairs(rows, which)


def _tokenizer(raw: bytes, vocab: int, where: object) -> tuple[dict[str, Any], dict[str, str]]:
    from headwater.text.from_sentencepiece import llama
    from headwater.text.sentencepiece import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, Piece, SentencePiece

    pieces: list[Piece] = []
    at = 4
    while at < len(raw) and len(pieces) < vocab:
        score, length = struct.unpack("<fi", raw[at : at + 8].ljust(8, b"\0"))
        at += 8 + length
        if not 0 < length <= 256 or at > len(raw) or score - score != 0.0:
            break
        text = raw[at - length : at].decode("utf-8", "replace").replace(" ", "▁")
        n = len(pieces)
        kind = (UNKNOWN, CONTROL, CONTROL)[n] if n < 3 else BYTE if n < 259 else NORMAL
        pieces.append(Piece(("<unk>", "<s>", "</s>")[n] if n < 3 else text, score, kind))
    if len(pieces) != vocab or len({piece.text for piece in pieces}) != vocab:
        raise BadFile(f"{where}: must hold {vocab} distinct pieces, {len(pieces)} could be read")
    return llama(SentencePiece(pieces, BPE, byte_fallback=True, tidy_spaces=False), {})
