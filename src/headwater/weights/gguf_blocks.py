"""The quantised blocks of GGUF files: a row of weights cut into blocks, each with its own scale.

d and m are half-precision numbers of the block, q the small whole numbers packed in it:

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
class Kind:
    """How one type of tensor lies in the file: `weights` in a block of `size` bytes."""

    name: str
    code: int
    weights: int
    size: int
    unpack: Callable[[Tensor], Tensor] | None = None  # blocks [N, size] of bytes -> [N, weights] of float32
    dtype: torch.dtype | None = None  # a plain type, read as it is


def _half(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] numbers: all low halves, then all high halves."""
    return torch.cat((raw & 15, raw >> 4), -1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """[N, 4] bytes -> [N, 32] of 0 or 16: bit j of the little-endian number belongs to weight j."""
    return ((raw[:, :, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1) << 4


def _q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * _half(b[:, :2])


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).float() + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * ((_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])).float() + _half(b[:, 2:4])


def _q4_k(b: Tensor) -> Tensor:
    d, m = _half(b[:, 0:2]), _half(b[:, 2:4])
    first, second, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (mixed & 15) | (first >> 6 << 4)), 1)  # 4 whole, 4 in two parts
    minima = torch.cat((second & 63, (mixed >> 4) | (second >> 6 << 4)), 1)
    q = _nibbles(b[:, 16:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)  # [N, 8, 32]
    return ((d * scales.float())[..., None] * q.float() - (m * minima.float())[..., None]).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low, high = b[:, :128].unflatten(1, (2, 64)), b[:, 128:192].unflatten(1, (2, 32))
    scales = b[:, 192:208].contiguous().view(torch.int8).float() * _half(b[:, 208:210])
    bits = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1) << 4
    q = (_nibbles(low) | bits).flatten(1).float() - 32
    return (scales[..., None] * q.unflatten(1, (16, 16))).flatten(1)


KINDS = {kind.code: kind for kind in (
    Kind("F32", 0, 1, 4, dtype=torch.float32), Kind("F16", 1, 1, 2, dtype=torch.float16),
    Kind("Q4_0", 2, 32, 18, _q4_0), Kind("Q4_1", 3, 32, 20, _q4_1), Kind("Q5_0", 6, 32, 22, _q5_0),
    Kind("Q5_1", 7, 32, 24, _q5_1), Kind("Q8_0", 8, 32, 34, _q8_0), Kind("Q4_K", 12, 256, 144, _q4_k),
    Kind("Q6_K", 14, 256, 210, _q6_k), Kind("BF16", 30, 1, 2, dtype=torch.bfloat16),
)}  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS.values()}
TOGETHER = 1 << 14  # blocks unpacked at a time, so that the steps in between stay small


def unpacked(rows: Tensor, kind: Kind) -> Tensor:
    """[R, bytes of a row] -> [R, weights of a row] in float32."""
    assert kind.unpack is not None
    blocks = rows.reshape(-1, kind.size)
    weights = torch.empty(len(blocks), kind.weights)
    for start in range(0, len(blocks), TOGETHER):
        weights[start : start + TOGETHER] = kind.unpack(blocks[start : start + TOGETHER])
    return weights.view(len(rows), rows.shape[1] // kind.size * kind.weights)


def pack_q8_0(weights: Tensor) -> Tensor:
    """[..., n] -> [..., 34 n / 32] bytes: d = max|w| / 127, q = w / d rounded half away from zero."""
    blocks = weights.float().reshape(-1, 32)
    d = blocks.abs().amax(1, keepdim=True) / 127
    scaled = torch.where(d == 0, 0, blocks * torch.where(d == 0, 0, 1 / d))
    q = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8)
    packed = torch.cat((d.half().view(torch.uint8), q.view(torch.uint8)), 1)
    return packed.view(*weights.shape[:-1], -1)
