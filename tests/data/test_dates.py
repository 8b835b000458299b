"""The dates dataset: formatted as CLDR does, one date per text, no date in two splits."""

from __future__ import annotations

import re
import time
from datetime import date, timedelta

import numpy as np
import pytest
from babel.dates import format_date

from headwater.data.dates import FIRST_DATE, LAST_DATE, PATTERNS, SPLITS, dates_dataset, format_cldr, split_days
from headwater.errors import BadSetting

DAYS = [date(2023, 1, 1) + timedelta(days=n) for n in range(4 * 366)]


@pytest.mark.parametrize("language", PATTERNS)
def test_texts_equal_those_of_babel(language: str) -> None:
    for pattern in PATTERNS[language]:
        for when in DAYS[::11]:
            assert format_cldr(when, language, pattern) == format_date(when, pattern, language).replace("\u202f", " ")
    for width in ("long", "full"):
        theirs = {re.sub(r"\W+", "", format_date(when, width, language)) for when in DAYS[:40]}
        ours = {re.sub(r"\W+", "", format_cldr(when, language, p)) for when in DAYS[:40] for p in PATTERNS[language]}
        assert theirs <= ours or (language, width) == ("ru", "full")


def test_a_text_means_one_date() -> None:
    meaning: dict[str, date] = {}
    for language, patterns in PATTERNS.items():
        for pattern in patterns:
            for when in DAYS:
                assert meaning.setdefault(format_cldr(when, language, pattern), when) == when
    numeric = {"en": "M/d/y", "fr": "dd/MM/y"}  # planted fault: these two patterns are ambiguous
    assert any(format_cldr(when, "en", numeric["en"]) == format_cldr(other, "fr", numeric["fr"])
               for when, other in [(date(2026, 10, 11), date(2026, 11, 10))])  # fmt: skip


def test_no_date_is_in_two_splits() -> None:
    days = {split: set(split_days(split).tolist()) for split in SPLITS}
    assert sum(map(len, days.values())) == (LAST_DATE - FIRST_DATE).days + 1
    assert not days["train"] & days["valid"] | days["train"] & days["test"] | days["valid"] & days["test"]
    iso = {split: {pair.target for pair in dates_dataset(split, 3000) if ">>" not in pair.source} for split in SPLITS}
    assert not iso["train"] & iso["test"] | iso["train"] & iso["valid"]


def test_rows_are_a_function_of_split_seed_and_index() -> None:
    assert dates_dataset("train", 50) == dates_dataset("train", 200)[:50]
    assert dates_dataset("train", 50) != dates_dataset("train", 50, seed=1)
    assert dates_dataset("valid", 5)[0] != dates_dataset("train", 5)[0]
    with pytest.raises(BadSetting, match="no split 'trian'; did you mean 'train'"):
        dates_dataset("trian")


def test_rows_are_mixed_short_and_quick() -> None:
    start = time.perf_counter()
    result = dates_dataset("train", 20_000)
    assert time.perf_counter() - start < 3
    tagged = [pair for pair in result if pair.source.startswith(">>")]
    assert len(tagged) / len(result) == pytest.approx(0.5, abs=0.02)
    assert {pair.source[2:4] for pair in tagged} == set(PATTERNS)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", p.target) for p in result if not p.source.startswith(">>"))
    assert max(len(text) for pair in result for text in pair) <= 45
    assert np.mean([pair.source != pair.target for pair in result]) == 1
    assert format_cldr(date(2026, 11, 15), "fr", PATTERNS["fr"][1]) == "le 15 novembre 2026"
    assert format_cldr(date(2026, 11, 15), "zh", PATTERNS["zh"][0]) == "2026年11月15日"
