"""Chinese for the messages in the code: found by template in the catalogue locale/zh.po.

A template has holes, {0} {1} …, where the message has values; scripts/messages.py collects them from the code. Of all
templates that fit a message, the one that explains most of its letters wins. What stands in a hole is translated
too where a template fits all of it: a message may end with another one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("en", "zh")
DEEPEST = 4  # messages within messages
SENTENCE = 8  # letters a template must explain to be told from chance
CATALOGUE = Path(__file__).parent / "locale" / "zh.po"

_HOLE = re.compile(r"\{(\d+)\}")
_QUOTED = re.compile(r"(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?!\w)")
_CHINESE = re.compile("[\u4e00-\u9fff]")
_PATH = re.compile(r"\S*/\S*")
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

    def match(self, text: str, last: bool = False) -> dict[str, str] | None:
        """What stands in each hole, or None if the template does not fit.

        A part that comes several times is taken where it comes first, or where it comes last.

        >>> Template.of("{0} ({1})", "").match("a (b) (c)"), Template.of("{0} ({1})", "").match("a (b) (c)", last=True)
        ({'0': 'a', '1': 'b) (c'}, {'0': 'a (b)', '1': 'c'})
        """
        if not self.holes:
            return {} if text == self.parts[0] else None
        first, *middle, ending = self.parts
        begin, end = len(first), len(text) - len(ending)
        if not text.startswith(first) or not text.endswith(ending) or end < begin:
            return None
        places: list[tuple[int, int]] = []  # of each part in the middle
        for part in reversed(middle) if last else middle:
            within = text if "'" in part or '"' in part else _without_values(text)
            at = within.rfind(part, begin, end) if last else within.find(part, begin, end)
            if at < 0:
                return None
            places.append((at, at + len(part)))
            begin, end = (begin, at) if last else (at + len(part), end)
        edges = [len(first), *(edge for place in sorted(places) for edge in place), len(text) - len(ending)]
        values = [text[edges[n] : edges[n + 1]] for n in range(0, len(edges), 2)]
        filled = dict(zip(self.holes, values, strict=True))
        return filled if [filled[hole] for hole in self.holes] == values else None

    def fill(self, values: dict[str, str]) -> str:
        """The Chinese with its holes filled.

        >>> Template.of("", "需要 {0}，得到{1}").fill({"0": "编码器", "1": "x"})
        '需要编码器，得到 x'
        """
        made = ""
        for n, piece in enumerate(_HOLE.split(self.zh)):
            made = _beside(made, values[piece] if n % 2 else piece)
        return made


@functools.lru_cache(maxsize=4096)
def _without_values(text: str) -> str:
    """A text of the same length, in which nothing can be found within quotes: there stand values, not our words.

    >>> _without_values("no 'a; b'; known: c").replace(chr(0), "_")
    'no ______; known: c'
    """
    return _QUOTED.sub(lambda value: "\0" * len(value[0]), text)


def _beside(left: str, right: str) -> str:
    """Two pieces of a sentence: a space between Chinese and Latin letters, none between Chinese characters."""
    joint = left[-2:].strip() + right[:2].strip()
    if len(left) > 1 and left[-1] == " " and _CHINESE.match(left[-2]) and _CHINESE.match(right):
        return left[:-1] + right
    if len(right) > 1 and right[0] == " " and _CHINESE.match(left[-1:]) and _CHINESE.match(right[1]):
        return left + right[1:]
    chinese = bool(_CHINESE.match(left[-1:])), bool(_CHINESE.match(right))
    latin = left[-1:].isascii() and left[-1:].isalnum(), right[:1].isascii() and right[:1].isalnum()
    apart = joint and ((chinese[0] and latin[1]) or (latin[0] and chinese[1]))
    return f"{left} {right}" if apart else left + right


def translate(message: str, language: str) -> str:
    """A message in the language; one that is not in the catalogue stays as it is.

    >>> print(translate("no recipe is called 'x'; did you mean 'y'?", "zh"))
    没有名为 'x' 的配方；是否想写 'y'？
    """
    return message if language == "en" else _translated(message).zh


def width(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two.

    >>> width("GB"), width("内存")
    (2, 4)
    """
    return sum(2 if ord(character) > 0x2E7F else 1 for character in text)


