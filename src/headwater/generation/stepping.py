"""One step of a decoder in C (fast/step.c) over the cache of a running batch: the same arithmetic as its modules.

A model with anything in it that step.c does not know is left to its modules; nothing has to be asked for, and nothing
is lost but time. A law in the tests says that both agree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from operator import add
from typing import Any

import torch
from torch import Tensor

from headwater.fast.library import library
from headwater.fast.plan import Plan, Unknown, known
from headwater.fast.structures import PANEL, TILE, Scratch, Token
from headwater.generation.slots import Slots

FEW = 8  # tokens of one text that are read in steps; a longer text is the modules' to read


class Stepper:
    """step.c for one model whose weights stay where they are while it lives."""

    @classmethod
    def of(cls, model: Any) -> Stepper | None:
        try:
            known(library() is not None)
            return cls(model)
        except Unknown:
            return None

    def __init__(self, model: Any) -> None:
        self.plan = Plan(model)
        self.whole, self.layers = self.plan.whole, self.plan.layers
        heads, kv_heads, head_dim, _ = self.plan.shape
        self.slots = [block.self_attn.slot(step) for step, block in enumerate(self.plan.blocks)]
        self.wide = (heads + 2 * kv_heads) * head_dim
        self.most = max(self.whole.d_model, self.plan.d_ff, heads * head_dim)
        self._pinned: tuple[tuple[int, int], ...] = ()
        self._scratch: tuple[int, Scratch, list[Tensor]] = (0, Scratch(), [])
        self._places: Tensor | None = None

    def takes(self, slots: Slots, texts: Sequence[Sequence[int]]) -> bool:
        """A few tokens in all, or one a row for any number of rows. What C could not look up, modules refuse."""
        tokens = [token for text in texts for token in text]
        few, last = len(tokens) <= max(FEW, len(texts)), self.whole.table.rows - 1
        fit = max(map(add, slots.lengths, map(len, texts))) <= self.plan.longest
        return few and fit and 0 <= min(tokens) <= max(tokens) <= last

    @torch.inference_mode()
    def read(self, slots: Slots, texts: list[list[int]]) -> Tensor:
        """Read one or a few new tokens a row; scores [tokens, V] after each, row after row."""
        begins, sources = slots.lengths, slots.hears
        places = [begins[row] + i for row, text in enumerate(texts) for i in range(len(text))]
        rows = [row for row, text in enumerate(texts) for _ in text]
        tokens = [token for text in texts for token in text]
        self._pin(slots, max(places) + 1)
        given = (Token * len(tokens))(*map(Token, tokens, places, rows, [sources[row] for row in rows]))
        home, lengths = self._tell(slots)
        cos, sin = self._angles(places)
        logits = torch.empty(len(tokens), self.whole.vocab)
        pointers = [c_void_p(t.data_ptr()) for t in (cos, sin)]
        library().step(  # type: ignore[union-attr]
            ctypes.byref(self.whole), given, len(tokens), *pointers, self._room(len(tokens)), self.most,
            c_void_p(logits.data_ptr()),
        )  # fmt: skip
        del home, lengths  # C has read them
        slots.held = [
            held._replace(length=held.length + len(text)) for held, text in zip(slots.held, texts, strict=True)
        ]
        return logits

    def _angles(self, places: list[int]) -> tuple[Tensor, Tensor]:
        angles = self.plan.position.angles(torch.tensor([places]), torch.float32)
        if angles is None:
            return torch.empty(0), torch.empty(0)
        return angles[0].contiguous(), angles[1].contiguous()

    def _tell(self, slots: Slots) -> tuple[Tensor | None, Tensor | None]:
        """Tell C in whose slots each row's tokens lie, and how long the sources are."""
        home = slots.homes(self.whole.length)
        lengths = None if slots.heard is None else slots.heard.sum(1, dtype=torch.int32)
        self.whole.home = None if home is None else home.data_ptr()
        self.whole.source_length = None if lengths is None else lengths.data_ptr()
        return home, lengths

    def _pin(self, slots: Slots, columns: int) -> None:
        """Tell C where the keys and values lie, where they have moved since the last step."""
        _, kv_heads, head_dim, _ = self.plan.shape
        slots.reserve(self.slots, columns, kv_heads, head_dim)
        pairs = [slots.room[slot] for slot in self.slots]
        heard = self._heard(slots) if self.plan.crosses else []
        pinned = tuple((kept.data_ptr(), kept.shape[2]) for pair in (*pairs, *heard) for kept in pair)
        if pinned == self._pinned:
            return
        self.whole.length, self.whole.heard = pairs[0][0].shape[2], heard[0][0].shape[2] if heard else 0
        assert all(_plain(kept, self.whole.length) for pair in pairs for kept in pair)
        assert all(_plain(kept, self.whole.heard) for pair in heard for kept in pair)
        for layer, (k, v) in zip(self.layers, pairs, strict=True):
            layer.keys, layer.values = k.data_ptr(), v.data_ptr()
        for layer, (k, v) in zip(self.layers, heard, strict=bool(heard)):
            layer.source_keys, layer.source_values = k.data_ptr(), v.data_ptr()
        self._places = self.plan.places(self.whole.length)
        self.whole.places = None if self._places is None else self._places.data_ptr()
        self._pinned = pinned
        self._scratch = (0, Scratch(), [])

    def _heard(self, slots: Slots) -> list[tuple[Tensor, Tensor]]:
        """The source's keys and values for each layer, worked out once for a source."""
        for step, block in enumerate(self.plan.blocks):
            slot = block.cross_attn.slot(step)
            if slot not in slots.sources:
                assert slots.told is not None
                slots.sources[slot] = block.cross_attn.keys(slots.told.states)
            k, v = slots.sources[slot]
            slots.sources[slot] = k.contiguous(), v.contiguous()
        slots.told = None
        return [slots.sources[block.cross_attn.slot(step)] for step, block in enumerate(self.plan.blocks)]

    def _room(self, rows: int) -> Scratch:
        """Room for so many rows; fewer may use it as well."""
        if rows > self._scratch[0]:
            rows = -(-rows // TILE) * TILE
            threads, most, seen = torch.get_num_threads(), self.most, self.whole.length + self.whole.heard
            each = (self.whole.d_model, most, self.wide, most, 2 * self.plan.d_ff)
            tensors = [torch.zeros(rows * n) for n in each]
            tensors += [torch.zeros(threads * seen), torch.zeros(threads * PANEL * most)]
            tensors += [torch.zeros(rows * most, dtype=torch.int8), torch.zeros(rows * most // 16)]
            self._scratch = rows, Scratch(*(t.data_ptr() for t in tensors), threads), tensors
        return self._scratch[1]


def _plain(kept: Tensor, columns: int) -> bool:
    """As step.c reads keys and values: float32 without gaps, so many columns."""
    return kept.shape[2] == columns and kept.is_contiguous() and kept.dtype == torch.float32
