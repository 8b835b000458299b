"""Axial positions: two small tables in place of one, for long rows (Reformer, Kitaev et al. 2020).

Position p stands in row p // B and column p % B of a grid of A · B positions. Its vector is that of the row beside that
of the column, so A + B vectors are learned and not A · B.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headwater.core.base import PositionSpec
from headwater.core.positions import PositionEncoding
from headwater.errors import TooLong
from headwater.i18n import _
from headwater.parts import must, part


@part
class AxialPositions(PositionSpec):
    """Learned positions on a grid. shape: rows and columns; widths: of their vectors, d_model together."""

    shape: tuple[int, int]
    widths: tuple[int, int]
    applies_to: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        must(
            min(self.shape) >= 1, self, _("shape must be two sizes from 1"), self.shape, _("(64, 64) is 4096 positions")
        )
        must(min(self.widths) >= 1, self, _("widths must be two sizes from 1"), self.widths, _("d_model together"))

    @property
    def max_positions(self) -> int:
        return self.shape[0] * self.shape[1]

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        fits = sum(self.widths) == width
        must(fits, self, _("widths must add up to d_model ({width})", width=width), self.widths, _("correct one"))
        return AxialEncoding(self)


class AxialEncoding(PositionEncoding):
    """rows [A, 1, a] and columns [1, B, b]."""

    def __init__(self, spec: AxialPositions) -> None:
        super().__init__()
        rows, columns = spec.shape
        self.rows = nn.Parameter(torch.empty(rows, 1, spec.widths[0]))
        self.columns = nn.Parameter(torch.empty(1, columns, spec.widths[1]))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        rows = self.rows.shape[0]
        columns = self.columns.shape[1]
        last: Any = None if positions.is_meta else positions.max()
        if last is not None and last >= rows * columns:
            raise TooLong(
                _(
                    "AxialPositions: there are {rows} · {columns} = {size} positions, got a token at position {max}; "
                    "shorten the input to {size} tokens",
                    rows=rows,
                    columns=columns,
                    size=rows * columns,
                    max=int(last),
                )
            )
        return x + torch.cat((self.rows[positions // columns, 0], self.columns[0, positions % columns]), -1)
