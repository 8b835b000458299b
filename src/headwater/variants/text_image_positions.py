"""Positions of a text followed by a picture: learned for each place of the text, row + column for those of the picture.

place      0 … text-1          text, text+1, …, in rows of `columns`
vector     table[place]        rows[n // columns] + columns[n % columns],  n = place - text       (DALL-E)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core.base import PositionSpec
from headwater.core.positions import PositionEncoding
from headwater.errors import TooLong
from headwater.i18n import _
from headwater.parts import must, part


@part
class TextImagePositions(PositionSpec):
    """Axial positions: one vector for each of `text` places, then the sum of a row's and a column's vector."""

    text: int
    rows: int
    columns: int
    applies_to: ClassVar[str] = "embedding"

    def __post_init__(self) -> None:
        sizes = (self.text, self.rows, self.columns)
        must(min(sizes) >= 1, self, _("text, rows and columns must be at least 1"), sizes, _("correct it"))

    @property
    def max_positions(self) -> int:
        return self.text + self.rows * self.columns

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return TextImageEncoding(self, width)


class TextImageEncoding(PositionEncoding):
    """The tables of TextImagePositions: table [text, D], rows [rows, D], columns [columns, D]."""

    def __init__(self, spec: TextImagePositions, width: int) -> None:
        super().__init__()
        self.text = spec.text
        self.size = spec.max_positions
        self.table = nn.Embedding(spec.text, width)
        self.rows = nn.Embedding(spec.rows, width)
        self.columns = nn.Embedding(spec.columns, width)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and not positions.is_meta and int(positions.max()) >= self.size:
            raise TooLong(
                _(
                    "position: there are {size} places for text and picture, got a token at place {max}; "
                    "shorten the input",
                    size=self.size,
                    max=int(positions.max()),
                )
            )
        place = (positions - self.text).clamp(min=0)  # in the picture
        columns = self.columns.num_embeddings
        picture = self.rows(place // columns) + self.columns(place % columns)
        text = self.table(positions.clamp(max=self.text - 1))
        return x + torch.where((positions < self.text)[..., None], text, picture)
