"""GGUF quantization formats: block layouts of Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K and Q6_K, quantize and dequantize.

d and m are half-precision numbers of the block, q the small integers packed in it:

    Q8_0   32 weights   d, 32 signed bytes                          w = d q
    Q4_0   32           d, 16 bytes of two                          w = d (q - 8)
    Q4_1   32           d, m, 16 bytes of two                       w = d q + m
    Q5_0   32           d, 32 high bits, 16 bytes of two            w = d (q - 16)
    Q5_1   32           d, m, 32 high bits, 16 bytes of two         w = d q + m
    Q4_K   256          d, m, 8 scales s and 8 minima t of 6 bits   w = (d s) q - (m t)       per 32 weights
    Q6_K   256          low 4 bits, high 2 bits, 16 scales s, d     w = (d s) (q - 32)        per 16 weights

Two weights share a byte as low and high half: in a block of 32 the first 16 weights are the low halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GGMLType:
    """A GGML tensor type: blocks of `block_size` weights in `type_size` bytes."""

    name: str
    type_id: int
    block_size: int
    type_size: int
    dequantize_blocks: Callable[[Tensor], Tensor] | None = None  # uint8 [N, type_size] -> float32 [N, block_size]
    dtype: torch.dtype | None = None  # of an unquantized type


def _as_float16(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()


def _unpack_nibbles(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] numbers from 0 to 15: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _unpack_fifth_bits(raw: Tensor) -> Tensor:
    """[N, 4] bytes -> [N, 32] of 0 or 16: bit j of the little-endian number belongs to weight j."""
    return ((raw[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _dequantize_q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * _as_float16(b[:, :2])


def _dequantize_q4_0(b: Tensor) -> Tensor:
    return _as_float16(b[:, :2]) * (_unpack_nibbles(b[:, 2:]).float() - 8)


def _dequantize_q4_1(b: Tensor) -> Tensor:
    return _as_float16(b[:, :2]) * _unpack_nibbles(b[:, 4:]).float() + _as_float16(b[:, 2:4])


def _dequantize_q5_0(b: Tensor) -> Tensor:
    q = _unpack_nibbles(b[:, 6:]) | _unpack_fifth_bits(b[:, 2:6])
    return _as_float16(b[:, :2]) * (q.float() - 16)


def _dequantize_q5_1(b: Tensor) -> Tensor:
    q = _unpack_nibbles(b[:, 8:]) | _unpack_fifth_bits(b[:, 4:8])
    return _as_float16(b[:, :2]) * q.float() + _as_float16(b[:, 2:4])


def _dequantize_q4_k(b: Tensor) -> Tensor:
    d = _as_float16(b[:, 0:2])
    m = _as_float16(b[:, 2:4])
    first = b[:, 4:8]
    second = b[:, 8:12]
    mixed = b[:, 12:16]
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6 << 4)), 1)  # 4 of six bits, 4 in two parts
    minima = torch.cat((second & 63, (mixed >> 4) | (second >> 6 << 4)), 1)
    q = _unpack_nibbles(b[:, 16:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)  # [N, 8, 32]
    return ((d * scales.float())[..., None] * q.float() - (m * minima.float())[..., None]).flatten(1)


def _dequantize_q6_k(b: Tensor) -> Tensor:
    low = b[:, :128].unflatten(1, (2, 64))
    high = b[:, 128:192].unflatten(1, (2, 32))
    scales = b[:, 192:208].contiguous().view(torch.int8).float() * _as_float16(b[:, 208:210])
    bits = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1) << 4
    q = (_unpack_nibbles(low) | bits).flatten(1).float() - 32
    return (scales[..., None] * q.unflatten(1, (16, 16))).flatten(1)


GGML_TYPES = {
    ggml_type.type_id: ggml_type
    for ggml_type in (
        GGMLType("F32", 0, 1, 4, dtype=torch.float32),
        GGMLType("F16", 1, 1, 2, dtype=torch.float16),
        GGMLType("Q4_0", 2, 32, 18, _dequantize_q4_0),
        GGMLType("Q4_1", 3, 32, 20, _dequantize_q4_1),
        GGMLType("Q5_0", 6, 32, 22, _dequantize_q5_0),
        GGMLType("Q5_1", 7, 32, 24, _dequantize_q5_1),
        GGMLType("Q8_0", 8, 32, 34, _dequantize_q8_0),
        GGMLType("Q4_K", 12, 256, 144, _dequantize_q4_k),
        GGMLType("Q6_K", 14, 256, 210, _dequantize_q6_k),
        GGMLType("BF16", 30, 1, 2, dtype=torch.bfloat16),
    )
}
GGML_TYPES_BY_NAME = {ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values()}
CHUNK_BLOCKS = 1 << 14  # blocks dequantized at a time, so that intermediate tensors stay small


def dequantize(rows: Tensor, ggml_type: GGMLType) -> Tensor:
    """Dequantize rows: uint8 [R, bytes of a row] -> float32 [R, weights of a row]."""
    assert ggml_type.dequantize_blocks is not None
    blocks = rows.reshape(-1, ggml_type.type_size)
    weights = torch.empty(len(blocks), ggml_type.block_size)
    for start in range(0, len(blocks), CHUNK_BLOCKS):
        weights[start : start + CHUNK_BLOCKS] = ggml_type.dequantize_blocks(blocks[start : start + CHUNK_BLOCKS])
    return weights.view(len(rows), rows.shape[1] // ggml_type.type_size * ggml_type.block_size)


def quantize_q8_0(weights: Tensor) -> Tensor:
    """Quantize [..., n] to Q8_0 [..., 34 n / 32] bytes: d = max|w| / 127, q = w / d rounded half away from zero."""
    blocks = weights.float().reshape(-1, 32)
    d = blocks.abs().amax(1, keepdim=True) / 127
    scaled = torch.where(d == 0, 0, blocks * torch.where(d == 0, 0, 1 / d))
    q = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8)
    packed = torch.cat((d.half().view(torch.uint8), q.view(torch.uint8)), 1)
    return packed.view(*weights.shape[:-1], -1)
