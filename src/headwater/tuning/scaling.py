"""IA3 (Liu et al. 2022): learned vectors that scale keys, values and the hidden values of the feed-forward layer.

    key, value      y = l · (W x + b)         l [out]
    feed-forward    y = W (l · x) + b         l [in]

Each l is one at the start, so that the model is unchanged before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.cpu.decode import LinearTerms
from headwater.i18n import _
from headwater.parts import part
from headwater.tuning.base import TuningMethod
from headwater.tuning.linear import LinearChange, TunedLinear, linear_sizes, tuned_linear
from headwater.tuning.paths import linear_paths, match_paths


@part
class IA3(TuningMethod):
    """Scaling of the outputs of linear layers (target), and of the inputs of others (feed_forward)."""

    target: str | tuple[str, ...] = ("*attn.k", "*attn.v")
    feed_forward: str | tuple[str, ...] = "*.ffn.down"

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        known = linear_paths(model)
        for patterns, kind in ((self.target, OutputScale), (self.feed_forward, InputScale)):
            if patterns:
                for path in match_paths(patterns, known, _("linear layer")):
                    layer = tuned_linear(model, path)
                    layer.add_change(name, kind(layer))


class OutputScale(LinearChange):
    """y = l · (W x + b)"""

    def __init__(self, layer: TunedLinear) -> None:
        super().__init__()
        _width, out, device = linear_sizes(layer)
        self.ia3_l = nn.Parameter(torch.ones(out, device=device))

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        return y * self.ia3_l

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        scale = self.ia3_l.detach()
        return scale[:, None] * weight, None if bias is None else scale * bias

    def terms(self, bias: Tensor | None) -> LinearTerms:
        return LinearTerms(gain=self.ia3_l.detach())


class InputScale(LinearChange):
    """y = W (l · x) + b"""

    def __init__(self, layer: TunedLinear) -> None:
        super().__init__()
        width, _out, device = linear_sizes(layer)
        self.ia3_l = nn.Parameter(torch.ones(width, device=device))

    def scale_input(self, x: Tensor) -> Tensor:
        return x * self.ia3_l

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return weight * self.ia3_l.detach(), bias

    def terms(self, bias: Tensor | None) -> LinearTerms:
        return LinearTerms(input_gain=self.ia3_l.detach())
