"""Batches of examples of like length, counted in tokens. Where a run stands is one integer: examples given so far.

    place in the epoch ──order──▶ example ──windows──▶ sorted by length, cut by tokens ──▶ batches in shuffled order

A window is a stretch of places; its batches depend only on (seed, epoch, window), so a run resumed at position p looks
at one window and goes on as if it had never stopped. The number of processes and workers changes nothing: a global
batch is made first, then shared out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headwater.data.chance import shuffle
from headwater.data.order import example_at
from headwater.errors import BadSetting


class Batch(NamedTuple):
    """The examples of one step, for all processes together."""

    examples: np.ndarray  # [B] indices, the shortest first
    epoch: int
    start: int  # position before it; the position after it is start + len(examples)

    @property
    def end(self) -> int:
        return self.start + len(self.examples)


@dataclass(frozen=True)
class Batches:
    """An endless row of batches, epoch after epoch.

    lengths [N, K]: tokens of each example in each of K columns (source and target, or only text).
    tokens: the most a batch may hold, padding included: rows x the sum over columns of the longest.
    """

    lengths: np.ndarray
    tokens: int
    seed: int = 0
    window: int = 0  # examples sorted together; 0: about a hundred batches

    def __post_init__(self) -> None:
        lengths = np.atleast_2d(np.asarray(self.lengths).T).T
        object.__setattr__(self, "lengths", lengths)
        if not len(lengths):
            raise BadSetting("batches need at least one example; the data is empty")
        longest = int(lengths.sum(1).max())
        if longest > self.tokens:
            raise BadSetting(f"a batch of {self.tokens} tokens cannot hold example {int(lengths.sum(1).argmax())} of "
                             f"{longest}; raise the batch to {longest} tokens, or leave out long examples")  # fmt: skip
        if not self.window:
            rows = 100 * self.tokens / max(1.0, float(lengths.sum(1).mean()))
            object.__setattr__(self, "window", max(1, min(int(rows), len(lengths))))

    @property
    def size(self) -> int:
        return len(self.lengths)

    def after(self, position: int = 0) -> Iterator[Batch]:
        """The batches from this position on: what an unbroken run would give after `position` examples."""
        while True:
            epoch, place = divmod(position, self.size)
            for batch in self.of_window(epoch, place // self.window):
                if batch.end > position:
                    yield batch._replace(examples=batch.examples[max(0, position - batch.start) :],
                                         start=max(position, batch.start))  # fmt: skip
            position = epoch * self.size + min(self.size, (place // self.window + 1) * self.window)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch."""
        for window in range(-(-self.size // self.window)):
            yield from self.of_window(epoch, window)

    def of_window(self, epoch: int, window: int) -> list[Batch]:
        """The batches of one window: sorted by length, cut evenly, shuffled."""
        first = window * self.window
        examples = example_at(np.arange(first, min(self.size, first + self.window)), self.size, self.seed, epoch)
        lengths = self.lengths[examples]
        by_length = np.lexsort(
            (lengths.sum(1), lengths.max(1))
        )  # by the longer side: least padding of four orders tried
        examples, lengths = examples[by_length], lengths[by_length]
        edges = even_cuts(lengths, self.tokens)
        start, found = epoch * self.size + first, []
        for i in shuffle(len(edges) - 1, self.seed, epoch, "batches", window):
            found.append(Batch(examples[edges[i] : edges[i + 1]], epoch, start))
            start = found[-1].end
        return found


def even_cuts(lengths: np.ndarray, tokens: int) -> list[int]:
    """Edges of as few batches as `tokens` allows, all about equally full: a last batch of three rows would be noise."""
    edges = cuts(lengths, tokens)
    low, high = int(lengths.sum(1).max()), tokens
    while low < high:
        middle = (low + high) // 2
        if len(cuts(lengths, middle)) <= len(edges):
            high = middle
        else:
            low = middle + 1
    return cuts(lengths, high)


def cuts(lengths: np.ndarray, tokens: int) -> list[int]:
    """Edges of the batches when each takes as many rows as fit: rows x the longest of each column <= tokens."""
    edges, rows = [0], len(lengths)
    while edges[-1] < rows:
        start = edges[-1]
        reach = min(rows, start + tokens // max(1, int(lengths[start].max())))  # sorted: no later row is shorter
        longest = np.maximum.accumulate(lengths[start:reach], axis=0).sum(1)
        fits = np.searchsorted(np.arange(1, len(longest) + 1) * longest, tokens, side="right")
        edges.append(start + max(1, int(fits)))
    return edges


def share(examples: np.ndarray, rank: int, world: int) -> np.ndarray:
    """What one of `world` processes does of a batch: every world-th row, so that tokens are even too.

    The rows lie by length, so neighbours are alike. A batch with fewer rows than processes leaves some none.
    """
    if not 0 <= rank < world:
        raise BadSetting(f"rank must be from 0 to {world - 1}, got {rank}")
    return examples[rank::world]


def micro(examples: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """The same rows in consecutive pieces of at most `tokens` each, for accumulating their gradients."""
    edges = even_cuts(np.atleast_2d(lengths[examples].T).T, tokens) if len(examples) else [0]
    return [examples[a:b] for a, b in pairwise(edges)]
