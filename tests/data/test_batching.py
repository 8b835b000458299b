"""Batch sampler: each example once per epoch, the same from any position, with any number of ranks."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater import rng
from headwater.data.dataset import BatchSampler, IndexBatch, micro_batches, shard_for_rank
from headwater.data.ragged import Ragged, build_packed_rows, pack_documents, stream_rows, stream_starts
from headwater.errors import BadInput, BadSetting
from headwater.rng import permuted_index


@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 2**40))
def test_an_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    result = permuted_index(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(result), np.arange(size))
    some = np.arange(0, size, 7)
    assert np.array_equal(permuted_index(some, size, seed, epoch), result[some])


def test_permutations_differ_and_are_uniform() -> None:
    """Over many epochs each of the 24 orders of four examples is about equally frequent: a bias would show."""
    seen = Counter(tuple(permuted_index(np.arange(4), 4, 7, epoch)) for epoch in range(4800))
    assert len(seen) == 24
    assert sum((count - 200) ** 2 / 200 for count in seen.values()) < 60  # chi-square, 23 degrees; 1 in 30,000
    first, second = (permuted_index(np.arange(10_000), 10_000, 1, epoch) for epoch in (0, 1))
    assert (first == second).mean() < 0.01
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05
    with pytest.raises(BadInput, match="positions must be from 0 to 3"):
        permuted_index(np.array([4]), 4, 0, 0)


def lengths_of(size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 40, size)
    return np.stack([source, np.clip(source + rng.integers(-3, 4, size), 1, None)], 1)


@given(st.integers(1, 300), st.integers(90, 700), st.integers(0, 50), st.integers(0, 10_000), st.integers(1, 5))
def test_a_resumed_sampler_continues_the_uninterrupted_run(
    size: int, tokens: int, window: int, position: int, seed: int
) -> None:
    """The examples after any position, even inside a batch, are those of the uninterrupted run."""
    batches = BatchSampler(lengths_of(size, seed), tokens, seed, min(window, size))
    position %= 3 * size
    uninterrupted, last = [], 0
    for batch in batches.iter_from(0):
        assert batch.start == last
        uninterrupted += batch.indices.tolist()
        last = batch.end
        if last >= position + 2 * size:
            break
    resumed: list[int] = []
    for batch in batches.iter_from(position):
        resumed += batch.indices.tolist()
        if len(resumed) >= size:
            break
    assert resumed == uninterrupted[position : position + len(resumed)]
    assert sorted(uninterrupted[:size]) == sorted(uninterrupted[size : 2 * size]) == list(range(size))


@given(st.integers(1, 400), st.integers(90, 900), st.integers(0, 3))
def test_batches_stay_within_max_tokens(size: int, tokens: int, epoch: int) -> None:
    lengths = lengths_of(size)
    for batch in BatchSampler(lengths, tokens, window=64).iter_epoch(epoch):
        rows = lengths[batch.indices]
        assert len(rows)
        assert len(rows) * rows.max(0).sum() <= tokens
        for piece in micro_batches(batch.indices, lengths, 90):
            assert len(piece) * lengths[piece].max(0).sum() <= 90
        assert np.array_equal(np.concatenate(micro_batches(batch.indices, lengths, 90)), batch.indices)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_partition_the_global_batch(world: int) -> None:
    lengths = lengths_of(1000)
    for batch in islice(BatchSampler(lengths, 1500, seed=3).iter_from(0), 50):
        parts = [shard_for_rank(batch.indices, rank, world) for rank in range(world)]
        merged = np.empty_like(batch.indices)
        for rank, part in enumerate(parts):
            merged[rank::world] = part
        assert np.array_equal(merged, batch.indices)
        tokens = [int(lengths[part].sum()) for part in parts]
        assert max(tokens) - min(tokens) <= lengths[batch.indices].sum(1).max() + 12
    with pytest.raises(BadSetting, match="rank must be"):
        shard_for_rank(batch.indices, world, world)


def padding_fraction(batches: list[IndexBatch], lengths: np.ndarray) -> float:
    """The fraction of padding in these batches."""
    rows = [lengths[batch.indices] for batch in batches]
    return 1 - sum(int(r.sum()) for r in rows) / sum(int(r.max(0).sum()) * len(r) for r in rows)


def test_sorting_saves_padding_and_batches_are_even() -> None:
    lengths = lengths_of(5000)
    batches = BatchSampler(lengths, 2000)
    result = list(batches.iter_epoch(0))
    assert padding_fraction(result, lengths) < 0.1
    rows = np.random.default_rng(0).permutation(5000)
    unsorted = [result[0]._replace(indices=rows[i : i + 25]) for i in range(0, 5000, 25)]
    assert padding_fraction(unsorted, lengths) > 0.4  # the measure detects unsorted batches
    full = [len(b.indices) * lengths[b.indices].max(0).sum() for b in result]
    assert min(full) > 0.7 * 2000
    with pytest.raises(BadSetting, match="cannot hold example 7 of 300 tokens; raise batch_tokens to 300"):
        BatchSampler(np.where(np.arange(10) == 7, 300, 5), 200)
    with pytest.raises(BadSetting, match="the data is empty"):
        BatchSampler(np.zeros(0), 200)


def test_a_planted_fault_is_detected() -> None:
    """If the shuffle depended on the start position, resuming would differ: the law above must detect it."""

    class Wrong(BatchSampler):
        def iter_from(self, position: int = 0):
            return BatchSampler(self.lengths, self.max_tokens, self.seed + position, self.window).iter_from(position)

    lengths = lengths_of(200)
    right, wrong = BatchSampler(lengths, 300, 1), Wrong(lengths, 300, 1)
    uninterrupted = np.concatenate([b.indices for b in right.iter_epoch(0)])
    for batches, same in ((right, True), (wrong, False)):
        resumed = np.concatenate([b.indices for b in islice(batches.iter_from(17), 5)])
        assert np.array_equal(resumed, uninterrupted[17 : 17 + len(resumed)]) == same


def test_thirty_thousand_pairs_are_fast() -> None:
    lengths = lengths_of(29_000)
    start = time.perf_counter()
    list(BatchSampler(lengths, 4096).iter_epoch(0))
    assert time.perf_counter() - start < 2


# ----------------------------------------------------------------------------------------- random numbers


def test_random_numbers_are_a_function_of_their_keys() -> None:
    one = rng.uniform(1, 2, np.arange(5)[:, None], "mask", np.arange(100))
    assert np.array_equal(one[3], rng.uniform(1, 2, 3, "mask", np.arange(100)))
    assert not np.array_equal(one[3], rng.uniform(1, 2, 3, "other", np.arange(100)))
    assert not np.array_equal(one[3], rng.uniform(1, 3, 3, "mask", np.arange(100)))
    many = rng.uniform(0, np.arange(100_000))
    assert abs(many.mean() - 0.5) < 0.005
    assert 0 <= many.min() < many.max() < 1
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.01
    assert sorted(rng.permutation(50, 9)) == list(range(50))
    assert set(rng.randint(3, 1, np.arange(1000))) == {0, 1, 2}


# ---------------------------------------------------------------------------------------- ragged rows and packing

ROWS = st.lists(st.lists(st.integers(1, 60_000), max_size=12), max_size=30)


@given(ROWS, st.integers(0, 100))
def test_ragged_rows(rows: list[list[int]], seed: int) -> None:
    ragged = Ragged.from_rows(rows)
    assert [row.tolist() for row in map(ragged.__getitem__, range(len(ragged)))] == rows
    chosen = np.random.default_rng(seed).permutation(len(rows))
    taken = ragged.take(chosen)
    assert [taken[i].tolist() for i in range(len(rows))] == [rows[i] for i in chosen]
    padded = taken.to_padded(pad_id=-1)
    assert [row[row >= 0].tolist() for row in padded] == [rows[i] for i in chosen]


def test_broken_offsets_are_refused() -> None:
    with pytest.raises(BadInput, match="incomplete or damaged"):
        Ragged(np.arange(3), np.array([0, 5]))
    with pytest.raises(BadInput, match="at most 2 tokens, the longest has 3"):
        Ragged.from_rows([[1, 2, 3]]).to_padded(0, 2)


@given(ROWS)
def test_packed_documents_are_uncut_and_occur_once(rows: list[list[int]]) -> None:
    documents = Ragged.from_rows(rows)
    packed = pack_documents(documents, 16)
    assert sorted(int(d) for row in packed for d in row) == list(range(len(rows)))
    packed_rows = build_packed_rows(documents, packed, 16, pad_id=0)
    assert packed_rows.ids.shape == (len(packed), 16)
    for row, ids, numbers in zip(packed, packed_rows.ids, packed_rows.document_ids, strict=True):
        for number, document in enumerate(row, 1):
            assert ids[numbers == number].tolist() == rows[document]
    filled = sum(map(len, rows))
    assert len(packed) <= max(len(rows), 0)
    assert int((packed_rows.document_ids > 0).sum()) == filled
    if filled:  # best-fit decreasing needs at most 11/9 of the optimal number of rows, plus 1
        assert sum(1 for row in packed if sum(len(rows[d]) for d in row)) <= 11 / 9 * -(-filled // 8) + 1
    with pytest.raises(BadInput, match="document 0 has 20 tokens, a row has 16"):
        pack_documents(Ragged.from_rows([[1] * 20]), 16)


@given(st.integers(10, 500), st.integers(1, 9), st.integers(0, 20))
def test_a_stream_is_cut_without_overlap(tokens: int, context: int, epoch: int) -> None:
    stream = np.arange(tokens)
    rows = stream_rows(stream, stream_starts(tokens, context, 0, epoch), context)
    targets = rows[:, 1:].ravel()
    assert np.array_equal(targets, np.arange(targets[0], targets[-1] + 1))  # every target once, in order
    assert len(targets) > tokens - 1 - 2 * context
    with pytest.raises(BadInput, match="at least 5 tokens for a context of 4, it has 3"):
        stream_starts(3, 4, 0, 0)


def test_epochs_cut_a_stream_differently() -> None:
    assert len({int(stream_starts(1000, 64, 0, epoch)[0]) for epoch in range(30)}) > 10
