"""Internationalization with gettext: messages and their Chinese in locale/zh/LC_MESSAGES/headwater.po.

    raise BadSetting(_("heads must divide d_model, {heads} does not divide {d_model}", heads=heads, d_model=d_model))

A message is translated where it is shown: str(message), print(message), f"{message}" and str(fault) give it in the
language in effect there. Compared, used as a key, written as JSON or joined by str.join, it is its English text.
"""

from __future__ import annotations

import contextlib
import functools
import gettext
import io
import os
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

LANGUAGES = ("en", "zh")
CATALOG = Path(__file__).parent / "locale" / "zh" / "LC_MESSAGES" / "headwater.po"

_CHINESE = re.compile("[\u4e00-\u9fff]")
_process_language = "en"
_context_language: ContextVar[str | None] = ContextVar("language", default=None)


class Message(str):
    """A text with named values, translated into the language in effect where it is shown."""

    msgid: str
    values: Mapping[str, Any]

    def __new__(cls, msgid: str, values: Mapping[str, Any]) -> Message:
        message = super().__new__(cls, _formatted(msgid, values, "en"))
        message.msgid = msgid
        message.values = values
        return message

    def __str__(self) -> str:
        return translated(self, language())

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __mod__(self, values: Any) -> str:
        return str(self) % values  # argparse formats the help of a flag so

    def __add__(self, other: str) -> Message:
        return Message("{first}{second}", {"first": self, "second": other})

    def __radd__(self, other: str) -> Message:
        return Message("{first}{second}", {"first": other, "second": self})

    def __reduce__(self) -> tuple[type[Message], tuple[str, dict[str, Any]]]:
        return Message, (self.msgid, dict(self.values))


def _(msgid: str, /, **values: Any) -> Message:
    """A message to a user. msgid is the key of the catalogue, its {placeholders} are filled with the values."""
    return Message(msgid, values)


def join(separator: str, texts: Iterable[str]) -> Message:
    """separator.join(texts), translated where it is shown."""
    joined = Message("", {})
    for number, text in enumerate(texts):
        joined = joined + separator + text if number else Message("{text}", {"text": text})
    return joined


def translated(text: str, into: str) -> str:
    """A message in a language. A plain str, and a message that is not in the catalogue, stay English.

    >>> hint = _("did you mean {name!r}?", name="y")
    >>> translated(_("no recipe is called {name!r}; {nearest}", name="x", nearest=hint), "zh")
    "没有名为 'x' 的配方；是否想写 'y'？"
    """
    if not isinstance(text, Message):
        return str.__str__(text)
    return _formatted(text.msgid, text.values, into)


def _formatted(msgid: str, values: Mapping[str, Any], into: str) -> str:
    template = catalogue().gettext(msgid) if into == "zh" and msgid else msgid
    if not values:
        return template
    with use_language(into):
        return _FORMATTERS[into].vformat(template, (), values)


# ------------------------------------------------------------------------------------------------------- the language


def language() -> str:
    """The language in effect: of this context (a request to the server), else of the process; "en" or "zh"."""
    return _context_language.get() or _process_language


def set_language(name: str) -> str:
    """Set the language of the process (the command line does this); returns the previous one."""
    global _process_language
    before = _process_language
    _process_language = name
    return before


@contextlib.contextmanager
def use_language(name: str) -> Iterator[None]:
    """Context manager: the language within a block, for this thread only."""
    token = _context_language.set(name)
    try:
        yield
    finally:
        _context_language.reset(token)


def language_of(environment: Mapping[str, str] = os.environ) -> str:
    """The language of an environment: the first of HEADWATER_LANG, LC_ALL, LC_MESSAGES and LANG that is set decides.

    >>> language_of({"LANG": "zh_CN.UTF-8"}), language_of({"HEADWATER_LANG": "en", "LANG": "zh_CN.UTF-8"})
    ('zh', 'en')
    """
    names = ("HEADWATER_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environment[name] for name in names if environment.get(name)), "en")
    return "zh" if chosen.lower().startswith("zh") else "en"


@functools.cache
def catalogue() -> gettext.NullTranslations:
    """The Chinese catalogue, compiled in memory."""
    from babel.messages.mofile import write_mo
    from babel.messages.pofile import read_po

    with CATALOG.open("rb") as file:
        entries = read_po(file)
    compiled = io.BytesIO()
    write_mo(compiled, entries)
    compiled.seek(0)
    return gettext.GNUTranslations(compiled)


# ------------------------------------------------------------------------------------------------------ typesetting


class _Formatter(string.Formatter):
    """str.format with messages as values."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion and isinstance(value, Message):
            value = str(value)
        return super().convert_field(value, conversion)


class _ChineseFormatter(_Formatter):
    """A space between Chinese and Latin letters, none between Chinese characters.

    >>> _ChineseFormatter().format("需要 {0}，得到{1}", "编码器", "x")
    '需要编码器，得到 x'
    """

    def vformat(self, format_string: str, args: Any, kwargs: Any) -> str:
        text = ""
        for literal, field, spec, conversion in self.parse(format_string):
            text = _join_spaced(text, literal)
            if field is not None:
                value, _key = self.get_field(field, args, kwargs)
                value = self.convert_field(value, conversion)
                text = _join_spaced(text, self.format_field(value, spec or ""))
        return text


def _join_spaced(left: str, right: str) -> str:
    """Join two pieces of a sentence; between Chinese and Latin letters there is one space."""
    joint = left[-2:].strip() + right[:2].strip()
    if len(left) > 1 and left[-1] == " " and _CHINESE.match(left[-2]) and _CHINESE.match(right):
        return left[:-1] + right
    if len(right) > 1 and right[0] == " " and _CHINESE.match(left[-1:]) and _CHINESE.match(right[1]):
        return left + right[1:]
    chinese = bool(_CHINESE.match(left[-1:])), bool(_CHINESE.match(right))
    latin = left[-1:].isascii() and left[-1:].isalnum(), right[:1].isascii() and right[:1].isalnum()
    needs_space = joint and ((chinese[0] and latin[1]) or (latin[0] and chinese[1]))
    return f"{left} {right}" if needs_space else left + right


_FORMATTERS = {"en": _Formatter(), "zh": _ChineseFormatter()}


def display_width(text: str) -> int:
    """Width of a text in terminal columns: a Chinese character takes two.

    >>> display_width("GB"), display_width("内存")
    (2, 4)
    """
    return sum(2 if ord(character) > 0x2E7F else 1 for character in str(text))


def padded(text: str, columns: int) -> str:
    """A text padded with spaces to a number of terminal columns."""
    return str(text) + " " * (columns - display_width(text))
