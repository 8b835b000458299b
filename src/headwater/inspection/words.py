"""A sentence in both languages, made where it is meant: an English string that carries its Chinese."""

from __future__ import annotations

from headwater.i18n import translate


class Both(str):
    """Reads as English wherever a string is read; whoever speaks Chinese asks for .zh.

    >>> Both("all laws kept", "规则全部守住").zh
    '规则全部守住'
    """

    zh: str

    def __new__(cls, en: str, zh: str) -> Both:
        made = super().__new__(cls, en)
        made.zh = zh
        return made

    def __add__(self, more: str) -> Both:
        return Both(str(self) + str(more), self.zh + chinese(more))


def chinese(text: str) -> str:
    """The Chinese of a sentence: its own, or that of the catalogue; what has none stays as it is.

    >>> chinese(Both("kept", "守住")), chinese("decoder.layers.0")
    ('守住', 'decoder.layers.0')
    """
    return text.zh if isinstance(text, Both) else translate(text, "zh")


def spoken(text: str, language: str) -> str:
    return chinese(text) if language == "zh" else str(text)
