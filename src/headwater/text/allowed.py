"""What single settings of a tokenizer.json may be. Each check takes a value and the file's name, for messages."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from headwater.text.patterns import check_pattern

MOST_TOKENS, MOST_CHARACTERS = 2_000_000, 2_000

Check = Callable[[Any, object], bool]


def text(value: Any, where: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def flag(value: Any, where: object) -> bool:
    return type(value) is bool


def null(value: Any, where: object) -> bool:
    return value is None


def whole(most: int) -> Check:
    return lambda value, where: type(value) is int and 0 <= value <= most


def one_of(*words: str) -> Check:
    return lambda value, where: value in words and isinstance(value, str)


def maybe(check: Check) -> Check:
    return lambda value, where: value is None or check(value, where)


def charsmap(value: Any, where: object) -> bool:
    """sentencepiece's character map: the size of a table of 4-byte units, the table, then texts ended by NUL."""
    if not isinstance(value, str) or len(value) > 8_000_000:
        return False
    try:
        raw = base64.b64decode(value, validate=True)
        size = int.from_bytes(raw[:4], "little")
        raw[4 + size :].decode()
    except ValueError:  # not base64, or not UTF-8
        return False
    return len(raw) >= 4 and size % 4 == 0 and 0 < size <= len(raw) - 4


def anything(value: Any, where: object) -> bool:
    return True  # checked as a whole in _check_model


def pattern(value: Any, where: object) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, said),) = value.items()
    if kind == "Regex" and text(said, where):
        check_pattern(said, where)
    return kind in ("Regex", "String") and text(said, where) and said != ""


def special(value: Any, where: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and text(value[0], where) and whole(MOST_TOKENS)(value[1], where)


def template(value: Any, where: object) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(template_item(item, where) for item in value)


def template_item(item: Any, where: object) -> bool:
    if not isinstance(item, dict) or len(item) != 1:
        return False
    ((kind, said),) = item.items()
    known = isinstance(said, dict) and said.keys() == {"id", "type_id"} and whole(15)(said["type_id"], where)
    return known and (
        said["id"] in ("A", "B") if kind == "Sequence" else kind == "SpecialToken" and text(said["id"], where)
    )


def template_tokens(value: Any, where: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= 64
        and all(
            isinstance(t, dict)
            and t.keys() == {"id", "ids", "tokens"}
            and t["id"] == name
            and isinstance(t["ids"], list)
            and isinstance(t["tokens"], list)
            and 0 < len(t["ids"]) == len(t["tokens"]) <= 64
            and all(whole(MOST_TOKENS)(n, where) for n in t["ids"])
            and all(text(s, where) for s in t["tokens"])
            for name, t in value.items()
        )
    )
