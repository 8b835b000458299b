"""Small changes of a text that leave its meaning: words deleted, swapped, replaced by synonyms, characters disturbed.

Each is a value; what it does to example `index` in an epoch is a function of (seed, epoch, index), so nothing is saved.
The units are words, and single characters in scripts without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from headwater.data.chance import below, uniform
from headwater.data.encode import encode_rows
from headwater.data.metrics.units import HAN, KANA
from headwater.data.ragged import Ragged
from headwater.data.reading.lines import USUAL, Reading, good, lines
from headwater.data.reading.problems import Problems
from headwater.errors import BadFile, BadSetting, nearest
from headwater.text.tokenizer import Tokenizer

Change: TypeAlias = Callable[[str, int, int, int], str]
UNIT = re.compile(f"(?:[{HAN}{KANA}]|[^\\s{HAN}{KANA}]+)\\s*|\\s+")


def augmented(text: str, changes: Sequence[Change], seed: int, epoch: int, index: int) -> str:
    """The text after all changes, one after the other."""
    for change in changes:
        text = change(text, seed, epoch, index)
    return text


@dataclass(frozen=True)
class DeleteWords:
    """Each word is left out with this chance; the last one standing stays."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        _check(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        words = UNIT.findall(text)
        drawn = uniform(seed, epoch, index, "delete", np.arange(len(words)))
        kept = [word for word, chance in zip(words, drawn, strict=True) if chance >= self.rate]
        return "".join(kept) or (words[int(drawn.argmax())] if words else text)


@dataclass(frozen=True)
class SwapWords:
    """Each word changes places with the next with this chance; the spaces stay where they are."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        _check(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        parts = [_apart(word) for word in UNIT.findall(text)]
        words = [word for word, _ in parts]
        place = 0
        drawn = uniform(seed, epoch, index, "swap", np.arange(len(words)))
        while place + 1 < len(words):
            if drawn[place] < self.rate:
                words[place], words[place + 1] = words[place + 1], words[place]
                place += 1  # a word moves once
            place += 1
        return "".join(word + space for word, (_, space) in zip(words, parts, strict=True))


@dataclass(frozen=True)
class CharacterNoise:
    """Each letter is, with this chance, left out, doubled, or swapped with the next: what fingers do."""

    rate: float = 0.02

    def __post_init__(self) -> None:
        _check(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        place = np.arange(len(text))
        hit = np.flatnonzero(uniform(seed, epoch, index, "noise", place) < self.rate)
        kinds = below(3, seed, epoch, index, "kind", place)
        letters = list(text)
        for i in (int(n) for n in hit):
            if not text[i].isalpha():
                continue
            if kinds[i] == 0:
                letters[i] = ""
            elif kinds[i] == 1:
                letters[i] *= 2
            elif i + 1 < len(text) and text[i + 1].isalpha():
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
        return "".join(letters) or text


@dataclass(frozen=True)
class Synonyms:
    """Each word that the table knows is replaced by one of its synonyms with this chance."""

    table: Mapping[str, tuple[str, ...]]
    rate: float = 0.2

    def __post_init__(self) -> None:
        _check(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        """Longest entries first, so that entries of several words or characters are met too; one pass."""
        if not self.table:
            return text
        count, any_case = 0, {word.lower(): others for word, others in self.table.items()}

        def choose(found: re.Match[str]) -> str:
            nonlocal count
            count += 1
            if uniform(seed, epoch, index, "replace", count) >= self.rate:
                return found[0]
            others = self.table.get(found[0]) or any_case.get(found[0].lower(), (found[0],))
            other = others[int(below(len(others), seed, epoch, index, "which", count))]
            return other[:1].upper() + other[1:] if found[0][:1].isupper() else other

        return _pattern(tuple(self.table)).sub(choose, text)


CHANGES: dict[str, Callable[[float], Change]] = {"delete": DeleteWords, "swap": SwapWords, "noise": CharacterNoise}


def changes_of(rates: Mapping[str, str | float], synonyms: str = "") -> tuple[Change, ...]:
    """The changes that settings name: {"delete": "0.1", "noise": "0.02"}; "synonyms" needs the path of a table."""
    found: list[Change] = []
    for name, rate in rates.items():
        if name not in (*CHANGES, "synonyms"):
            raise BadSetting(f"augment has no change {name!r}; {nearest(name, [*CHANGES, 'synonyms'])}")
        try:
            share = float(rate)
        except ValueError:
            raise BadSetting(f"augment: {name} must have a rate such as {name}=0.1, got {rate!r}") from None
        if name == "synonyms" and not synonyms:
            raise BadSetting("augment: synonyms needs a table, none is given; --synonyms TABLE.tsv")
        found.append(Synonyms(synonym_table(synonyms), share) if name == "synonyms" else CHANGES[name](share))
    if synonyms and "synonyms" not in rates:
        raise BadSetting("--synonyms gives a table that nothing uses; add --augment synonyms=0.2")
    return tuple(found)


@dataclass(frozen=True)
class Changing:
    """Texts that are a little different in each epoch, as ids; most: tokens of one at most."""

    texts: Sequence[str]
    changes: tuple[Change, ...]
    tokenizer: Tokenizer
    seed: int
    most: int

    def rows(self, examples: np.ndarray, epoch: int) -> Ragged:
        said = (augmented(self.texts[i], self.changes, self.seed, epoch, int(i)) for i in examples)
        return encode_rows(self.tokenizer, said).cut(self.most)


def synonym_table(path: Path | str, reading: Reading = USUAL) -> dict[str, tuple[str, ...]]:
    """A user's table: a word, a tab, its synonyms separated by tabs; words in lower case match any case."""
    problems, table = Problems(), dict[str, tuple[str, ...]]()
    for line in good(Path(path), lines(Path(path), reading, problems), problems):
        word, *others = (cell.strip() for cell in line.text.split("\t"))
        others = [other for other in others if other]
        if word and others:
            table[word] = (*table.get(word, ()), *others)
        elif line.text.strip():
            problems.add(Path(path), line.number, "no word with a synonym after a tab")
    if not table:
        raise BadFile(f"{path} must have a word, a tab and a synonym on each line; none has")
    return table


_PATTERNS: dict[tuple[str, ...], re.Pattern[str]] = {}


def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Any of the words, whole where the script has spaces; made once for a table."""
    if words not in _PATTERNS:
        spaced = [w for w in sorted(words, key=len, reverse=True) if not re.search(f"[{HAN}{KANA}]", w)]
        others = [w for w in sorted(words, key=len, reverse=True) if w not in set(spaced)]
        arms = [rf"(?i:\b(?:{'|'.join(map(re.escape, spaced))})\b)"] * bool(spaced)
        _PATTERNS[words] = re.compile("|".join([*arms, *map(re.escape, others)]))
    return _PATTERNS[words]


def _apart(unit: str) -> tuple[str, str]:
    word = unit.rstrip()
    return word, unit[len(word) :]


def _check(rate: float, who: object) -> None:
    if not 0 <= rate < 1:
        raise BadSetting(f"{type(who).__name__}: rate must be from 0 up to 1, got {rate}; 0.1 is usual")
