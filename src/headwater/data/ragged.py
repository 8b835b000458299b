"""Ragged arrays of token ids: encoding texts into them, padding, and packing documents into rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.rng import randint
from headwater.text.tokenizer import Tokenizer


class Ragged:
    """A ragged array: rows of unequal length in one flat array. Row i is values[offsets[i]:offsets[i + 1]]."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        valid = (
            offsets.ndim == values.ndim == 1 and len(offsets) >= 1 and offsets[0] == 0 and offsets[-1] == len(values)
        )
        if not valid or (np.diff(offsets) < 0).any():
            raise BadInput(_("offsets must increase from 0 to the number of values; the data is incomplete or damaged"))
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int] | np.ndarray], dtype: np.dtype | type = np.int32) -> Ragged:
        """A ragged array of these rows."""
        arrays = [np.asarray(row, dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(row) for row in arrays], out=offsets[1:])
        return cls(np.concatenate(arrays) if arrays else np.zeros(0, dtype), offsets)

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
        """A ragged array of these rows, in this order."""
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1][rows], lengths) + within], offsets)

    def truncate(self, max_length: int) -> Ragged:
        """Every row cut to its first max_length values."""
        within = np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)
        offsets = np.concatenate([[0], np.cumsum(np.minimum(self.lengths, max_length))])
        return Ragged(self.values[within < max_length], offsets)

    def with_affixes(self, prefix: Sequence[int] = (), suffix: Sequence[int] = ()) -> Ragged:
        """Every row with these ids at its start and at its end."""
        extra = len(prefix) + len(suffix)
        offsets = self.offsets - self.offsets[0] + extra * np.arange(len(self) + 1)
        values = np.empty(offsets[-1], np.int64)
        is_inner = np.ones(len(values), bool)
        for i, token in enumerate(prefix):
            values[offsets[:-1] + i] = token
            is_inner[offsets[:-1] + i] = False
        for i, token in enumerate(reversed(suffix), 1):
            values[offsets[1:] - i] = token
            is_inner[offsets[1:] - i] = False
        values[is_inner] = self.values
        return Ragged(values, offsets)

    def to_padded(self, pad_id: int, width: int | None = None) -> np.ndarray:
        """[B, L]: rows padded on the right with pad_id; L is the longest row, or `width`."""
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        width = longest if width is None else width
        if longest > width:
            raise BadInput(
                _(
                    "rows must have at most {width} tokens, the longest has {longest}; truncate them or raise "
                    "the width",
                    width=width,
                    longest=longest,
                )
            )
        out = np.full((len(self), width), pad_id, np.int64)
        out[np.arange(width) < lengths[:, None]] = self.values
        return out


def smallest_dtype(max_value: int) -> type:
    """The smallest integer dtype for ids up to max_value."""
    return np.uint16 if max_value < 2**16 else np.uint32


# ---------------------------------------------------------------------------- language modelling: streams and packing


class PackedRows(NamedTuple):
    """Packed documents: ids [R, L], and document_ids [R, L]: the document's number in its row, from 1; 0 is padding."""

    ids: np.ndarray
    document_ids: np.ndarray


def stream_starts(num_tokens: int, context_length: int, seed: int, epoch: int) -> np.ndarray:
    """Start offsets of the rows of one epoch in a token stream: no overlap, with another shift in each epoch.

    Row i is stream[start : start + context_length + 1]; its last token is only a target. The shift is random and below
    the context length; tokens before it, and a remainder shorter than a row, are left to other epochs.
    """
    if num_tokens < context_length + 1:
        raise BadInput(
            _(
                "the text must have at least {min_tokens} tokens for a context of {context_length}, it has "
                "{num_tokens}; give more text or a shorter context",
                min_tokens=context_length + 1,
                context_length=context_length,
                num_tokens=num_tokens,
            )
        )
    num_unused = (num_tokens - 1) % context_length
    shift = int(randint(min(context_length, num_unused + 1), seed, epoch, "shift"))
    return np.arange(shift, num_tokens - context_length, context_length)


def stream_rows(stream: np.ndarray, starts: np.ndarray, context_length: int) -> np.ndarray:
    """[B, context_length + 1]: these rows of the stream."""
    return stream[starts[:, None] + np.arange(context_length + 1)].astype(np.int64)


def pack_documents(documents: Ragged, row_length: int) -> list[np.ndarray]:
    """Sequence packing: which documents share a row; best-fit decreasing, no document is cut. Deterministic.

    Rows are ordered by the first document in them, so neighbouring documents stay near.
    """
    lengths = documents.lengths
    if len(lengths) and int(lengths.max()) > row_length:
        raise BadInput(
            _(
                "document {index} has {length} tokens, a row has {row_length}; split the documents first",
                index=int(lengths.argmax()),
                length=int(lengths.max()),
                row_length=row_length,
            )
        )

    # longest document first, into the fullest row that has space, else into a new one
    free: list[int] = []  # free tokens of each open row, ascending
    open_rows: list[list[int]] = []  # documents of each open row, in the same order
    for document in np.argsort(-lengths, kind="stable"):
        length = int(lengths[document])
        best = bisect_left(free, length)  # the fullest row that has space
        space: int = row_length
        row: list[int] = []
        if best < len(free):
            space = free.pop(best)
            row = open_rows.pop(best)
        row.append(int(document))
        position = bisect_left(free, space - length)
        free.insert(position, space - length)
        open_rows.insert(position, row)

    # documents in order within a row, and rows in the order of their first document
    rows = [np.array(sorted(row)) for row in open_rows]
    return sorted(rows, key=lambda row: int(row[0]))


def build_packed_rows(documents: Ragged, rows: list[np.ndarray], row_length: int, pad_id: int) -> PackedRows:
    """The packed rows as arrays."""
    order = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    packed = documents.take(order)

    # number of each document in its row, from 1
    counts = np.array([len(row) for row in rows], np.int64)
    row_of_document = np.repeat(np.arange(len(rows)), counts)
    numbers = np.arange(len(row_of_document)) - np.repeat(np.cumsum(counts) - counts, counts) + 1

    # join the documents of each row
    sizes = np.bincount(row_of_document, weights=packed.lengths, minlength=len(rows)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    ids = Ragged(packed.values, offsets).to_padded(pad_id, row_length)
    document_ids = Ragged(np.repeat(numbers, packed.lengths), offsets).to_padded(0, row_length)
    return PackedRows(ids, document_ids)


# ----------------------------------------------------------------------------------------------------------- encoding

TEXTS_PER_CALL = 4096  # texts encoded in one call of the backend


def encode_rows(tokenizer: Tokenizer, texts: Iterable[str], add_special_tokens: bool = False) -> Ragged:
    """Encode texts: one row of ids for each, in the smallest dtype of the vocabulary."""
    dtype = smallest_dtype(len(tokenizer))
    rows: list[np.ndarray] = [np.zeros(0, dtype)]
    lengths = [0]
    for group in _chunked(texts):
        ids = tokenizer.encode_batch(group, add_special_tokens=add_special_tokens)
        lengths += [len(row) for row in ids]
        rows.append(np.fromiter(chain.from_iterable(ids), dtype))
    return Ragged(np.concatenate(rows), np.cumsum(lengths))


def _chunked(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while group := list(islice(remaining, TEXTS_PER_CALL)):
        yield group
