"""Courses: examples as rows of ids, in an endless order, and the lesson a batch of them is. One class a task.

A course is all that the loop knows of data. `after` and `pieces` come from the lengths; `lesson` is each task's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from headwater.data.augment import Changing
from headwater.data.batches import Batch, Batches, micro
from headwater.data.objectives.answers import Window, answered
from headwater.data.objectives.denoise import denoised
from headwater.data.objectives.labels import classified, tagged
from headwater.data.objectives.lesson import Lesson, Marks
from headwater.data.objectives.masked import follows, masked, masked_pairs
from headwater.data.objectives.spans import corrupted
from headwater.data.objectives.texts import causal, causal_packed, seq2seq
from headwater.data.packing import lay_out, pack, stream_rows, stream_starts
from headwater.data.ragged import Ragged


class Course:
    """lengths [N, K]: tokens of each example as the model will see them."""

    def __init__(self, lengths: np.ndarray, marks: Marks, tokens: int, seed: int) -> None:
        self.lengths, self.marks, self.tokens, self.seed = np.atleast_2d(lengths.T).T, marks, tokens, seed

    @property
    def size(self) -> int:
        return len(self.lengths)

    @cached_property
    def batches(self) -> Batches:
        return Batches(self.lengths, self.tokens, self.seed)

    def after(self, position: int) -> Iterator[Batch]:
        return self.batches.after(position)

    def pieces(self, examples: np.ndarray, tokens: int) -> Sequence[np.ndarray]:
        return micro(examples, self.lengths, tokens)

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        raise NotImplementedError

    def spread(self, most: int) -> np.ndarray:
        """At most so many examples, evenly from all of them: files often hold one class after the other."""
        return evenly(self.size, most)

    def in_order(self, most: int, tokens: int = 4096) -> Iterator[np.ndarray]:
        """These examples, like lengths together: for measuring, where order does not matter."""
        some = self.spread(most)
        yield from self.pieces(some[np.argsort(self.lengths[some].sum(1), kind="stable")], tokens)


class TextToText(Course):
    changing: Changing | None = None  # the sources as texts, where they are augmented

    def __init__(self, sources: Ragged, targets: Ragged, marks: Marks, tokens: int, seed: int) -> None:
        super().__init__(np.stack([sources.lengths + 2, targets.lengths + 1], 1), marks, tokens, seed)
        self.sources, self.targets = sources, targets

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        sources = self.changing.rows(examples, epoch) if self.changing else self.sources.take(examples)
        return unpadded(seq2seq(sources, self.targets.take(examples), self.marks))


class RunningText(Course):
    """Rows of one long stream, cut anew in each epoch."""

    def __init__(self, stream: np.ndarray, context: int, marks: Marks, tokens: int, seed: int) -> None:
        rows = len(stream_starts(len(stream), context, seed, 0))
        super().__init__(np.full((rows, 1), context), marks, max(tokens, context), seed)
        self.stream, self.context = stream, context

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return causal(self.rows(examples, epoch))

    def rows(self, examples: np.ndarray, epoch: int) -> np.ndarray:
        starts = stream_starts(len(self.stream), self.context, self.seed, epoch)
        return stream_rows(self.stream, starts[examples], self.context)


class Packed(Course):
    """Whole documents, several in a row; none sees another, and few places are empty."""

    def __init__(self, documents: Ragged, context: int, marks: Marks, tokens: int, seed: int) -> None:
        self.documents, self.rows, self.context = documents, pack(documents, context), context
        lengths = np.array([int(documents.lengths[row].sum()) for row in self.rows])
        super().__init__(lengths, marks, max(tokens, context), seed)

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        width = int(self.lengths[examples].max(initial=0))
        return causal_packed(lay_out(self.documents, [self.rows[i] for i in examples], width, self.marks.pad))


class MaskedNext(Course):
    """BERT: some tokens of two sentences are hidden, and does the second follow the first?

    A row counts as long as its first sentence with the one that follows it, whichever it is paired with.
    """

    def __init__(self, sentences: Ragged, document_of: np.ndarray, marks: Marks, tokens: int, seed: int) -> None:
        self.sentences, self.document_of = sentences, document_of
        first = follows(document_of, seed, 0).first
        lengths = sentences.lengths[first] + sentences.lengths[first + 1] + 3
        super().__init__(lengths, marks, tokens, seed)
        self._pairs = -1, follows(document_of, seed, 0)

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        if self._pairs[0] != epoch:
            self._pairs = epoch, follows(self.document_of, self.seed, epoch)
        return masked_pairs(self.sentences, self._pairs[1], examples, self.marks, self.seed, epoch)


class Masked(RunningText):
    """Some tokens of each row are hidden, others in each epoch."""

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return masked(_inner(self.rows(examples, epoch)), self.marks, examples, self.seed, epoch)


class SpanCorruption(RunningText):
    """T5: what stood under the sentinels."""

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return unpadded(corrupted(_inner(self.rows(examples, epoch)), self.marks, examples, self.seed, epoch))


class Denoising(RunningText):
    """BART: the text as it was. ends: tokens that end a sentence."""

    ends: np.ndarray = np.zeros(0, np.int64)

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return unpadded(denoised(_inner(self.rows(examples, epoch)), self.marks, self.ends, examples, self.seed, epoch))


class Classification(Course):
    changing: Changing | None = None  # the first texts, where they are augmented

    def __init__(
        self, texts: Ragged, labels: np.ndarray, marks: Marks, tokens: int, seed: int, seconds: Ragged | None = None
    ) -> None:
        more = 0 if seconds is None else seconds.lengths + 1
        super().__init__(texts.lengths + 2 + more, marks, tokens, seed)
        self.texts, self.labels, self.seconds = texts, labels, seconds

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        seconds = None if self.seconds is None else self.seconds.take(examples)
        texts = self.changing.rows(examples, epoch) if self.changing else self.texts.take(examples)
        return classified(texts, self.labels[examples], self.marks, seconds)


class Tagging(Course):
    def __init__(self, ids: Ragged, labels: Ragged, marks: Marks, tokens: int, seed: int) -> None:
        super().__init__(ids.lengths + 2, marks, tokens, seed)
        self.ids, self.labels = ids, labels

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return tagged(self.ids.take(examples), self.labels.take(examples), self.marks)


class Answers(Course):
    """Windows of texts. views: those of each question; owner [N]: the question of each window."""

    def __init__(self, views: Sequence[Sequence[Window]], marks: Marks, tokens: int, seed: int) -> None:
        self.windows = [window for some in views for window in some]
        self.owner = np.repeat(np.arange(len(views)), [len(some) for some in views])
        super().__init__(np.array([len(w.ids) for w in self.windows]), marks, tokens, seed)

    def spread(self, most: int) -> np.ndarray:
        """All windows of at most so many questions."""
        return np.flatnonzero(np.isin(self.owner, evenly(int(self.owner[-1]) + 1, most)))

    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson:
        return answered([self.windows[i] for i in examples], self.marks)


def evenly(size: int, most: int) -> np.ndarray:
    """At most `most` of range(size), the first one, and the others at equal distances."""
    return np.arange(size) if size <= most else np.arange(most) * size // most


def unpadded(lesson: Lesson) -> Lesson:
    """Padding on the right is in nobody's past, so a decoder need not be told of it."""
    return replace(lesson, keep=np.ones_like(lesson.keep))


def _inner(rows: np.ndarray) -> Ragged:
    """[B, C + 1] of a stream as rows that leave room for two marks."""
    inner = rows[:, : rows.shape[1] - 3]
    return Ragged(inner.ravel(), np.arange(len(inner) + 1) * inner.shape[1])
