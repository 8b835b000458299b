"""A sentence in English that carries its Chinese."""

from __future__ import annotations


class Bilingual(str):
    """An English string; `zh` is the same sentence in Chinese.

    >>> Bilingual("done", "完成").zh
    '完成'
    """

    zh: str

    def __new__(cls, en: str, zh: str) -> Bilingual:
        made = super().__new__(cls, en)
        made.zh = zh
        return made
