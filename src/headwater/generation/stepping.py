"""One step of a decoder in C (fast/step.c) over the cache of a running batch: the same arithmetic as its modules.

A model with anything in it that step.c does not know is left to its modules; nothing has to be asked for, and nothing
is lost but time. A law in the tests says that both agree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from operator import add, is_
from typing import Any

import torch
from torch import Tensor

from headwater.fast import runner
from headwater.fast.library import library
from headwater.fast.plan import Plan, Unknown, known
from headwater.generation.slots import Slots


class Stepper(runner.Runner):
    @classmethod
    def of(cls, model: Any) -> Stepper | None:
        try:
            known(library() is not None)
            return cls(Plan(model))
        except Unknown:
            return None

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.slots = [block.self_attn.slot(step) for step, block in enumerate(plan.blocks)]
        self.ears = [block.cross_attn.slot(step) for step, block in enumerate(plan.blocks) if plan.crosses]
        self._pinned: list[tuple[Tensor, Tensor]] = []

    def takes(self, slots: Slots, texts: Sequence[Sequence[int]]) -> bool:
        return self.can_look_up(texts, max(map(add, slots.lengths, map(len, texts))))

    @torch.inference_mode()
    def read(self, slots: Slots, texts: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Read new tokens; scores after the last ones of each row, row after row [.., V]."""
        begins, sources = slots.lengths, slots.hears
        given = [
            (token, begin + i, row, sources[row], begin + i + 1)
            for row, (begin, text) in enumerate(zip(begins, texts, strict=True))
            for i, token in enumerate(text)
        ]
        ends = accumulate(map(len, texts))
        asked = [i for end, text in zip(ends, texts, strict=True) for i in range(end - min(last, len(text)), end)]
        self._pin(slots, max(map(add, begins, map(len, texts))))
        self.tell(
            slots.homes(self.whole.length), None if slots.heard is None else slots.heard.sum(1, dtype=torch.int32)
        )
        scores = torch.empty(len(asked), self.whole.vocab)
        for first in range(0, len(given), runner.TOGETHER):
            some = given[first : first + runner.TOGETHER]
            before, after = (bisect_left(asked, i) for i in (first, first + len(some)))
            self.run(some, [i - first for i in asked[before:after]], scores[before:after])
        slots.held = [
            held._replace(length=held.length + len(text)) for held, text in zip(slots.held, texts, strict=True)
        ]
        return scores

    def _pin(self, slots: Slots, columns: int) -> None:
        """Tell C where the keys and values lie, where they have moved since the last step."""
        kept = [*map(slots.room.get, self.slots), *map(slots.sources.get, self.ears)]
        same = len(kept) == len(self._pinned) and all(map(is_, kept, self._pinned))
        if same and columns <= self.whole.length and len(slots.held) <= self._pinned[0][0].shape[0]:
            return
        self._pinned = []  # until all of it is told
        _, kv_heads, head_dim, _ = self.plan.shape
        slots.reserve(self.slots, columns, kv_heads, head_dim)
        pairs = [slots.room[slot] for slot in self.slots]
        heard = self._heard(slots)
        self.attach(pairs, heard)
        self._pinned = [*pairs, *heard]

    def _heard(self, slots: Slots) -> list[tuple[Tensor, Tensor]]:
        """The source's keys and values for each layer, worked out once for a source."""
        for slot, block in zip(self.ears, self.plan.blocks, strict=bool(self.ears)):
            if slot not in slots.sources:
                assert slots.told is not None
                slots.sources[slot] = block.cross_attn.keys(slots.told.states)
            k, v = slots.sources[slot]
            slots.sources[slot] = k.float().contiguous(), v.float().contiguous()
        slots.told = None
        return [slots.sources[slot] for slot in self.ears]
