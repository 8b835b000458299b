"""Strict JSON parsing for untrusted files: no duplicate keys, no NaN, no lone surrogates, bounded nesting."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote

MAX_DEPTH = 32  # the most deeply nested real file (a tokenizer.json) has about 10 levels


def parse_json(raw: bytes, where: object) -> Any:
    """Parse UTF-8 JSON strictly; BadFile names what is wrong. `where` is the file's name for the message."""

    def unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
        parsed = dict(items)
        if len(parsed) != len(items):
            raise BadFile(
                _(
                    "{where}: the key {key} is written twice; keys must be unique",
                    where=where,
                    key=quote(_first_duplicate(items)),
                )
            )
        return parsed

    def reject_constant(text: str) -> NoReturn:
        raise BadFile(_("{where}: {text} is not a finite number, which JSON requires", where=where, text=quote(text)))

    def finite_float(text: str) -> float:
        value = float(text)
        return value if value - value == 0.0 else reject_constant(text)

    # parse, with every error as a BadFile
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=unique_keys, parse_constant=reject_constant, parse_float=finite_float
        )
        if "\\ud" in text or "\\uD" in text:  # an escaped surrogate: it must be half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise BadFile(
            _(
                "{where}: nested deeper than {max_depth} levels; the file is damaged or hostile",
                where=where,
                max_depth=MAX_DEPTH,
            )
        ) from None
    except UnicodeError:
        raise BadFile(_("{where}: not Unicode text; the file is damaged or of another kind", where=where)) from None
    except ValueError as error:  # JSONDecodeError, and integers of thousands of digits
        raise BadFile(
            _("{where}: not valid JSON ({error}); the file is damaged or cut short", where=where, error=_reason(error))
        ) from None
    _check_depth(value, where)
    return value


def parse_json_object(raw: bytes, where: object) -> dict[str, Any]:
    """As parse_json; anything but a JSON object at the top level is rejected."""
    value = parse_json(raw, where)
    if not isinstance(value, dict):
        raise BadFile(_("{where}: must hold a JSON object, it holds a {name}", where=where, name=type(value).__name__))
    return value


def _reason(error: ValueError) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)[:80]
    return _("{problem}: line {line} column {column}", problem=_(error.msg), line=error.lineno, column=error.colno)


def _first_duplicate(items: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _unused in items:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key is twice")


def _check_depth(value: Any, where: object) -> None:
    level = [value] if isinstance(value, (dict, list)) else []
    for _unused in range(MAX_DEPTH + 1):
        if not level:
            return
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    raise BadFile(
        _(
            "{where}: nested deeper than {max_depth} levels; the file is damaged or hostile",
            where=where,
            max_depth=MAX_DEPTH,
        )
    )
