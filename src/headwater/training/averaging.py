"""A running average of the weights: often a better model than the last step's, for the price of one more copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


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
        torch._foreach_lerp_(list(self.weights.values()), [new[n].detach() for n in self.weights], share)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, kept in self.weights.items():
            kept.copy_(tensors[name])

    @contextmanager
    def used_by(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with the averaged weights; its own come back at the end."""
        if not self.weights:
            yield model
            return
        own = dict(model.named_parameters())
        kept = {name: own[name].data for name in self.weights}
        try:
            for name, value in self.weights.items():
                own[name].data = value
            yield model
        finally:
            for name, value in kept.items():
                own[name].data = value
