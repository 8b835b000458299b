"""Dataset: examples as rows of token ids, an endless order of batches, and their collation.

Batches and micro-batches follow from the lengths; collate() is each task's own (headwater.tasks).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from headwater.data.batching import BatchSampler, IndexBatch, micro_batches
from headwater.data.collate import SpecialTokens, TrainBatch


class Dataset:
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
