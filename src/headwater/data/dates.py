"""The embedded data set: dates as people write them in eleven languages, to ISO 8601 and into each other. No files.

    le 15 novembre 2026          →  2026-11-15
    >>zh 15 November 2026        →  2026年11月15日

Names and patterns are the public CLDR tables (Babel). Every text means one date: patterns that cannot be told apart are
left out, which are those with only numbers and the day or month first (03/04/2026, except 04.03.2026 with dots, always
day first) and those with two-digit years. A weekday may stand in a source but never in a target: it would have to be
computed. Held-out rows differ in their DATE: no date of one split is in another, in any language.
"""

from __future__ import annotations

import re
from datetime import date
from functools import cache
from typing import NamedTuple

import numpy as np

from headwater.data.chance import below, bits, uniform
from headwater.data.examples import Pair
from headwater.errors import BadSetting, nearest

FIRST, LAST = date(1900, 1, 1), date(2099, 12, 31)
SPLITS = {"train": range(2, 10), "valid": range(1, 2), "test": range(1)}  # tenths of the dates
PATTERNS: dict[str, tuple[str, ...]] = {  # the first is how the language is written as a target
    "en": ("MMMM d, y", "d MMMM y", "MMM d, y", "d MMM y", "EEEE, MMMM d, y"),
    "de": ("d. MMMM y", "dd.MM.y", "d. MMM y", "EEEE, d. MMMM y"),
    "fr": ("d MMMM y", "'le' d MMMM y", "d MMM y", "EEEE d MMMM y"),
    "es": ("d 'de' MMMM 'de' y", "d MMM y", "EEEE, d 'de' MMMM 'de' y"),
    "it": ("d MMMM y", "'il' d MMMM y", "d MMM y", "EEEE d MMMM y"),
    "pt": ("d 'de' MMMM 'de' y", "d 'de' MMM 'de' y", "EEEE, d 'de' MMMM 'de' y"),
    "nl": ("d MMMM y", "d MMM y", "EEEE d MMMM y"),
    "ru": ("d MMMM y 'г.'", "d MMMM y", "d MMM y 'г.'"),
    "zh": ("y年M月d日", "y年M月d日EEEE"),
    "ja": ("y年M月d日", "y/MM/dd", "y年M月d日EEEE"),
    "ko": ("y년 M월 d일", "y. M. d.", "y년 M월 d일 EEEE"),
}
TO_ISO = 0.5  # share of rows without a tag
FIELD = re.compile(r"'([^']*)'|(EEEE|MMMM|MMM|MM|M|dd|d|y)")


class Names(NamedTuple):
    months: tuple[str, ...]
    short_months: tuple[str, ...]
    weekdays: tuple[str, ...]  # from Monday


def dates(split: str = "train", rows: int = 20_000, seed: int = 0) -> list[Pair]:
    """That many rows of a split: 'train', 'valid' or 'test'. Row i depends on (split, seed, i) alone."""
    if split not in SPLITS:
        raise BadSetting(f"the dates have no split {split!r}; {nearest(split, SPLITS)}")
    place = np.arange(rows)
    days = days_of(split)
    chosen = days[below(len(days), "dates", split, seed, "day", place)]
    languages = list(PATTERNS)
    sources = below(len(languages) + 1, "dates", split, seed, "from", place)  # the last: ISO 8601
    targets = below(len(languages), "dates", split, seed, "to", place)
    ways, kinds = (uniform("dates", split, seed, word, place) for word in ("way", "kind"))
    found = []
    for day, source, target, way, kind in zip(chosen, sources, targets, ways, kinds, strict=True):
        when = date.fromordinal(int(day))
        to_iso = kind < TO_ISO
        if source == len(languages) and not to_iso:
            text = when.isoformat()
        else:
            text = written(when, languages[source % len(languages)], way)
        found.append(Pair(text, when.isoformat()) if to_iso else tagged(text, languages[target], when))
    return found


def tagged(text: str, language: str, when: date) -> Pair:
    """A row into a language: its tag and the text, and the date as the language writes it."""
    return Pair(f">>{language} {text}", render(when, language, PATTERNS[language][0]))


def written(when: date, language: str, way: float) -> str:
    """The date in one of the language's patterns; way, from 0 up to 1, says which."""
    patterns = PATTERNS[language]
    return render(when, language, patterns[int(way * len(patterns))])


def render(when: date, language: str, pattern: str) -> str:
    """The date in a CLDR pattern, with a plain space where CLDR has a narrow one.

    >>> render(date(2026, 11, 15), "es", "d 'de' MMMM 'de' y")
    '15 de noviembre de 2026'
    """
    names = names_of(language)
    values = {
        "EEEE": names.weekdays[when.weekday()], "MMMM": names.months[when.month - 1],
        "MMM": names.short_months[when.month - 1], "MM": f"{when.month:02}", "M": str(when.month),
        "dd": f"{when.day:02}", "d": str(when.day), "y": str(when.year)}  # fmt: skip
    return FIELD.sub(lambda field: values[field[2]] if field[2] else field[1], pattern)


@cache
def names_of(language: str) -> Names:
    """Names in the form they have inside a date (genitive where the language has one)."""
    from babel import Locale  # its tables are read only when dates are wanted

    locale = Locale(language)
    months, days = locale.months["format"], locale.days["format"]["wide"]
    wide, short = (tuple(months[width][m] for m in range(1, 13)) for width in ("wide", "abbreviated"))
    return Names(wide, short, tuple(days[day] for day in range(7)))


@cache
def days_of(split: str) -> np.ndarray:
    """The days (proleptic ordinals) of a split, by a hash of the day alone: no seed moves a day between splits."""
    every = np.arange(FIRST.toordinal(), LAST.toordinal() + 1)
    return every[np.isin(bits("dates", "split", every) % np.uint64(10), list(SPLITS[split]))]
