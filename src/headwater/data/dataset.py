"""Dataset and batch sampler: examples as rows of token ids, in batches of similar length, limited by tokens.

The order of the batches is endless, and the position of a run in it is one integer. collate() is each task's own:
Seq2SeqDataset, CausalLMDataset, ClassificationDataset and the others are in headwater/tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.rng import permutation, permuted_index


class IndexBatch(NamedTuple):
    """The indices of one global batch, over all ranks."""

    indices: np.ndarray  # [B] the shortest example first
    epoch: int
    start: int  # position before the batch; the position after it is start + len(indices)

    @property
    def end(self) -> int:
        return self.start + len(self.indices)


@dataclass(frozen=True)
class BatchSampler:
    """Batch sampler without state: an endless sequence of batches, epoch after epoch.

    lengths [N, K]: tokens of each example in each of K columns (source and target, or only text).
    max_tokens: tokens of a batch, padding included: rows × the sum over columns of the longest.
    """

    lengths: np.ndarray
    max_tokens: int
    seed: int = 0
    window: int = 0  # examples sorted together; 0: about a hundred batches

    def __post_init__(self) -> None:
        lengths = np.atleast_2d(np.asarray(self.lengths).T).T
        object.__setattr__(self, "lengths", lengths)
        if not len(lengths):
            raise BadSetting(_("batches need at least one example; the data is empty"))
        longest = int(lengths.sum(1).max())
        if longest > self.max_tokens:
            raise BadSetting(
                _(
                    "a batch of {max_tokens} tokens cannot hold example {index} of {longest} tokens; raise "
                    "batch_tokens to {longest}, or leave out long examples",
                    max_tokens=self.max_tokens,
                    index=int(lengths.sum(1).argmax()),
                    longest=longest,
                )
            )
        if not self.window:
            rows = 100 * self.max_tokens / max(1.0, float(lengths.sum(1).mean()))
            object.__setattr__(self, "window", max(1, min(int(rows), len(lengths))))

    @property
    def num_examples(self) -> int:
        return len(self.lengths)

    def iter_from(self, position: int = 0) -> Iterator[IndexBatch]:
        """The batches from this position on: those of an uninterrupted run after `position` examples."""
        while True:
            epoch, offset = divmod(position, self.num_examples)
            window = offset // self.window
            for batch in self.window_batches(epoch, window):
                if batch.end > position:
                    num_done = max(0, position - batch.start)  # examples of this batch before the position
                    yield batch._replace(indices=batch.indices[num_done:], start=batch.start + num_done)
            window_end = min(self.num_examples, (window + 1) * self.window)
            position = epoch * self.num_examples + window_end

    def iter_epoch(self, epoch: int) -> Iterator[IndexBatch]:
        """The batches of one epoch."""
        for window in range(-(-self.num_examples // self.window)):
            yield from self.window_batches(epoch, window)

    def window_batches(self, epoch: int, window: int) -> list[IndexBatch]:
        """The batches of one window: sorted by length, cut evenly, shuffled."""
        first = window * self.window
        positions = np.arange(first, min(self.num_examples, first + self.window))
        indices = permuted_index(positions, self.num_examples, self.seed, epoch)

        # sort by the longer column, which needs the least padding of four orders that were compared
        lengths = self.lengths[indices]
        by_length = np.lexsort((lengths.sum(1), lengths.max(1)))
        indices = indices[by_length]
        edges = balanced_cuts(lengths[by_length], self.max_tokens)

        # shuffle the batches
        batches: list[IndexBatch] = []
        start = epoch * self.num_examples + first
        for i in permutation(len(edges) - 1, self.seed, epoch, "batches", window):
            batch = IndexBatch(indices[edges[i] : edges[i + 1]], epoch, start)
            batches.append(batch)
            start = batch.end
        return batches


def balanced_cuts(lengths: np.ndarray, max_tokens: int) -> list[int]:
    """Edges of the smallest number of batches that max_tokens allows, all about equally full (no tiny last batch)."""
    edges = greedy_cuts(lengths, max_tokens)
    low = int(lengths.sum(1).max())
    high = max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(greedy_cuts(lengths, middle)) <= len(edges):
            high = middle
        else:
            low = middle + 1
    return greedy_cuts(lengths, high)


def greedy_cuts(lengths: np.ndarray, max_tokens: int) -> list[int]:
    """Edges of batches that each take as many rows as fit: rows × the longest of each column <= max_tokens."""
    edges = [0]
    rows = len(lengths)
    while edges[-1] < rows:
        start = edges[-1]
        stop = min(rows, start + max_tokens // max(1, int(lengths[start].max())))  # sorted: no later row is shorter
        longest = np.maximum.accumulate(lengths[start:stop], axis=0).sum(1)
        num_rows = np.searchsorted(np.arange(1, len(longest) + 1) * longest, max_tokens, side="right")
        edges.append(start + max(1, int(num_rows)))
    return edges


def shard_for_rank(indices: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """The rows of a global batch that one rank processes: every world_size-th row.

    Rows are sorted by length, so the ranks get about as many tokens. With fewer rows than ranks, some get none.
    """
    if not 0 <= rank < world_size:
        raise BadSetting(_("rank must be from 0 to {max_rank}, got {rank}", max_rank=world_size - 1, rank=rank))
    return indices[rank::world_size]


def micro_batches(indices: np.ndarray, lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """The rows in consecutive micro-batches of at most max_tokens each, for gradient accumulation."""
    edges = balanced_cuts(np.atleast_2d(lengths[indices].T).T, max_tokens) if len(indices) else [0]
    return [indices[a:b] for a, b in pairwise(edges)]


# --------------------------------------------------------------------------------------------------


class StatelessData:
    """What a dataset says of itself where it has no state: no metrics of its own, and nothing for a checkpoint."""

    probe_batches = 16  # batches of which some are timed before training
    one_process = False  # whether a batch cannot be divided among processes
    extra_step_seconds = 0.0  # of a step, that its batch takes before it is given: sampling answers

    def take_metrics(self) -> dict[str, float]:
        """The metrics that the task has recorded since the last call, as means."""
        return {}

    def take_notes(self) -> list[str]:
        """What happened since the last call that the user should know."""
        return []

    def state_arrays(self) -> dict[str, np.ndarray]:
        """What a resumed run needs beside the position: values of the initial model, answers that were sampled."""
        return {}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The inverse of state_arrays."""


