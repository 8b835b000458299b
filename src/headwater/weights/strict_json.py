"""JSON from a stranger: no duplicate keys, no NaN, no lone surrogates, no deep nesting; nothing lenient."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from headwater.errors import BadFile
from headwater.weights.files import shown

DEEPEST = 32  # the deepest honest file (a tokenizer.json) nests about 10


def parse(raw: bytes, where: object) -> Any:
    """The value written in `raw`, or a BadFile that says what is wrong with `where`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) != len(items):
            raise BadFile(f"{where}: the key {shown(_first_twice(items))} is written twice; each may come once")
        return made

    def constant(text: str) -> NoReturn:
        raise BadFile(f"{where}: {shown(text)} is not a finite number; JSON has no other")

    def floating(text: str) -> float:
        value = float(text)
        return value if value - value == 0.0 else constant(text)

    try:
        text = raw.decode("utf-8")
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_float=floating)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise BadFile(f"{where}: nested deeper than {DEEPEST} levels; no honest file is") from None
    except UnicodeError:
        raise BadFile(f"{where}: not Unicode text; the file is damaged or of another kind") from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise BadFile(f"{where}: not valid JSON ({str(error)[:80]}); the file is damaged or cut short") from None
    _check_depth(value, where)
    return value


def parse_object(raw: bytes, where: object) -> dict[str, Any]:
    value = parse(raw, where)
    if not isinstance(value, dict):
        raise BadFile(f"{where}: must hold a JSON object, it holds a {type(value).__name__}")
    return value


def _first_twice(items: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is twice")


def _check_depth(value: Any, where: object) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(DEEPEST + 1):
        if not level:
            return
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    raise BadFile(f"{where}: nested deeper than {DEEPEST} levels; no honest file is")
