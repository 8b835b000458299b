"""What runs step.c over a plan: its scratch room, what depends on places, and the call itself."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from headwater.fast.contract import Bounds, Room, check_asked, check_tokens, check_within
from headwater.fast.library import library
from headwater.fast.plan import Plan
from headwater.fast.structures import Token
from headwater.machine.pointers import floats, pointer

TOGETHER = 256  # tokens that meet the weights at once: more would need more room and gain nothing
Pair = tuple[Tensor, Tensor]


class Runner:
    """step.c for one stack whose weights stay where they are while it lives."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.whole, self.layers = plan, plan.whole, plan.layers
        heads, kv_heads, head_dim, _ = plan.shape
        self.wide = (heads + 2 * kv_heads) * head_dim
        self.most = max(self.whole.d_model, plan.d_ff, heads * head_dim)
        self._room: Room | None = None
        self._held: list[Tensor | Pair | None] = []  # what C holds pointers to, besides the weights
        self._told: tuple[Tensor | None, Tensor | None] = (None, None)
        self._attached = self._bounds = Bounds(self.whole.table.rows, 0, 0, 0, 0)

    def can_look_up(self, texts: Sequence[Sequence[int]], longest: int) -> bool:
        """What C could not look up, modules refuse."""
        tokens = [token for text in texts for token in text]
        return longest <= self.plan.longest and min(tokens) >= 0 and max(tokens) < self.whole.table.rows

    def attach(self, cache: Sequence[Pair], sources: Sequence[Pair] = ()) -> None:
        """Tell C where keys and values lie: of the cache [slots, G, length, K], of sources [sources, G, heard, K]."""
        _, kv_heads, head_dim, _ = self.plan.shape
        slots, _, length, _ = cache[0][0].shape
        rows, _, heard, _ = sources[0][0].shape if sources else (0, 0, 0, 0)
        self._held = [*cache, *sources, *self._shape(length, heard)]
        for layer, (k, v) in zip(self.layers, cache, strict=True):
            layer.keys, layer.values = (floats(t, slots, kv_heads, length, head_dim) for t in (k, v))
        for layer, (k, v) in zip(self.layers, sources, strict=bool(sources)):
            layer.source_keys, layer.source_values = (floats(t, rows, kv_heads, heard, head_dim) for t in (k, v))
        positions = int(min(length, self.plan.longest))
        self._attached = self._bounds = Bounds(self.whole.table.rows, positions, slots, rows, length)

    def _shape(self, length: int, heard: int) -> list[Tensor | None]:
        """Tell C how many columns the cache and the sources have, and what depends on positions."""
        self.whole.length, self.whole.heard = length, heard
        places, angles = self.plan.places(length), self.plan.angles(length)
        self.whole.places = floats(places, int(min(length, self.plan.longest)), self.whole.d_model)
        self.whole.cos, self.whole.sin = (floats(t, length, self.whole.turned // 2) for t in angles or (None, None))
        self._room = None
        return [places, *(angles or ())]

    def tell(self, home: Tensor | None, source_lengths: Tensor | None) -> None:
        """home [rows, length]: in whose slot a token's keys lie; source_lengths [sources]. Called before each read."""
        bounds, self._told = self._attached, (home, source_lengths)
        self.whole.home = self.whole.source_length = None
        if home is not None:
            check_within(home, bounds.slots - 1)
            self.whole.home = pointer(home, torch.int32, len(home), bounds.length)
            bounds = bounds._replace(slots=min(bounds.slots, len(home)))
        if source_lengths is not None:
            check_within(source_lengths, self.whole.heard)
            self.whole.source_length = pointer(source_lengths, torch.int32, len(source_lengths))
        if self.plan.crosses:
            known = 0 if source_lengths is None else len(source_lengths)
            bounds = bounds._replace(sources=min(bounds.sources, known))
        self._bounds = bounds

    def run(self, given: Sequence[tuple[int, ...]], asked: Sequence[int], out: Tensor) -> None:
        """given: the fields of each Token; out [asked, V or D] their scores, or states where there is no head."""
        check_tokens(given, self._bounds, self.plan.crosses)
        check_asked(asked, len(given))
        to = c_void_p(pointer(out, torch.float32, len(asked), self.whole.vocab))
        threads = torch.get_num_threads()
        if self._room is None or not self._room.serves(len(given), threads):
            self._room = Room(self.whole, self.wide, self.most, len(given), threads)
        rows = (Token * len(given))(*(Token(*one) for one in given))
        library().step(  # type: ignore[union-attr]
            ctypes.byref(self.whole), rows, len(given), (c_int32 * len(asked))(*asked), len(asked),
            self._room.scratch, self.most, to,
        )  # fmt: skip


def lots(sizes: Sequence[int]) -> Iterator[range]:
    """Neighbours whose sizes together stay within TOGETHER, as far as a single one does."""
    first, total = 0, 0
    for i, size in enumerate(sizes):
        if i > first and total + size > TOGETHER:
            yield range(first, i)
            first, total = i, 0
        total += size
    yield range(first, len(sizes))
