"""What is held out: by the text alone, about the share asked for, of few rows at least one, and never a duplicate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.examples import Labelled, Pair
from headwater.data.look import look
from headwater.data.split import held_out, place
from headwater.errors import BadSetting
from headwater.training.material import divided
from headwater.training.settings import read


def places(rows, seed=0):
    return np.array([place(row, seed) for row in rows], dtype=np.uint64)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=30), st.floats(0, 0.99), st.integers(0, 5))
def test_equal_inputs_fall_on_one_side_and_neither_side_is_empty(texts, share, seed):
    rows = [Pair(text, str(number)) for number, text in enumerate(texts)]
    kept = held_out(places(rows, seed), share)
    inside, outside = ({rows[i].source for i in np.flatnonzero(side)} for side in (kept, ~kept))
    assert not inside & outside
    assert (inside and outside) or len(set(texts)) < 2
    again = held_out(places(rows[::-1], seed), share)[::-1]
    assert np.array_equal(kept, again), "no order of the file matters"


def test_the_share_is_kept_and_another_seed_keeps_others():
    rows = [Labelled(f"text {n}", "x") for n in range(20_000)]
    first, second = (held_out(places(rows, seed), 0.05) for seed in (0, 1))
    assert abs(first.mean() - 0.05) < 0.005 and abs((first & second).mean() - 0.0025) < 0.002
    with pytest.raises(BadSetting, match="from 0 up to 1, got 1"):
        held_out(places(rows[:2]), 1.0)


def test_a_file_of_duplicates_does_not_measure_memory(tmp_path):
    """Twelve sentences, ten times each: none is both learned and measured, and the report says how many are kept."""
    path = tmp_path / "a.tsv"
    rows = (f"a sentence that has the number {n % 12}\tein langer Satz mit der Nummer {n % 12}\n" for n in range(120))
    path.write_text("".join(rows))
    found = look(path)
    train, valid = divided(read({"paths": [str(path)]}), found)
    assert valid and not {row.source for row in train} & {row.source for row in valid}
    assert found.held_out == len(valid) and f"valid      {len(valid)} rows, held out of train" in str(found)


def test_a_test_set_beside_does_not_hide_that_rows_are_held_out(tmp_path):
    for name, first in (("train", 0), ("test", 500)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"sentence {n}\tsatz {n}\n" for n in range(first, first + 200)))
    found = look([tmp_path / "train.tsv", tmp_path / "test.tsv"])
    assert found.held_out == len(divided(read({"paths": [str(tmp_path)]}), found)[1]) > 0
