"""AdamW step with 8-bit block-wise quantized moments and stochastic rounding: a formula in torch, and its C kernel.

A moment is stored as the top of its own float32 bits, exponent and three bits of the fraction, relative to the largest
number of its block (block_exponents); the first moment has a sign as well. Rounding is stochastic, so that changes
smaller than the distance between two codes are not lost.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.cpu.build import TensorMismatch, bind, checked_ptr, float_ptr, supported
from headwater.cpu.dropout import counter_hash
from headwater.cpu.layout import MOMENT_BLOCK_SIZE as BLOCK_SIZE
from headwater.cpu.layout import MOMENT_DROPPED_BITS as DROPPED_BITS
from headwater.cpu.layout import AdamWParams


def init_moments(like: Tensor) -> dict[str, Tensor]:
    """Moments of zero: codes of the tensor's shape, and for each block the exponents of both moments [blocks, 2]."""
    codes = {name: torch.zeros(like.shape, dtype=torch.uint8, device=like.device) for name in ("exp_avg", "exp_avg_sq")}
    blocks = _num_blocks(like)
    return codes | {"block_exponents": torch.zeros(blocks, 2, dtype=torch.int16, device=like.device)}


def adamw8bit_step(w: Tensor, g: Tensor, m: Tensor, v: Tensor, block_exponents: Tensor, params: AdamWParams) -> None:
    """One AdamW step in place: updates w, the codes m and v, and the exponents of their blocks."""
    shape = (_num_blocks(w), 2)
    if not g.shape == m.shape == v.shape == w.shape or block_exponents.shape != shape:
        raise TensorMismatch(
            f"moments must fit the weights {list(w.shape)}, got {[list(t.shape) for t in (g, m, v, block_exponents)]}"
        )

    g = g.contiguous()
    if supported(w, g) and all(t.is_contiguous() for t in (w, m, v, block_exponents)):
        _kernel()(
            float_ptr(w, *w.shape),
            float_ptr(g, *w.shape),
            checked_ptr(m, torch.uint8, *w.shape),
            checked_ptr(v, torch.uint8, *w.shape),
            checked_ptr(block_exponents, torch.int16, *shape),
            w.numel(),
            params,
        )
        return

    grad = g.flatten().float()
    old_m, old_v = dequantize_moments(m, v, block_exponents)
    new_m = params.beta1 * old_m + (1 - params.beta1) * grad
    new_v = params.beta2 * old_v + (1 - params.beta2) * grad * grad
    denominator = (new_v * params.inv_bias_correction2).sqrt() + params.eps
    update = (new_m * params.inv_bias_correction1) / denominator
    w -= (params.lr * params.weight_decay * w + params.lr * update.view(w.shape)).to(w.dtype)
    for old, new in zip((m, v, block_exponents), quantize_moments(new_m, new_v, params), strict=True):
        old.copy_(new.view(old.shape))


def dequantize_moments(m: Tensor, v: Tensor, block_exponents: Tensor) -> tuple[Tensor, Tensor]:
    """The two moments [N] in float32 that the codes m and v stand for."""
    exponents = block_exponents.long().repeat_interleave(BLOCK_SIZE, 0)[: m.numel()]  # [N, 2]
    magnitude = _dequantize(m.flatten().long() & 127, exponents[:, 0])
    second = _dequantize(v.flatten().long(), exponents[:, 1])
    return torch.where(m.flatten() >= 128, -magnitude, magnitude), second


def quantize_moments(m: Tensor, v: Tensor, params: AdamWParams) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of both moments and their block exponents, rounded stochastically: on average a moment is unchanged."""
    n = m.numel()
    noise = counter_hash(n, params.first, params.second).to(m.device)
    bits_m, bits_v = (x.contiguous().view(torch.int32).long() & 0x7FFFFFFF for x in (m, v))

    # exponents of each block, from its largest number [blocks, 2]
    max_m, max_v = (F.pad(bits, (0, -n % BLOCK_SIZE)).view(-1, BLOCK_SIZE).amax(1) for bits in (bits_m, bits_v))
    exponents = torch.stack([(max_m >> DROPPED_BITS) - 126, (max_v >> DROPPED_BITS) - 254], 1)
    exponent_m, exponent_v = exponents.repeat_interleave(BLOCK_SIZE, 0)[:n].unbind(1)

    # codes: the top bits after noise is added below them, relative to the block's exponent
    code_m = ((bits_m + (noise >> 12)) >> DROPPED_BITS).sub(exponent_m).clamp(min=0)
    code_v = ((bits_v + (noise & 0xFFFFF)) >> DROPPED_BITS).sub(exponent_v)
    code_v = torch.where(code_v < 1, (v > 0).long(), code_v)  # a second moment of 0 would make a step very large
    return (code_m | (m < 0).long() << 7).to(torch.uint8), code_v.to(torch.uint8), exponents.to(torch.int16)


def _dequantize(codes: Tensor, exponents: Tensor) -> Tensor:
    bits = (codes + exponents).clamp(min=0) << DROPPED_BITS
    return torch.where(codes > 0, bits.int().view(torch.float32), 0.0)


def _num_blocks(tensor: Tensor) -> int:
    return -(-tensor.numel() // BLOCK_SIZE)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    return bind("adamw8bit", None, *[ctypes.c_void_p] * 5, ctypes.c_int64, AdamWParams)
