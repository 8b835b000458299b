"""What runs step.c over a plan: its scratch room, what depends on places, and the call itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from headwater.fast.library import library
from headwater.fast.plan import Plan
from headwater.fast.structures import FEW, PANEL, TILE, Scratch, Token

TOGETHER = 256  # tokens that meet the weights at once: more would need more room and gain nothing


class Runner:
    """step.c for one stack whose weights stay where they are while it lives."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.whole, self.layers = plan, plan.whole, plan.layers
        heads, kv_heads, head_dim, _ = plan.shape
        self.wide = (heads + 2 * kv_heads) * head_dim
        self.most = max(self.whole.d_model, plan.d_ff, heads * head_dim)
        self._scratch: tuple[int, Scratch, list[Tensor]] = (0, Scratch(), [])
        self._kept: list[Tensor] = []  # what C holds pointers to

    def can_look_up(self, texts: Sequence[Sequence[int]], longest: int) -> bool:
        """What C could not look up, modules refuse."""
        tokens = [token for text in texts for token in text]
        return longest <= self.plan.longest and min(tokens) >= 0 and max(tokens) < self.whole.table.rows

    def shape(self, length: int, heard: int = 0) -> None:
        """Tell C how many columns the cache and the sources have."""
        self.whole.length, self.whole.heard = length, heard
        told = {
            "places": self.plan.places(length),
            **dict(zip(("cos", "sin"), self.plan.angles(length) or (), strict=False)),
        }
        self._kept = [tensor for tensor in told.values() if tensor is not None]
        for name, tensor in told.items():
            setattr(self.whole, name, None if tensor is None else tensor.data_ptr())
        self._scratch = (0, Scratch(), [])

    def run(self, given: Sequence[tuple[int, ...]], asked: Sequence[int], out: Tensor) -> None:
        """given: the fields of each Token; out [asked, V or D] their scores, or states where there is no head."""
        rows = (Token * len(given))(*(Token(*one) for one in given))
        library().step(  # type: ignore[union-attr]
            ctypes.byref(self.whole), rows, len(given), (c_int32 * len(asked))(*asked), len(asked),
            self._room(len(given)), self.most, c_void_p(out.data_ptr()),
        )  # fmt: skip

    def _room(self, rows: int) -> Scratch:
        """Room for so many rows; fewer may use it as well."""
        if rows > self._scratch[0]:
            rows = max(-(-rows // TILE) * TILE, FEW * torch.get_num_threads())
            threads, most, seen = torch.get_num_threads(), self.most, self.whole.length + self.whole.heard
            each = (self.whole.d_model, most, self.wide, most, 2 * self.plan.d_ff)
            tensors = [torch.zeros(rows * n) for n in each]
            tensors += [torch.zeros(threads * seen), torch.zeros(threads * PANEL * most)]
            tensors += [torch.zeros(rows * most, dtype=torch.int8), torch.zeros(rows * most // 16)]
            self._scratch = rows, Scratch(*(t.data_ptr() for t in tensors), threads), tensors
        return self._scratch[1]


def lots(sizes: Sequence[int]) -> Iterator[range]:
    """Neighbours whose sizes together stay within TOGETHER, as far as a single one does."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > TOGETHER:
            yield range(first, i)
            first, total = i, 0
        total += size
    yield range(first, len(sizes))
