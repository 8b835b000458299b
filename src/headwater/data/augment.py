"""Text augmentation: delete words, swap words, replace synonyms, add character noise.

An augmentation is a value without state: its effect on example `index` is a function of (seed, epoch, index).
The units are words, and single characters in scripts without spaces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from headwater.data.metrics import HAN, KANA
from headwater.data.ragged import Ragged, encode_rows
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows, DecodeOptions, iter_lines, skip_bad_lines
from headwater.errors import BadFile, BadSetting, nearest
from headwater.i18n import _
from headwater.rng import randint, uniform
from headwater.text.tokenizer import Tokenizer

Augmentation: TypeAlias = Callable[[str, int, int, int], str]
WORD_WITH_SPACE = re.compile(f"(?:[{HAN}{KANA}]|[^\\s{HAN}{KANA}]+)\\s*|\\s+")


def augment_text(text: str, augmentations: Sequence[Augmentation], seed: int, epoch: int, index: int) -> str:
    """Apply the augmentations to a text, one after the other."""
    for augmentation in augmentations:
        text = augmentation(text, seed, epoch, index)
    return text


@dataclass(frozen=True)
class DeleteWords:
    """Word deletion: each word is dropped with this probability; at least one word stays."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        _check_rate(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        words = WORD_WITH_SPACE.findall(text)
        if not words:
            return text
        random_numbers = uniform(seed, epoch, index, "delete", np.arange(len(words)))
        kept = [word for word, number in zip(words, random_numbers, strict=True) if number >= self.rate]
        return "".join(kept) or words[int(random_numbers.argmax())]


