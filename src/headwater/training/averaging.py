"""A running average of the weights: often a better model than the last step's, for the price of one more copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwater.training.spread import mine


class Average:
    """average ← decay · average + (1 - decay) · weights, after each step. decay 0 keeps no average.

    In the first steps the decay is smaller, (1 + t) / (10 + t), so that the first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()} if decay else {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        if not self.weights:
            return
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        new = dict(model.named_parameters())
        torch._foreach_lerp_(
            [mine(w) for w in self.weights.values()], [mine(new[n].detach()) for n in self.weights], share
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, kept in self.weights.items():
            kept.copy_(tensors[name])

    @contextmanager
    def used_by(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with the averaged weights; its own come back at the end. Copied, for others look at the memory."""
        own = {name: mine(p.detach()) for name, p in model.named_parameters() if name in self.weights}
        kept = {name: value.clone() for name, value in own.items()}
        try:
            for name, value in own.items():
                value.copy_(mine(self.weights[name]))
            yield model
        finally:
            for name, value in own.items():
                value.copy_(kept[name])