class Dataset(StatelessData):
    """Base class of datasets. lengths [N, K]: tokens of each example as the model sees them, for K inputs."""

    def __init__(self, lengths: np.ndarray, special_tokens: SpecialTokens, batch_tokens: int, seed: int) -> None:
        self.lengths = np.atleast_2d(lengths.T).T
        self.special_tokens = special_tokens
        self.batch_tokens = batch_tokens
        self.seed = seed

    @property
    def size(self) -> int:
        """The number of examples."""
        return len(self.lengths)

    @cached_property
    def batches(self) -> BatchSampler:
        """The batch sampler over the examples."""
        return BatchSampler(self.lengths, self.batch_tokens, self.seed)

    def batches_from(self, position: int) -> Iterator[IndexBatch]:
        """The global batches from this position on; position counts examples over all epochs."""
        return self.batches.iter_from(position)

    def micro_batches(self, examples: np.ndarray, max_tokens: int) -> Sequence[np.ndarray]:
        """The examples of a batch in micro-batches of at most max_tokens each."""
        return micro_batches(examples, self.lengths, max_tokens)

    def steps_per_epoch(self) -> int:
        """Batches per epoch, estimated from the first window."""
        first = self.batches.window_batches(0, 0)
        fraction = sum(len(batch.indices) for batch in first) / self.batches.num_examples
        return max(1, round(len(first) / fraction))

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        """The arrays of these examples, padded to one batch."""
        raise NotImplementedError

    def sample_rows(self, max_examples: int) -> np.ndarray:
        """At most max_examples example indices, evenly spaced: files often hold one class after the other."""
        return evenly_spaced(self.size, max_examples)

    def eval_batches(self, max_examples: int, max_tokens: int = 4096) -> Iterator[np.ndarray]:
        """Batches of these examples for evaluation, sorted by length."""
        examples = self.sample_rows(max_examples)
        by_length = np.argsort(self.lengths[examples].sum(1), kind="stable")
        yield from self.micro_batches(examples[by_length], max_tokens)


def evenly_spaced(size: int, max_count: int) -> np.ndarray:
    """At most max_count indices of range(size), evenly spaced from 0."""
    return np.arange(size) if size <= max_count else np.arange(max_count) * size // max_count
