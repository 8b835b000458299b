"""The built-in dataset: dates as people write them in eleven languages, to ISO 8601 and into each other. No files.

    le 15 novembre 2026          →  2026-11-15
    >>zh 15 November 2026        →  2026年11月15日

Names and patterns are the public CLDR tables (Babel). Every text means one date: ambiguous patterns are left out, which
are those with only numbers and the day or month first (03/04/2026, except 04.03.2026 with dots, always day first) and
those with two-digit years. A weekday may occur in a source but never in a target: it would have to be computed. The
splits are disjoint by date: no date of one split is in another, in any language.
"""

from __future__ import annotations

import re
from datetime import date
from functools import cache
from typing import NamedTuple

import numpy as np

from headwater.data.examples import TextPair
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.rng import randint, random_bits, uniform

FIRST_DATE = date(1900, 1, 1)
LAST_DATE = date(2099, 12, 31)
SPLITS = {"train": range(2, 10), "valid": range(1, 2), "test": range(1)}  # tenths of the dates
PATTERNS: dict[str, tuple[str, ...]] = {  # CLDR patterns; targets are written in the first
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
ISO_FRACTION = 0.5  # fraction of rows without a language tag, whose target is ISO 8601
PATTERN_FIELD = re.compile(r"'([^']*)'|(EEEE|MMMM|MMM|MM|M|dd|d|y)")


class DateNames(NamedTuple):
    """Names of months and weekdays in one language."""

    months: tuple[str, ...]
    short_months: tuple[str, ...]
    weekdays: tuple[str, ...]  # from Monday


def dates_dataset(split: str = "train", num_rows: int = 20_000, seed: int = 0) -> list[TextPair]:
    """Rows of the dates dataset; split is train, valid or test. Row i depends on (split, seed, i) alone."""
    if split not in SPLITS:
        raise BadSetting(_("the dates have no split {split!r}; {nearest}", split=split, nearest=nearest(split, SPLITS)))
    languages = list(PATTERNS)
    all_days = split_days(split)

    # random choices of every row
    rows = np.arange(num_rows)
    days = all_days[randint(len(all_days), "dates", split, seed, "day", rows)]
    sources = randint(len(languages) + 1, "dates", split, seed, "from", rows)  # the last: ISO 8601
    targets = randint(len(languages), "dates", split, seed, "to", rows)
    pattern_draws = uniform("dates", split, seed, "way", rows)
    iso_draws = uniform("dates", split, seed, "kind", rows)

    pairs = []
    for ordinal, source, target, pattern_draw, iso_draw in zip(
        days, sources, targets, pattern_draws, iso_draws, strict=True
    ):
        day = date.fromordinal(int(ordinal))
        to_iso = iso_draw < ISO_FRACTION
        if source == len(languages) and not to_iso:
            text = day.isoformat()
        else:
            text = format_in_language(day, languages[source % len(languages)], pattern_draw)
        if to_iso:
            pairs.append(TextPair(text, day.isoformat()))
        else:
            pairs.append(language_tagged_pair(text, languages[target], day))
    return pairs


def language_tagged_pair(text: str, language: str, day: date) -> TextPair:
    """A translation pair: the source begins with the tag of the target language, the target is in its first pattern."""
    return TextPair(f">>{language} {text}", format_cldr(day, language, PATTERNS[language][0]))


def format_in_language(day: date, language: str, fraction: float) -> str:
    """The date in one of the language's patterns, chosen by `fraction` in [0, 1)."""
    patterns = PATTERNS[language]
    return format_cldr(day, language, patterns[int(fraction * len(patterns))])


def format_cldr(day: date, language: str, pattern: str) -> str:
    """The date in a CLDR pattern, with a plain space where CLDR has a narrow one.

    >>> format_cldr(date(2026, 11, 15), "es", "d 'de' MMMM 'de' y")
    '15 de noviembre de 2026'
    """
    names = date_names(language)
    values = {
        "EEEE": names.weekdays[day.weekday()], "MMMM": names.months[day.month - 1],
        "MMM": names.short_months[day.month - 1], "MM": f"{day.month:02}", "M": str(day.month),
        "dd": f"{day.day:02}", "d": str(day.day), "y": str(day.year)}  # fmt: skip
    return PATTERN_FIELD.sub(lambda field: values[field[2]] if field[2] else field[1], pattern)


@cache
def date_names(language: str) -> DateNames:
    """Names in the form they have inside a date (genitive where the language has one)."""
    from babel import Locale  # imported late: it loads large tables

    locale = Locale(language)
    months = locale.months["format"]
    days = locale.days["format"]["wide"]
    return DateNames(
        months=tuple(months["wide"][month] for month in range(1, 13)),
        short_months=tuple(months["abbreviated"][month] for month in range(1, 13)),
        weekdays=tuple(days[day] for day in range(7)),
    )


@cache
def split_days(split: str) -> np.ndarray:
    """The days (proleptic ordinals) of a split, by a hash of the day alone: no seed moves a day between splits."""
    days = np.arange(FIRST_DATE.toordinal(), LAST_DATE.toordinal() + 1)
    tenths = random_bits("dates", "split", days) % np.uint64(10)
    return days[np.isin(tenths, list(SPLITS[split]))]
