"""Sinusoids from 1 to exactly 1 / base, all cosines first and then all sines (tensor2tensor's steps; MusicGen)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from headwater.core.base import PositionSpec
from headwater.core.positions import PositionEncoding
from headwater.i18n import _
from headwater.parts import must, part


@part
class CosineSinusoidal(PositionSpec):
    """PE(p) = [cos(p f_0) … cos(p f_n), sin(p f_0) … sin(p f_n)], f_i = base^(-i / n), n = D/2 - 1."""

    base: float = 10000.0
    applies_to: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(self.base > 1, self, _("base must be above 1"), self.base, _("10000 is usual"))

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        must(
            width % 2 == 0 and width >= 4,
            self,
            _("the width must be even, from 4 on"),
            width,
            _("choose an even d_model"),
        )
        return CosineEncoding(width, self.base)


class CosineEncoding(PositionEncoding):
    """The sinusoids of CosineSinusoidal, computed for the positions of a forward pass. inv_freq [D/2]."""

    inv_freq: Tensor

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("inv_freq", torch.empty(width // 2), persistent=False)

    def init_buffers(self) -> None:
        count = self.inv_freq.numel()
        steps = torch.arange(count, dtype=torch.float64, device=self.inv_freq.device) / (count - 1)
        self.inv_freq.copy_(self.base**-steps)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None] * self.inv_freq
        return x + torch.cat((angle.cos(), angle.sin()), -1).to(x.dtype)
