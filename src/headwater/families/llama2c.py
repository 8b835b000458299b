"""Convert llama2.c checkpoints to a Hugging Face model folder.

    seven int32   d_model, d_ff, layers, heads, kv_heads, vocab (negative: the output is not tied), max_positions
    float32       tokens, then for all layers: norm, q, k, v, out, norm, gate, down, up; final norm; two RoPE tables

Rows of q and k hold interleaved RoPE pairs; transformers has them as two halves (transforms.py). The tokenizer's file
is an int32 (the length of its longest piece), then for each piece: a float32 score, an int32 length, and its bytes.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.text.loaders.sentencepiece import llama_spec
from headwater.text.loaders.sentencepiece_model import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, Piece, SentencePieceModel
from headwater.text.tokenizer import Tokenizer
from headwater.weights.checks import check_finite
from headwater.weights.safetensors import write_safetensors
from headwater.weights.transforms import rope_interleaved_to_halves

MAX_FILE_BYTES = 2 << 30
MAX_LAYERS = 200
SPECIAL_PIECES = ("<unk>", "<s>", "</s>")  # the first three


def convert_llama2c(weights: str | Path, tokenizer: str | Path, folder: str | Path) -> Path:
    """Convert a llama2.c checkpoint and its tokenizer: writes config.json, model.safetensors and tokenizer.json."""
    raw = bytearray(read_limited(weights, MAX_FILE_BYTES))
    config, tensors = read_llama2c(raw, weights)
    spec, special_tokens = _parse_tokenizer(read_limited(tokenizer, 64 << 20), config["vocab_size"], tokenizer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    Tokenizer(spec, special_tokens, where=tokenizer).save(folder)
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
    return folder


def read_llama2c(raw: bytearray, where: object) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors, in transformers' names, of a llama2.c file."""
    # The header: seven sizes.
    if len(raw) < 28:
        raise BadFile(_("{where}: not a llama2.c file: it is too short to be one", where=where))
    d_model, d_ff, layers, heads, kv_heads, vocab, max_positions = struct.unpack("<7i", raw[:28])
    tied = vocab > 0
    vocab = abs(vocab)
    sizes = (d_model, d_ff, layers, heads, kv_heads, vocab, max_positions)
    if not all(0 < n < 1 << 20 for n in sizes) or layers > MAX_LAYERS or d_model % (2 * heads) or heads % kv_heads:
        raise BadFile(
            _("{where}: not a llama2.c file: its sizes {sizes} cannot be those of a model", where=where, sizes=sizes)
        )

    # The file is a sequence of tensors, those of all layers stacked.
    shapes = _tensor_shapes(*sizes, tied=tied)
    counts = [math.prod(shape) for _unused, shape in shapes]
    if len(raw) != 28 + 4 * sum(counts):
        raise BadFile(
            _(
                "{where}: must have {expected:,} bytes for the sizes it claims, it has {num_bytes:,}",
                where=where,
                expected=28 + 4 * sum(counts),
                num_bytes=len(raw),
            )
        )
    values = torch.frombuffer(raw, dtype=torch.float32, offset=28)
    tensors: dict[str, Tensor] = {}
    for (name, shape), flat in zip(shapes, values.split(counts), strict=True):
        if not name:
            continue
        if "{i}" in name:
            for i, matrix in enumerate(flat.view(shape)):
                tensors[name.format(i=i)] = _rope_rows_to_halves(name, matrix, heads, kv_heads)
        else:
            tensors[name] = flat.view(shape)
        check_finite(flat, name, where)

    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": d_model,
        "intermediate_size": d_ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config, tensors


def _tensor_shapes(
    d_model: int, d_ff: int, layers: int, heads: int, kv_heads: int, vocab: int, max_positions: int, *, tied: bool
) -> list[tuple[str, tuple[int, ...]]]:
    """The tensors of a file in order: transformers' name ("" for the RoPE tables, which are ignored) and shape."""
    d_kv = d_model // heads * kv_heads
    rope_size = max_positions * (d_model // heads // 2)
    layer = "model.layers.{i}."
    attn = layer + "self_attn."
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (vocab, d_model)),
        (layer + "input_layernorm.weight", (layers, d_model)),
        (attn + "q_proj.weight", (layers, d_model, d_model)),
        (attn + "k_proj.weight", (layers, d_kv, d_model)),
        (attn + "v_proj.weight", (layers, d_kv, d_model)),
        (attn + "o_proj.weight", (layers, d_model, d_model)),
        (layer + "post_attention_layernorm.weight", (layers, d_model)),
        (layer + "mlp.gate_proj.weight", (layers, d_ff, d_model)),
        (layer + "mlp.down_proj.weight", (layers, d_model, d_ff)),
        (layer + "mlp.up_proj.weight", (layers, d_ff, d_model)),
        ("model.norm.weight", (d_model,)),
        ("", (rope_size,)),
        ("", (rope_size,)),
    ]
    if not tied:
        shapes.append(("lm_head.weight", (vocab, d_model)))
    return shapes


def _rope_rows_to_halves(name: str, rows: Tensor, heads: int, kv_heads: int) -> Tensor:
    num_heads = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
    return rows if num_heads is None else rope_interleaved_to_halves(rows, num_heads)


def _parse_tokenizer(raw: bytes, vocab: int, where: object) -> tuple[dict[str, Any], dict[str, str]]:
    """The tokenizer.json spec and the special tokens of a llama2.c tokenizer file."""
    pieces: list[Piece] = []
    position = 4
    while position < len(raw) and len(pieces) < vocab:
        score, length = struct.unpack("<fi", raw[position : position + 8].ljust(8, b"\0"))
        position += 8 + length
        if not 0 < length <= 256 or position > len(raw) or not math.isfinite(score):
            break
        text = raw[position - length : position].decode("utf-8", "replace").replace(" ", "▁")
        pieces.append(_piece(len(pieces), text, score))
    if len(pieces) != vocab or len({piece.text for piece in pieces}) != vocab:
        raise BadFile(
            _(
                "{where}: must hold {vocab} distinct pieces, {num_pieces} could be read",
                where=where,
                vocab=vocab,
                num_pieces=len(pieces),
            )
        )
    return llama_spec(SentencePieceModel(pieces, BPE, byte_fallback=True, remove_extra_whitespaces=False), {})


def _piece(token_id: int, text: str, score: float) -> Piece:
    """A piece with its type: three special tokens, 256 bytes, then text."""
    if token_id < 3:
        return Piece(SPECIAL_PIECES[token_id], score, UNKNOWN if token_id == 0 else CONTROL)
    return Piece(text, score, BYTE if token_id < 259 else NORMAL)
