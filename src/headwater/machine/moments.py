"""AdamW whose moments take eight bits a number instead of thirty-two: the formula, and its C."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.machine.dropout import hashed
from headwater.machine.library import function, serves
from headwater.machine.pointers import Misfit, floats, pointer

BLOCK, LOW = 256, 20  # as in moments.c


class Step(ctypes.Structure):
    """What one step of AdamW needs besides its tensors; by1 and by2 are 1 / (1 - beta ** step)."""

    _fields_ = [(name, ctypes.c_float) for name in ("lr", "decay", "beta1", "beta2", "eps", "by1", "by2")] + [
        (word, ctypes.c_uint32) for word in ("first", "second")
    ]


def no_moments(like: Tensor) -> dict[str, Tensor]:
    """Moments of zero: codes of the shape of the tensor, and for each block what their code 0 would be."""
    codes = {name: torch.zeros(like.shape, dtype=torch.uint8, device=like.device) for name in ("exp_avg", "exp_avg_sq")}
    return codes | {"bases": torch.zeros(-(-like.numel() // BLOCK), 2, dtype=torch.int16, device=like.device)}


def adamw8(w: Tensor, g: Tensor, m: Tensor, v: Tensor, bases: Tensor, step: Step) -> None:
    """One step: w, the codes m and v, and the bases of their blocks become new."""
    shape = -(-w.numel() // BLOCK), 2
    if not g.shape == m.shape == v.shape == w.shape or bases.shape != shape:
        raise Misfit(f"moments must fit the weights {list(w.shape)}, got {[list(t.shape) for t in (g, m, v, bases)]}")
    g = g.contiguous()
    if serves(w, g) and all(t.is_contiguous() for t in (w, m, v, bases)):
        of_codes = (
            pointer(m, torch.uint8, *w.shape),
            pointer(v, torch.uint8, *w.shape),
            pointer(bases, torch.int16, *shape),
        )
        _run()(floats(w, *w.shape), floats(g, *w.shape), *of_codes, w.numel(), step)
        return
    slope, old_m, old_v = g.flatten().float(), *numbers(m, v, bases)
    new_m = step.beta1 * old_m + (1 - step.beta1) * slope
    new_v = step.beta2 * old_v + (1 - step.beta2) * slope * slope
    change = (new_m * step.by1) / ((new_v * step.by2).sqrt() + step.eps)
    w -= (step.lr * step.decay * w + step.lr * change.view(w.shape)).to(w.dtype)
    for old, new in zip((m, v, bases), codes(new_m, new_v, step), strict=True):
        old.copy_(new.view(old.shape))


def numbers(m: Tensor, v: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    """[N] what the codes m and v stand for."""
    of_m, of_v = bases.long().repeat_interleave(BLOCK, 0)[: m.numel()].unbind(1)
    size, code = m.flatten().long() & 127, v.flatten().long()
    found = [
        torch.where(c > 0, ((c + of).clamp(min=0) << LOW).int().view(torch.float32), 0.0)
        for c, of in ((size, of_m), (code, of_v))
    ]
    return torch.where(m.flatten() >= 128, -found[0], found[0]), found[1]


def codes(m: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of numbers, rounded up or down by chance: on average a number stays what it is."""
    n = m.numel()
    noise = hashed(n, step.first, step.second).to(m.device)
    size, code = (x.contiguous().view(torch.int32).long() & 0x7FFFFFFF for x in (m, v))
    most = [F.pad(x, (0, -n % BLOCK)).view(-1, BLOCK).amax(1) for x in (size, code)]
    bases = torch.stack([(most[0] >> LOW) - 126, (most[1] >> LOW) - 254], 1)
    of_m, of_v = bases.repeat_interleave(BLOCK, 0)[:n].unbind(1)
    size = ((size + (noise >> 12)) >> LOW).sub(of_m).clamp(min=0)
    code = ((code + (noise & 0xFFFFF)) >> LOW).sub(of_v)
    code = torch.where(code < 1, (v > 0).long(), code)
    return (size | (m < 0).long() << 7).to(torch.uint8), code.to(torch.uint8), bases.to(torch.int16)


@lru_cache(maxsize=1)
def _run() -> Any:
    return function("adamw8", None, *[ctypes.c_void_p] * 5, ctypes.c_int64, Step)
