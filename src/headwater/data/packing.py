"""Running text for language models: as one stream cut into rows, or as documents packed whole into rows."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np

from headwater.data.chance import below
from headwater.data.ragged import Ragged
from headwater.errors import BadInput


class Rows(NamedTuple):
    """[R, L] ids, and for each place the number of its document in the row, from 1; 0 is padding."""

    ids: np.ndarray
    documents: np.ndarray


def stream_starts(tokens: int, context: int, seed: int, epoch: int) -> np.ndarray:
    """Where the rows of one epoch begin in a stream: every token once, cut anew each epoch, no overlap.

    Row i is stream[start : start + context + 1]; its last token is only a target. The first cut is a random shift below
    the context, so that no epoch sees the same rows; a remainder shorter than a row at either end waits for the next.
    """
    if tokens < context + 1:
        raise BadInput(f"the text must have at least {context + 1} tokens for a context of {context}, it has {tokens}; "
                       "give more text or a shorter context")  # fmt: skip
    spare = (tokens - 1) % context
    shift = int(below(min(context, spare + 1), seed, epoch, "shift"))
    return np.arange(shift, tokens - context, context)


def stream_rows(stream: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """[B, context + 1]: these rows of the stream."""
    return stream[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def pack(documents: Ragged, width: int) -> list[np.ndarray]:
    """Which documents share a row of `width`: best fit, longest first, whole documents only. Deterministic.

    Rows come in the order of the first document in them, so near documents stay near.
    """
    lengths = documents.lengths
    if len(lengths) and int(lengths.max()) > width:
        raise BadInput(f"document {int(lengths.argmax())} has {int(lengths.max())} tokens, a row has {width}; "
                       "cut the documents first")  # fmt: skip
    free: list[int] = []  # free places of the open rows, rising
    open_rows: list[list[int]] = []  # in step with it
    for document in np.argsort(-lengths, kind="stable"):
        need = int(lengths[document])
        fit = bisect_left(free, need)
        left, row = (free.pop(fit), open_rows.pop(fit)) if fit < len(free) else (width, [])
        row.append(int(document))
        place = bisect_left(free, left - need)
        free.insert(place, left - need)
        open_rows.insert(place, row)
    rows = [np.array(sorted(row)) for row in open_rows]
    return sorted(rows, key=lambda row: int(row[0]))


def lay_out(documents: Ragged, rows: list[np.ndarray], width: int, pad: int) -> Rows:
    """The packed rows as arrays."""
    taken = documents.take(np.concatenate(rows)) if rows else documents.take(np.zeros(0, np.int64))
    counts = np.array([len(row) for row in rows], np.int64)
    row_of = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts, counts) + 1
    sizes = np.bincount(row_of, weights=taken.lengths, minlength=len(rows)).astype(np.int64)
    edges = np.concatenate([[0], np.cumsum(sizes)])
    ids = Ragged(taken.values, edges).padded(pad, width)
    return Rows(ids, Ragged(np.repeat(number, taken.lengths), edges).padded(0, width))
