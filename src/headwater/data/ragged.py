"""Rows of unequal length in one flat array: compact, and padded into a batch without a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headwater.errors import BadInput


class Ragged:
    """Row i is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        sound = (
            offsets.ndim == values.ndim == 1 and len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == len(values)
        )
        if not sound or (np.diff(offsets) < 0).any():
            raise BadInput("offsets must rise from 0 to the number of values; the rows were not written whole")
        self.values, self.offsets = values, offsets

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | np.ndarray], dtype: np.dtype | type = np.int32) -> Ragged:
        held = [np.asarray(row, dtype) for row in rows]
        offsets = np.zeros(len(held) + 1, np.int64)
        np.cumsum([len(row) for row in held], out=offsets[1:])
        return cls(np.concatenate(held) if held else np.zeros(0, dtype), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(row)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        """These rows, in this order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1][rows], lengths) + within], offsets)

    def cut(self, most: int) -> Ragged:
        """Every row up to its first `most` values."""
        within = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)
        return Ragged(self.values[within < most], np.concatenate([[0], np.cumsum(np.minimum(self.lengths, most))]))

    def wrapped(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> Ragged:
        """Every row with these ids at its start and at its end."""
        extra = len(before) + len(after)
        offsets = self.offsets - self.offsets[0] + extra * np.arange(len(self) + 1)
        values = np.empty(offsets[-1], np.int64)
        inside = np.ones(len(values), bool)
        for place, token in enumerate(before):
            values[offsets[:-1] + place], inside[offsets[:-1] + place] = token, False
        for place, token in enumerate(reversed(after), 1):
            values[offsets[1:] - place], inside[offsets[1:] - place] = token, False
        values[inside] = self.values
        return Ragged(values, offsets)

    def padded(self, pad: int, width: int | None = None) -> np.ndarray:
        """[B, L]: every row from the left, the rest `pad`; L is the longest row, or `width` where all rows fit."""
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        width = longest if width is None else width
        if longest > width:
            raise BadInput(f"rows must have at most {width} tokens, the longest has {longest}; cut them or widen")
        out = np.full((len(self), width), pad, np.int64)
        out[np.arange(width) < lengths[:, None]] = self.values
        return out


def smallest_type(largest: int) -> type:
    """The smallest whole-number type that holds ids up to `largest`."""
    return np.uint16 if largest < 2**16 else np.uint32
