"""Soft-capped attention: scores become cap · tanh(score / cap) before the mask (Gemma 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.core.base import KernelConfig, KernelSpec
from headwater.core.kernels import Kernel
from headwater.i18n import _
from headwater.parts import must, part


@part
class SoftCap(KernelSpec):
    """Eager attention with scores soft-capped to ±cap: cap · tanh(score / cap) before the mask (Gemma 2)."""

    cap: float

    def __post_init__(self) -> None:
        must(self.cap > 0, self, _("cap must be above 0"), self.cap, _("50 is usual"))

    def build(self, config: KernelConfig) -> Kernel:
        return SoftCapKernel(config, self.cap)


class SoftCapKernel(Kernel):
    """The module of SoftCap."""

    def __init__(self, config: KernelConfig, cap: float) -> None:
        super().__init__(config)
        self.cap = cap

    def transform_scores(self, scores: Tensor) -> Tensor:
        return self.cap * torch.tanh(scores / self.cap)
