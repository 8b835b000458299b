"""Formulas of a walk as text, with the matrices that they name.

A small grammar, printed by the page as it stands and parsed by the tests, which multiply every formula out:

    q = n W_q + b_q                                     a matrix product is two factors side by side
    n = (x − mean(x)) / √(var(x) + 1e-05) · γ1 + β1     · and / act element by element; mean, var are of a row
    q_r = q · cos + rot(q) · sin                        rot(a, b) = (−b, a) on the two halves of each row
    S_m = S where M = 1, else −∞
    A = softmax(S_m)                                    of each row
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.feedforward import ACTIVATIONS
from headwater.core.norms import LayerNormLayer, RMSNormLayer
from headwater.inspection.results import plain

MOST_SENT = 64  # rows and columns


@dataclass(frozen=True)
class Table:
    """A matrix with a name. rows, columns: what they stand for (tokens, source, words or dims)."""

    name: str
    values: Tensor
    rows: str = "tokens"
    columns: str = "dims"

    def plain(self) -> dict[str, Any]:
        """All of it where it is small, else its first rows and columns; shape is always that of all. −∞ is null."""
        matrix = torch.atleast_2d(self.values.detach().float())
        sent = plain(matrix[:MOST_SENT, :MOST_SENT].numpy())
        return {
            "name": self.name,
            "shape": list(matrix.shape),
            "rows": self.rows,
            "columns": self.columns,
            "values": sent,
        }


@dataclass(frozen=True)
class Formula:
    """The right side of a formula, and the weights in it."""

    text: str
    weights: tuple[Table, ...] = ()


def linear(x: str, layer: Any, name: str, rows: slice | Tensor = slice(None)) -> Formula:
    """x W_name + b_name, of some of the layer's outputs."""
    weight = Table(f"W_{name}", _weight(layer, rows).T, "dims")
    if layer.bias is None:
        return Formula(f"{x} W_{name}", (weight,))
    return Formula(f"{x} W_{name} + b_{name}", (weight, Table(f"b_{name}", layer.bias[rows], "dims")))


def _weight(layer: Any, rows: slice | Tensor) -> Tensor:
    """Rows of a weight; of packed ones only those are widened."""
    if not hasattr(layer, "widened"):
        return layer.weight[rows]
    if isinstance(rows, slice):
        first, last, _ = rows.indices(layer.rows)
        return layer.widened(first, last)
    return torch.cat([layer.widened(n, n + 1) for n in rows.tolist()])


def norm(x: str, module: nn.Module, number: int) -> Formula:
    """A norm written out with its own eps; number tells its weights from those of other norms."""
    gain = f"γ{number}"
    if isinstance(module, RMSNormLayer):
        text = f"{x} / √(mean({x}²) + {module.eps or 0:g}) · {gain}"
        return Formula(text, (Table(gain, module.gain(), "dims"),))
    if isinstance(module, LayerNormLayer):
        text = f"({x} − mean({x})) / √(var({x}) + {module.eps:g}) · {gain}"
        weights = (Table(gain, module.weight, "dims"),)
        bias: Tensor | None = module.bias
        if bias is None:
            return Formula(text, weights)
        return Formula(f"{text} + β{number}", (*weights, Table(f"β{number}", bias, "dims")))
    return Formula(f"{type(module).__name__}({x})")


def activation(act: Callable[[Tensor], Tensor]) -> str:
    """The name of an activation function."""
    return next(name for name, known in ACTIVATIONS.items() if known is act)


def times(x: str, factor: float) -> str:
    """x · factor, and x alone where the factor is one."""
    return x if factor == 1 else f"{x} · {factor:.8g}"
