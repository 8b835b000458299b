"""The units texts are compared in: words, and single characters where a script has no spaces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwater.errors import BadInput

HAN, KANA = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff", "\u3040-\u30ff"
UNSPACED = f"[{HAN}{KANA}]"
UNIT = re.compile(f"{UNSPACED}|[^\\W_{HAN}{KANA}]+")


def units(text: str) -> list[str]:
    """Words in lower case without punctuation; Chinese and Japanese by character.

    >>> units("GPT-4 在 2023年 发布。")
    ['gpt', '4', '在', '2023', '年', '发', '布']
    """
    return UNIT.findall(text.lower())


def same_count(outputs: Sequence[object], references: Sequence[object]) -> None:
    """A score compares one output with one reference: their numbers must agree, and there must be some."""
    if len(outputs) != len(references):
        raise BadInput(f"there must be one reference for each output, got {len(outputs)} and {len(references)}")
    if not outputs:
        raise BadInput("a score needs at least one output; none was given")
