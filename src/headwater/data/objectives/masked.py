"""Masked language modelling, and the question whether one sentence follows another (BERT)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headwater.data.chance import below, uniform
from headwater.data.objectives.lesson import IGNORE, Lesson, Marks
from headwater.data.objectives.texts import real
from headwater.data.ragged import Ragged
from headwater.errors import BadInput, BadSetting

HIDDEN, RATE = (0.8, 0.1), 0.15  # of the chosen: 80 % become <mask>, 10 % another token, 10 % stay


def masked(texts: Ragged, marks: Marks, index: np.ndarray, seed: int, epoch: int, rate: float = RATE) -> Lesson:
    """<bos> text <eos> with about `rate` of the text chosen; the targets are the chosen tokens, as they were.

    What is hidden in an example depends on (seed, epoch, its index) alone, not on the batch it is in.
    """
    rows = texts.wrapped([marks.bos], [marks.eos])
    ids, keep = rows.padded(marks.pad), real(rows)
    ids, targets = hide(ids, keep & ~np.isin(ids, marks.special), marks, index, seed, epoch, rate)
    return Lesson(ids, keep, targets)


def hide(
    ids: np.ndarray, allowed: np.ndarray, marks: Marks, index: np.ndarray, seed: int, epoch: int, rate: float = RATE
) -> tuple[np.ndarray, np.ndarray]:
    """Ids with some of the allowed ones hidden, and targets that count only at these. All [B, L]."""
    if marks.mask < 0:
        raise BadSetting("masked language modelling needs a tokenizer with a mask token; learn one, or choose another")
    draw = (seed, epoch, np.asarray(index)[:, None])
    place = np.arange(ids.shape[1])
    chosen = allowed & (uniform(*draw, "choose", place) < rate)
    pieces = np.setdiff1d(np.arange(marks.vocab), marks.special)
    how, other = uniform(*draw, "how", place), pieces[below(len(pieces), *draw, "other", place)]
    changed = np.where(how < HIDDEN[0], marks.mask, np.where(how < sum(HIDDEN), other, ids))
    return np.where(chosen, changed, ids), np.where(chosen, ids, IGNORE)


class Follow(NamedTuple):
    """Pairs of sentences by number, and whether the second does not follow the first (1) or does (0)."""

    first: np.ndarray
    second: np.ndarray
    label: np.ndarray


def follows(document_of: np.ndarray, seed: int, epoch: int) -> Follow:
    """For each sentence with one after it in its document: half the time that one, else one of another document.

    document_of [N]: the document of each sentence, rising.
    """
    first = np.flatnonzero(document_of[1:] == document_of[:-1])
    if not len(first) or document_of[0] == document_of[-1]:
        raise BadInput("next-sentence pairs need at least two documents, one of them with two sentences; "
                       "put a blank line between documents")  # fmt: skip
    label = (uniform(seed, epoch, first, "follows") < 0.5).astype(np.int64)
    starts, ends = (np.searchsorted(document_of, document_of[first], side) for side in ("left", "right"))
    elsewhere = len(document_of) - (ends - starts)  # sentences of other documents
    drawn = (uniform(seed, epoch, first, "which") * elsewhere).astype(np.int64)
    other = np.where(drawn < starts, drawn, drawn + (ends - starts))
    return Follow(first, np.where(label, other, first + 1), label)


def masked_pairs(sentences: Ragged, pairs: Follow, rows: np.ndarray, marks: Marks, seed: int, epoch: int) -> Lesson:
    """<bos> first <eos> second <eos> for these rows of the pairs, with tokens hidden, and the second target."""
    first = sentences.take(pairs.first[rows]).wrapped([marks.bos], [marks.eos])
    second = sentences.take(pairs.second[rows]).wrapped((), [marks.eos])
    both = Ragged.of([np.concatenate([first[i], second[i]]) for i in range(len(rows))], np.int64)
    ids, keep = both.padded(marks.pad), real(both)
    kinds = ((np.arange(ids.shape[1]) >= first.lengths[:, None]) & keep).astype(np.int64)
    ids, targets = hide(ids, keep & ~np.isin(ids, marks.special), marks, pairs.first[rows], seed, epoch)
    return Lesson(ids, keep, targets, kinds=kinds, second=pairs.label[rows])