@dataclass(frozen=True)
class SwapWords:
    """Word swap: each word is exchanged with the next with this probability; the spaces stay where they are."""

    rate: float = 0.1

    def __post_init__(self) -> None:
        _check_rate(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        parts = [_split_trailing_space(word) for word in WORD_WITH_SPACE.findall(text)]
        words = [word for word, _ in parts]
        random_numbers = uniform(seed, epoch, index, "swap", np.arange(len(words)))
        position = 0
        while position + 1 < len(words):
            if random_numbers[position] < self.rate:
                words[position], words[position + 1] = words[position + 1], words[position]
                position += 1  # a word moves once
            position += 1
        return "".join(word + space for word, (_, space) in zip(words, parts, strict=True))


@dataclass(frozen=True)
class CharacterNoise:
    """Character noise: each letter is dropped, doubled or swapped with the next with this probability."""

    rate: float = 0.02

    def __post_init__(self) -> None:
        _check_rate(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        positions = np.arange(len(text))
        noisy = np.flatnonzero(uniform(seed, epoch, index, "noise", positions) < self.rate)
        kinds = randint(3, seed, epoch, index, "kind", positions)
        letters = list(text)
        for i in noisy.tolist():
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
class SynonymReplacement:
    """Synonym replacement: each word of the table is replaced by one of its synonyms with this probability."""

    table: Mapping[str, tuple[str, ...]]
    rate: float = 0.2

    def __post_init__(self) -> None:
        _check_rate(self.rate, self)

    def __call__(self, text: str, seed: int, epoch: int, index: int) -> str:
        """One pass; longest entries first, so that entries of several words or characters match too."""
        if not self.table:
            return text
        any_case = {word.lower(): synonyms for word, synonyms in self.table.items()}
        count = 0

        def choose(match: re.Match[str]) -> str:
            nonlocal count
            count += 1
            word = match[0]
            if uniform(seed, epoch, index, "replace", count) >= self.rate:
                return word
            synonyms = self.table.get(word) or any_case.get(word.lower(), (word,))
            synonym = synonyms[int(randint(len(synonyms), seed, epoch, index, "which", count))]
            return synonym[:1].upper() + synonym[1:] if word[:1].isupper() else synonym

        return _synonym_pattern(tuple(self.table)).sub(choose, text)


AUGMENTATIONS: dict[str, Callable[[float], Augmentation]] = {
    "delete": DeleteWords,
    "swap": SwapWords,
    "noise": CharacterNoise,
}


def parse_augmentations(rates: Mapping[str, str | float], synonyms_path: str = "") -> tuple[Augmentation, ...]:
    """The augmentations of a config: {"delete": "0.1", "noise": "0.02"}; "synonyms" needs the path of a table."""
    augmentations: list[Augmentation] = []
    for name, rate in rates.items():
        if name not in (*AUGMENTATIONS, "synonyms"):
            raise BadSetting(
                _(
                    "no augmentation is called {name!r}; {nearest}",
                    name=name,
                    nearest=nearest(name, [*AUGMENTATIONS, "synonyms"]),
                )
            )
        try:
            probability = float(rate)
        except ValueError:
            raise BadSetting(
                _("augment: {name} must have a rate such as {name}=0.1, got {rate!r}", name=name, rate=rate)
            ) from None
        if name == "synonyms" and not synonyms_path:
            raise BadSetting(_("augment: synonyms needs a table; add --synonyms TABLE.tsv"))
        if name == "synonyms":
            augmentations.append(SynonymReplacement(load_synonyms(synonyms_path), probability))
        else:
            augmentations.append(AUGMENTATIONS[name](probability))
    if synonyms_path and "synonyms" not in rates:
        raise BadSetting(_("--synonyms gives a table that nothing uses; add --augment synonyms=0.2"))
    return tuple(augmentations)


@dataclass(frozen=True)
class Augmenter:
    """Encoder of augmented texts: they are augmented again in each epoch; rows are truncated to max_tokens."""

    texts: Sequence[str]
    augmentations: tuple[Augmentation, ...]
    tokenizer: Tokenizer
    seed: int
    max_tokens: int

    def encode(self, indices: np.ndarray, epoch: int) -> Ragged:
        """Token ids of the augmented texts at these indices."""
        texts = (augment_text(self.texts[i], self.augmentations, self.seed, epoch, int(i)) for i in indices)
        return encode_rows(self.tokenizer, texts).truncate(self.max_tokens)


def load_synonyms(
    path: Path | str, decode_options: DecodeOptions = DEFAULT_DECODE_OPTIONS
) -> dict[str, tuple[str, ...]]:
    """Read a synonym table: a word, a tab, its synonyms separated by tabs; words in lower case match any case."""
    bad_rows = BadRows()
    table: dict[str, tuple[str, ...]] = {}
    for line in skip_bad_lines(Path(path), iter_lines(Path(path), decode_options, bad_rows), bad_rows):
        word, *cells = (cell.strip() for cell in line.text.split("\t"))
        synonyms = [cell for cell in cells if cell]
        if word and synonyms:
            table[word] = (*table.get(word, ()), *synonyms)
        elif line.text.strip():
            bad_rows.add(Path(path), line.number, _("no word with a synonym after a tab"))
    if not table:
        raise BadFile(_("{path} must have a word, a tab and a synonym on each line; none has", path=path))
    return table


_PATTERN_CACHE: dict[tuple[str, ...], re.Pattern[str]] = {}


def _synonym_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern that matches any of the words, only between word boundaries where the script has spaces; cached."""
    if words not in _PATTERN_CACHE:
        longest_first = sorted(words, key=len, reverse=True)
        spaced = [word for word in longest_first if not re.search(f"[{HAN}{KANA}]", word)]
        alternatives = [re.escape(word) for word in longest_first if word not in set(spaced)]
        if spaced:
            alternatives.insert(0, rf"(?i:\b(?:{'|'.join(map(re.escape, spaced))})\b)")
        _PATTERN_CACHE[words] = re.compile("|".join(alternatives))
    return _PATTERN_CACHE[words]


def _split_trailing_space(unit: str) -> tuple[str, str]:
    word = unit.rstrip()
    return word, unit[len(word) :]


def _check_rate(rate: float, owner: object) -> None:
    if not 0 <= rate < 1:
        raise BadSetting(
            _("{name}: rate must be from 0 up to 1, got {rate}; 0.1 is usual", name=type(owner).__name__, rate=rate)
        )
