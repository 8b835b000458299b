"""The validation split: by a hash of the text, about the requested fraction, never empty, without duplicates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.examples import LabeledText, TextPair, split_hash, validation_mask
from headwater.data.summary import read_dataset
from headwater.errors import BadSetting
from headwater.training.config import parse_config
from headwater.training.task_data import split_examples


def split_hashes(rows, seed=0):
    return np.array([split_hash(row, seed) for row in rows], dtype=np.uint64)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=30), st.floats(0, 0.99), st.integers(0, 5))
def test_equal_inputs_fall_on_one_side_and_neither_side_is_empty(texts, fraction, seed):
    rows = [TextPair(text, str(number)) for number, text in enumerate(texts)]
    kept = validation_mask(split_hashes(rows, seed), fraction)
    inside, outside = ({rows[i].source for i in np.flatnonzero(side)} for side in (kept, ~kept))
    assert not inside & outside
    assert (inside and outside) or len(set(texts)) < 2
    again = validation_mask(split_hashes(rows[::-1], seed), fraction)[::-1]
    assert np.array_equal(kept, again), "the order of the rows does not matter"


def test_the_validation_fraction_holds_and_another_seed_gives_another_split():
    rows = [LabeledText(f"text {n}", "x") for n in range(20_000)]
    first, second = (validation_mask(split_hashes(rows, seed), 0.05) for seed in (0, 1))
    assert abs(first.mean() - 0.05) < 0.005 and abs((first & second).mean() - 0.0025) < 0.002
    with pytest.raises(BadSetting, match="from 0 up to 1, got 1"):
        validation_mask(split_hashes(rows[:2]), 1.0)


def test_duplicates_do_not_leak_into_the_validation_split(tmp_path):
    """Twelve sentences, ten times each: none is in both splits, and the summary counts the validation rows."""
    path = tmp_path / "a.tsv"
    rows = (f"a sentence that has the number {n % 12}\tein langer Satz mit der Nummer {n % 12}\n" for n in range(120))
    path.write_text("".join(rows))
    result, examples = read_dataset(path)
    train, valid = split_examples(parse_config({"paths": [str(path)]}), result, examples)
    assert valid and not {row.source for row in train} & {row.source for row in valid}
    assert result.validation_rows == len(valid) and f"valid      {len(valid)} rows, held out of train" in str(result)


def test_validation_rows_are_counted_next_to_a_test_split(tmp_path):
    for name, first in (("train", 0), ("test", 500)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"sentence {n}\tsatz {n}\n" for n in range(first, first + 200)))
    result, examples = read_dataset([tmp_path / "train.tsv", tmp_path / "test.tsv"])
    _train, valid = split_examples(parse_config({"paths": [str(tmp_path)]}), result, examples)
    assert result.validation_rows == len(valid) > 0
