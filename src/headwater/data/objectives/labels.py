"""Classes of texts, and tags of words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from headwater.data.examples import Tagged
from headwater.data.objectives.lesson import IGNORE, Lesson, Marks
from headwater.data.objectives.texts import real
from headwater.data.ragged import Ragged
from headwater.errors import BadInput, nearest
from headwater.text.tokenizer import Tokenizer


def label_names(labels: Iterable[str]) -> tuple[str, ...]:
    """The different labels in order; O, the tag of no entity, first."""
    return tuple(sorted(set(labels), key=lambda name: (name != "O", name)))


def numbers_of(labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """The number of each label. One that was not in the training data is refused."""
    place = {name: number for number, name in enumerate(names)}
    for label in labels:
        if label not in place:
            raise BadInput(f"the label {label!r} is not in the training data; {nearest(label, names)}")
    return np.array([place[label] for label in labels], np.int64)


def classified(texts: Ragged, labels: np.ndarray, marks: Marks, seconds: Ragged | None = None) -> Lesson:
    """<bos> text <eos>, or <bos> text <eos> second <eos>, and its class [B]."""
    rows = texts.wrapped([marks.bos], [marks.eos])
    if seconds is None:
        return Lesson(rows.padded(marks.pad), real(rows), labels)
    second = seconds.wrapped((), [marks.eos])
    both = Ragged.of([np.concatenate([rows[i], second[i]]) for i in range(len(rows))], np.int64)
    keep = real(both)
    kinds = ((np.arange(keep.shape[1]) >= rows.lengths[:, None]) & keep).astype(np.int64)
    return Lesson(both.padded(marks.pad), keep, labels, kinds=kinds)


def tag_columns(examples: Iterable[Tagged], names: Sequence[str], tokenizer: Tokenizer) -> dict[str, Ragged]:
    """Pieces of the words, and labels: that of the word on its first piece, IGNORE on its others.

    A word without pieces (only characters the tokenizer drops) is given <unk>, so that no word loses its tag.
    """
    ids, labels = [], []
    for example in examples:
        row, tags = word_pieces(example.words, tokenizer), numbers_of(example.tags, names)
        ids.append([n for pieces in row for n in pieces])
        labels.append([tag for pieces, tag_number in zip(row, tags, strict=True)
                       for tag in (int(tag_number), *[IGNORE] * (len(pieces) - 1))])  # fmt: skip
    return {"ids": Ragged.of(ids), "labels": Ragged.of(labels)}


def word_pieces(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each word."""
    aligned = tokenizer.align(list(words), special=False)
    found: list[list[int]] = [[] for _ in words]
    for token, word in zip(aligned.ids, aligned.words, strict=True):
        if word is not None:
            found[word].append(token)
    unknown = tokenizer.special("unk") or 0
    return [pieces or [unknown] for pieces in found]


def tagged(ids: Ragged, labels: Ragged, marks: Marks) -> Lesson:
    """<bos> pieces <eos>; targets on the first piece of each word."""
    rows, targets = ids.wrapped([marks.bos], [marks.eos]), labels.wrapped([IGNORE], [IGNORE])
    return Lesson(rows.padded(marks.pad), real(rows), targets.padded(IGNORE))


def tags_said(chosen: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The tag of each word, from the choices [B, L] at the places that count."""
    return [tuple(names[int(n)] for n in row[goal != IGNORE]) for row, goal in zip(chosen, targets, strict=True)]
