"""Augmentation: a function of (seed, epoch, index) that changes text at its rate, and nothing else."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.augment import (
    CharacterNoise,
    DeleteWords,
    SwapWords,
    SynonymReplacement,
    augment_text,
    load_synonyms,
)
from headwater.errors import BadFile, BadSetting

TABLE = {"big": ("large", "great"), "car": ("auto",), "高兴": ("快乐",), "New York": ("NYC",)}
AUGMENTATIONS = [DeleteWords(0.3), SwapWords(0.3), CharacterNoise(0.1), SynonymReplacement(TABLE, 0.5)]
LONG = " ".join(f"word{i}" for i in range(2000))


@given(st.text(), st.integers(0, 100), st.integers(0, 100))
def test_any_text_is_changed_the_same_way_each_time(text: str, epoch: int, index: int) -> None:
    result = augment_text(text, AUGMENTATIONS, 1, epoch, index)
    assert result == augment_text(text, AUGMENTATIONS, 1, epoch, index)
    assert bool(result) == bool(text)
    for augmentation in (DeleteWords(0.0), SwapWords(0.0), CharacterNoise(0.0), SynonymReplacement(TABLE, 0.0)):
        assert augmentation(text, 1, epoch, index) == text


def test_epochs_and_examples_differ() -> None:
    for augmentation in AUGMENTATIONS[:3]:
        assert len({augmentation(LONG, 0, epoch, index) for epoch in range(3) for index in range(3)}) == 9


def test_rates() -> None:
    left = DeleteWords(0.3)(LONG, 0, 0, 0).split()
    assert 1300 < len(left) < 1500
    assert left == [word for word in LONG.split() if word in set(left)]  # in their order
    swapped = SwapWords(0.2)(LONG, 0, 0, 0).split()
    assert Counter(swapped) == Counter(LONG.split())
    assert 400 < sum(a != b for a, b in zip(swapped, LONG.split(), strict=True)) < 900
    assert DeleteWords(0.99)("only", 0, 0, 0) == "only"
    assert set(DeleteWords(0.4)("今天天气很好", 0, 0, 3)) < set("今天天气很好")
    with pytest.raises(BadSetting, match="DeleteWords: rate must be from 0 up to 1, got 1.5"):
        DeleteWords(1.5)


def test_spaces_stay_where_they_are() -> None:
    text = "  one\ttwo  three\n"
    result = SwapWords(0.9)(text, 0, 0, 0)
    assert [c for c in result if c.isspace()] == [c for c in text if c.isspace()]
    assert result != text


def test_synonyms_from_a_table(tmp_path: Path) -> None:
    path = tmp_path / "syn.tsv"
    path.write_text("big\tlarge\tgreat\ncar\tauto\n高兴\t快乐\nNew York\tNYC\nbroken\n", encoding="utf-8")
    assert load_synonyms(path) == TABLE
    every = SynonymReplacement(TABLE, 0.999999)
    assert every("A big car, not a carpet.", 0, 0, 0) in {f"A {w} auto, not a carpet." for w in ("large", "great")}
    assert every("Car in New York", 0, 0, 0) == "Auto in NYC"
    assert every("CAR in new york", 0, 0, 0) == "Auto in NYC"
    assert every("我很高兴。", 0, 0, 0) == "我很快乐。"
    path.write_text("only words\n")
    with pytest.raises(BadFile, match="a word, a tab and a synonym"):
        load_synonyms(path)
