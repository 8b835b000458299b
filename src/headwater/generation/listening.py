"""The encoder in C (fast/step.c): sources read whole, each token sees all of its own source and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwater.fast.library import library
from headwater.fast.plan import Plan, Unknown, known
from headwater.fast.runner import Runner, lots

LONGEST = 4096  # tokens of a source; room for a longer one is better made by the modules, a layer at a time


class Listener(Runner):
    @classmethod
    def of(cls, model: Any) -> Listener | None:
        try:
            known(library() is not None)
            return cls(Plan(model, "encoder"))
        except Unknown:
            return None

    def takes(self, sources: Sequence[Sequence[int]]) -> bool:
        longest = max(map(len, sources))
        return longest <= LONGEST and all(map(len, sources)) and self.can_look_up(sources, longest)

    @torch.inference_mode()
    def read(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """[B, S, D] the states of the sources; zeros beyond the end of each."""
        sizes = [len(source) for source in sources]
        states = torch.zeros(len(sources), max(sizes), self.whole.d_model)
        for lot in lots(sizes):
            self._read(sources[lot.start : lot.stop], states[lot.start : lot.stop])
        return states

    def _read(self, sources: Sequence[Sequence[int]], states: Tensor) -> None:
        _, kv_heads, head_dim, _ = self.plan.shape
        length = max(map(len, sources))
        keys, values = torch.empty(2, len(sources), kv_heads, length, head_dim)
        # a layer's keys are of no use to the next one, which may write over them
        self.attach([(keys, values)] * len(self.layers))
        given = [
            (token, place, row, 0, len(source))
            for row, source in enumerate(sources)
            for place, token in enumerate(source)
        ]
        out = torch.empty(len(given), self.whole.d_model)
        self.run(given, range(len(given)), out)
        for row, part in zip(states, out.split([len(source) for source in sources]), strict=True):
            row[: len(part)] = part
