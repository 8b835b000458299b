"""LoRA (Hu et al. 2021), rsLoRA (Kalajdzievski 2023) and DoRA (Liu et al. 2024): a low-rank addition to a weight.

    LoRA    y = W x + b + s · B A x        A [r, in], B [out, r], s = alpha / r
    rsLoRA  the same with s = alpha / √r, which keeps large ranks from learning slowly
    DoRA    y = m / ‖W + s B A‖ · (W x + s B A x) + b, m for each row, the norm constant in the backward pass

A is random and B zero at the start, so that the model is unchanged before the first step.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import Transformer, functional
from headwater.core.base import check_dropout, check_positive
from headwater.cpu.decode import LinearTerms
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.parts import must, part
from headwater.quantization.layers import QuantizedLinear
from headwater.tuning.base import TuningMethod
from headwater.tuning.embedding import LowRankTable, TunedEmbedding, embedding_paths, tuned_embedding
from headwater.tuning.linear import LinearChange, TunedLinear, check_rank, check_width, linear_sizes, tuned_linear
from headwater.tuning.paths import linear_paths, match_paths

QUERIES_AND_VALUES = ("*attn.q", "*attn.v")  # as in the paper


@part
class LoRA(TuningMethod):
    """Low-rank adaptation of linear layers, and of tables of tokens (*.embed.tokens).

    r: the rank. alpha: the scale is alpha / r; 2 r if it is not given. target: patterns of paths, or "all-linear".
    """

    r: int = 8
    alpha: float | None = None
    target: str | tuple[str, ...] = QUERIES_AND_VALUES
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "r", _("8 is usual"))
        check_dropout(self)
        must(self.alpha is None or self.alpha > 0, self, _("alpha must be above 0"), self.alpha, _("2 r is usual"))

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return (2 * self.r if self.alpha is None else self.alpha) / self.r

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        tables = embedding_paths(model)
        paths = match_paths(self.target, [*tables, *linear_paths(model)], _("linear layer"))
        layers = [(path, tuned_linear(model, path)) for path in paths if path not in tables]
        check_rank(self.r, layers)
        for path in paths:
            if path in tables:
                self.change_table(path, tuned_embedding(model, path), name, generator)
        for _path, layer in layers:
            layer.add_change(name, self.build(layer, generator))

    def change_table(self, path: str, table: TunedEmbedding, name: str, generator: torch.Generator) -> None:
        """Add the change of a table of tokens, with its initial weights."""
        check_width(self.r, path, min(table.num_embeddings, table.embedding_dim))
        table.add_change(name, LowRankTable(table, self.r, self.scale, generator))

    def build(self, layer: TunedLinear, generator: torch.Generator) -> LowRank:
        """The change of one layer, with its initial weights."""
        return LowRank(layer, self, generator)


@part
class RsLoRA(LoRA):
    """Rank-stabilized LoRA: the scale is alpha / √r."""

    @property
    def scale(self) -> float:
        return super().scale * math.sqrt(self.r)


@part
class DoRA(LoRA):
    """Weight-decomposed LoRA: the low-rank addition gives the direction of each row, a learned magnitude its length."""

    def build(self, layer: TunedLinear, generator: torch.Generator) -> LowRank:
        return LowRankDirection(layer, self, generator)

    def change_table(self, path: str, table: TunedEmbedding, name: str, generator: torch.Generator) -> None:
        raise BadSetting(_("DoRA changes linear layers, and {path} is a table of tokens; use LoRA for it", path=path))


class LowRank(LinearChange):
    """s · B A, added to a linear layer."""

    def __init__(self, layer: TunedLinear, spec: LoRA, generator: torch.Generator) -> None:
        super().__init__()
        width, out, device = linear_sizes(layer)
        bound = 1 / math.sqrt(width)  # torch's and peft's initial values of a linear layer
        initial = torch.empty(spec.r, width).uniform_(-bound, bound, generator=generator)
        self.scale = spec.scale
        self.dropout = spec.dropout
        self.lora_a = nn.Parameter(initial.to(device))
        self.lora_b = nn.Parameter(torch.zeros(out, spec.r, device=device))

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        """y + s · B (A x), in one pass over y."""
        return self.low_rank(x, y)

    def low_rank(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training and self.dropout:
            x = functional.dropout(x, self.dropout)
        hidden = F.linear(x.to(self.lora_a.dtype), self.lora_a)  # [..., r]
        flat = torch.addmm(
            y.flatten(0, -2), hidden.flatten(0, -2).to(y.dtype), self.lora_b.t().to(y.dtype), alpha=self.scale
        )
        return flat.view_as(y)

    def delta(self) -> Tensor:
        """s · B A [out, in]"""
        return self.scale * (self.lora_b.detach() @ self.lora_a.detach())

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return weight + self.delta(), bias

    def terms(self, bias: Tensor | None) -> LinearTerms:
        return LinearTerms(self.lora_a.detach(), self.scale * self.lora_b.detach().float())

    def extra_repr(self) -> str:
        return f"r={len(self.lora_a)}, scale={self.scale:g}"


class LowRankDirection(LowRank):
    """DoRA: rows of W + s B A, scaled to the length m. The lengths of W's rows are computed once."""

    base_norms: Tensor

    def __init__(self, layer: TunedLinear, spec: LoRA, generator: torch.Generator) -> None:
        super().__init__(layer, spec, generator)
        self._base: list[Any] = [layer.base]  # in a list: it is no child of this module
        norms = layer.weight.detach().float().norm(dim=1)  # [out]
        self.register_buffer("base_norms", norms, persistent=False)
        self.magnitude = nn.Parameter(norms.clone())

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        gain = self.magnitude / self.direction_norms()  # [out]
        bias: Tensor | None = self._base[0].bias
        if bias is None:
            return gain * self.low_rank(x, y)
        return gain * self.low_rank(x, y - bias) + bias

    @torch.no_grad()
    def direction_norms(self) -> Tensor:
        """‖W + s B A‖ of each row: √(‖W‖² + 2 s Σ_k B_k (W A_k) + s² B (A Aᵀ) Bᵀ), without the sum W + s B A."""
        products = self._multiply_base(self.lora_a)  # W Aᵀ [out, r]
        gram = self.lora_a @ self.lora_a.t()  # [r, r]
        b = self.lora_b
        cross = 2 * self.scale * (b * products).sum(1)
        square = self.scale**2 * (b @ gram * b).sum(1)
        return (self.base_norms**2 + cross + square).clamp(min=0).sqrt()

    def _multiply_base(self, rows: Tensor) -> Tensor:
        """W rowsᵀ [out, r]"""
        base = self._base[0]
        if isinstance(base, QuantizedLinear):
            return base.multiply(rows).t()
        return F.linear(rows, base.weight.to(rows.dtype)).t()

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        direction = weight + self.delta()
        return (self.magnitude.detach() / direction.norm(dim=1))[:, None] * direction, bias

    @torch.no_grad()
    def terms(self, bias: Tensor | None) -> LinearTerms:
        """gain (W x + s B A x) + b = gain (W x + b) + (1 - gain) b + gain s B A x"""
        gain = self.magnitude / self.direction_norms()
        shift = None if bias is None else (1 - gain) * bias
        return LinearTerms(self.lora_a, gain[:, None] * self.scale * self.lora_b.float(), gain, shift)
