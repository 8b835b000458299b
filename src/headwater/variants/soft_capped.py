"""Attention whose scores cannot grow: cap · tanh(score / cap) (Gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.core.kernels import Kernel
from headwater.core.kinds import Attending
from headwater.parts import must, part


@part
class SoftCapped(Attending):
    """The formula with scores held within ±cap by cap · tanh(score / cap) before the mask (Gemma 2)."""

    cap: float

    def __post_init__(self) -> None:
        must(self.cap > 0, self, "cap must be above 0", self.cap, "50 is usual")

    def build(self, scale: float, dropout: float) -> Kernel:
        return SoftCappedKernel(scale, dropout, self.cap)


class SoftCappedKernel(Kernel):
    def __init__(self, scale: float, dropout: float, cap: float) -> None:
        super().__init__(scale, dropout)
        self.cap = cap

    def shaped(self, scores: Tensor) -> Tensor:
        return self.cap * torch.tanh(scores / self.cap)
