"""Rows of unequal length as one rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadInput


class Batch(NamedTuple):
    """ids [B, Q], and keep [B, Q]: True where a token is real."""

    ids: Tensor
    keep: Tensor


def pad(rows: Sequence[Sequence[int]], fill: int, side: str = "right") -> Batch:
    """Pad rows of ids to the longest.

    >>> pad([[1, 2], [3]], fill=0, side="left").ids.tolist()
    [[1, 2], [0, 3]]
    """
    if side not in ("left", "right"):
        raise BadInput(f"padding goes on the left or the right, got {side!r}")
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), fill, dtype=torch.long)
    keep = torch.zeros((len(rows), width), dtype=torch.bool)
    for n, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[n, place] = torch.tensor(row, dtype=torch.long)
        keep[n, place] = True
    return Batch(ids, keep)
