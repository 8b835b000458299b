"""Chinese for messages that are written in English: each is found in the catalogue locale/zh.po by its template.

A template has holes, {0} {1} …, where the message has values; scripts/messages.py collects them from the code. Of all
templates that fit a message, the one that explains most of its letters wins. What stands in a hole is translated
too where a template fits all of it: a message may end with another one.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("en", "zh")
CATALOGUE = Path(__file__).parent / "locale" / "zh.po"

_HOLE = re.compile(r"\{(\d+)\}")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_COLUMNS = re.compile(r"( {2,})")  # what separates the columns of a line


class Template(NamedTuple):
    """parts: the text between the holes; holes: their numbers, in order; zh: the Chinese, with the same holes."""

    parts: tuple[str, ...]
    holes: tuple[str, ...]
    zh: str

    @classmethod
    def of(cls, en: str, zh: str) -> Template:
        pieces = _HOLE.split(en)
        return cls(tuple(pieces[::2]), tuple(pieces[1::2]), zh)

    @property
    def letters(self) -> int:
        return sum(character.isalnum() for part in self.parts for character in part)

    def match(self, text: str) -> dict[str, str] | None:
        """What stands in each hole, or None if the template does not fit. Each part is taken where it comes first.

        >>> Template.of("{0}: {1} of {0}", "").match("a: b of a")
        {'0': 'a', '1': 'b'}
        """
        first, *middle, last = self.parts if self.holes else (*self.parts, "")
        if not self.holes:
            return {} if text == first else None
        end = len(text) - len(last)
        if not text.startswith(first) or not text.endswith(last) or end < len(first):
            return None
        at, values = len(first), []
        for part in middle:
            found = text.find(part, at, end)
            if found < 0:
                return None
            values.append(text[at:found])
            at = found + len(part)
        values.append(text[at:end])
        filled = dict(zip(self.holes, values, strict=True))
        return filled if all(filled[hole] == value for hole, value in zip(self.holes, values, strict=True)) else None

    def fill(self, values: dict[str, str]) -> str:
        return _HOLE.sub(lambda hole: values[hole[1]], self.zh)


def translate(message: str, language: str) -> str:
    """A message in the language; one that is not in the catalogue stays as it is.

    >>> translate("no recipe is called 'x'; did you mean 'y'?", "zh")
    '没有名为 'x' 的配方；是否想写 'y'？'
    """
    return message if language == "en" else _translated(message)[1]


@functools.lru_cache(maxsize=4096)
def _translated(text: str) -> tuple[int, str]:
    """How many letters of a text its templates explain, and the text in Chinese."""
    best = (0, text)
    if not text or _QUOTED.fullmatch(text):  # a value, not words of ours
        return best
    for template in _templates():
        filled = template.match(text)
        if filled is None:
            continue
        inner = {hole: _translated(value) for hole, value in filled.items() if value != text}
        letters = template.letters + sum(explained for explained, _ in inner.values())
        if letters > best[0]:
            best = letters, template.fill({hole: filled[hole] for hole in filled} | {h: zh for h, (_, zh) in inner.items()})
    columns = _COLUMNS.split(text)
    if len(columns) > 1:
        pieces = [_translated(column) for column in columns]
        best = max(best, (sum(letters for letters, _ in pieces), "".join(zh for _, zh in pieces)), key=lambda b: b[0])
    return best


@functools.cache
def _templates() -> tuple[Template, ...]:
    """The catalogue; the more a template says, the earlier it comes."""
    from babel.messages.pofile import read_po

    with CATALOGUE.open("rb") as file:
        entries = [(str(entry.id), str(entry.string)) for entry in read_po(file) if entry.id and entry.string]
    return tuple(sorted((Template.of(en, zh) for en, zh in entries), key=lambda template: -len("".join(template.parts))))
