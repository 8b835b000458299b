"""Text to text and running text: the model says the next token, given all the right ones before it."""

from __future__ import annotations

import numpy as np

from headwater.data.objectives.lesson import IGNORE, Lesson, Marks
from headwater.data.packing import Rows
from headwater.data.ragged import Ragged


def seq2seq(sources: Ragged, targets: Ragged, marks: Marks) -> Lesson:
    """Teacher forcing: the encoder reads <bos> source <eos>; given <bos> y1 … yn, the decoder says y1 … yn <eos>."""
    read = sources.wrapped([marks.bos], [marks.eos])
    given, said = targets.wrapped([marks.bos]), targets.wrapped((), [marks.eos])
    return Lesson(given.padded(marks.pad), real(given), said.padded(IGNORE), read.padded(marks.pad), real(read))


def causal(rows: np.ndarray) -> Lesson:
    """[B, C + 1] of a stream: given all but the last, say all but the first."""
    return Lesson(rows[:, :-1], np.ones(rows[:, :-1].shape, bool), rows[:, 1:])


def causal_packed(rows: Rows) -> Lesson:
    """Several documents a row: each token says the next of its own document, the last says nothing."""
    same = (rows.documents[:, 1:] == rows.documents[:, :-1]) & (rows.documents[:, 1:] > 0)
    targets = np.full(rows.ids.shape, IGNORE, np.int64)
    targets[:, :-1][same] = rows.ids[:, 1:][same]
    return Lesson(rows.ids, rows.documents > 0, targets, documents=rows.documents)


def real(rows: Ragged) -> np.ndarray:
    """[B, L]: True where a row has a token."""
    lengths = rows.lengths
    found: np.ndarray = np.arange(int(lengths.max(initial=0))) < lengths[:, None]
    return found