def filled(text: str, columns: int) -> str:
    """A text with spaces after it, up to so many columns."""
    return text + " " * (columns - width(text))


class Translation(NamedTuple):
    """How much of a text its templates explain: words in sentences, marks, letters in all; and the text in Chinese.

    longest: the letters of the longest template among them.
    """

    words: int
    marks: int
    letters: int
    longest: int
    zh: str

    def better(self, other: Translation) -> bool:
        """More is explained. Templates of a few letters, such as "{0} and {1}", count only against no template."""
        more = (self.words, self.marks) > (other.words, other.marks)
        return self.letters > 0 and (more or other.letters == 0)

    def sure(self, text: str) -> bool:
        """Whether words of ours were recognised, and not a value that fits by chance: most letters are explained."""
        return self.longest >= SENTENCE or 2 * self.letters > _letters(_PATH.sub("", _without_values(text)))


@functools.lru_cache(maxsize=4096)
def _translated(text: str, depth: int = DEEPEST) -> Translation:
    """A text in Chinese, or as it is where no template fits it. depth: of messages within messages."""
    best = Translation(0, 0, 0, 0, text)
    if depth == 0 or not text.strip() or _QUOTED.fullmatch(text):  # a value, not words of ours
        return best
    for made in (*_by_template(text, depth - 1), *_by_ending(text), *_by_column(text, depth - 1)):
        best = made if made.better(best) else best
    return best


def _by_template(text: str, depth: int) -> Iterator[Translation]:
    for template in _templates():
        for last in (False, True) if len(template.holes) > 1 else (False,):
            values = template.match(text, last)
            if values is None:
                break
            inner = {hole: _value(value, depth) for hole, value in values.items()}
            yield _joined(template.fill({hole: part.zh for hole, part in inner.items()}), template, inner.values())


def _by_ending(text: str) -> Iterator[Translation]:
    """A list that is cut: "a, b and 3 more"."""
    for template in _endings():
        begin = text.rfind(template.parts[0])
        values = template.match(text[begin:]) if begin > 0 else None
        if values is not None:
            made = _joined(text[:begin] + template.fill(values), template, ())
            yield made._replace(words=made.letters, longest=SENTENCE)


def _by_column(text: str, depth: int) -> Iterator[Translation]:
    columns = _COLUMNS.split(text)
    if len(columns) > 1:
        pieces = [_value(column, depth) for column in columns]
        yield _joined("".join(piece.zh for piece in pieces), Template((), (), ""), pieces)


def _value(text: str, depth: int) -> Translation:
    """What stands in a hole: translated only where that is sure."""
    made = _translated(text, depth)
    return made if made.sure(text) or text.startswith(_lead_ins()) else Translation(0, 0, 0, 0, text)


def _joined(zh: str, template: Template, inner: Iterable[Translation]) -> Translation:
    parts, literal = list(inner), "".join(template.parts)
    letters = _letters(literal)
    return Translation(
        sum((part.words for part in parts), letters if letters >= SENTENCE or not template.holes else 0),
        sum((part.marks for part in parts), len(literal.replace(" ", "")) - letters),
        sum((part.letters for part in parts), letters),
        max([letters, *(part.longest for part in parts)]),
        zh,
    )


def _letters(text: str) -> int:
    return sum(character.isalnum() for character in text)


@functools.cache
def _templates() -> tuple[Template, ...]:
    """The catalogue; the more a template says, the earlier it comes."""
    from babel.messages.pofile import read_po

    with CATALOGUE.open("rb") as file:
        entries = [(str(entry.id), str(entry.string)) for entry in read_po(file) if entry.id and entry.string]
    return tuple(
        sorted((Template.of(en, zh) for en, zh in entries), key=lambda template: -len("".join(template.parts)))
    )


@functools.cache
def _lead_ins() -> tuple[str, ...]:
    """Words that announce a list, such as "known: " of {0}: what begins so is a message, however long the list is."""
    return tuple(template.parts[0] for template in _templates() if re.fullmatch("[a-z]+: ", template.parts[0]))


@functools.cache
def _endings() -> tuple[Template, ...]:
    """The templates that can only end a text, and say enough not to be found by chance."""
    parts = [template for template in _templates() if template.holes and template.parts[0][:1] in (" ", ",", ";")]
    return tuple(template for template in parts if _letters("".join(template.parts)) >= SENTENCE - 1)
