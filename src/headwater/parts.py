"""Parts: frozen values that describe one component each, and know how to build it. No torch here.

Equal parts are equal, hash alike, print as the code that makes them, and travel to JSON and back.
A new idea is a new part, never a new flag on an old one.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from headwater.errors import BadSetting, nearest

KINDS: dict[str, type] = {}
LARGEST = 2**31 - 1  # no size of a real model is beyond it; a larger one is a mistake or an attack
LARGEST_FLOAT = 3.4e38  # beyond it a number is infinite in float32

P = TypeVar("P")


@dataclass_transform(frozen_default=True)
def part(cls: type[P]) -> type[P]:
    """Make a class a part: a frozen dataclass, listed by name, whose simple fields are checked when it is made."""
    if cls.__name__ in KINDS:
        raise TypeError(f"a part called {cls.__name__} is already defined in {KINDS[cls.__name__].__module__}")
    own_check = getattr(cls, "__post_init__", None)  # its own, or that of the part it derives from

    def __post_init__(self: Any) -> None:
        _check_fields(self)
        if own_check:
            own_check(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    cls.__repr__ = _code  # type: ignore[method-assign]
    KINDS[cls.__name__] = made = dataclasses.dataclass(frozen=True, repr=False)(cls)
    return made


def must(holds: bool, who: object, law: str, came: object, remedy: str) -> None:
    """Refuse a setting: who must keep which law, what came instead, what to do."""
    if not holds:
        name = who if isinstance(who, str) else type(who).__name__
        raise BadSetting(f"{name}: {law}, got {came!r}; {remedy}")


def to_plain(value: Any) -> Any:
    """Parts and tuples to dicts and lists, ready for JSON. A run of equal items is written once."""
    if dataclasses.is_dataclass(value):
        changed = {name: to_plain(v) for name, v in _changed(value)}
        return {"kind": type(value).__name__, **changed}
    if isinstance(value, tuple):
        if _repeats(value):
            return {"times": len(value), "of": to_plain(value[0])}
        return [to_plain(v) for v in value]
    return value


def from_plain(value: Any) -> Any:
    """The inverse of to_plain. An unknown kind or field is refused by name, with the nearest known one."""
    if isinstance(value, list):
        return tuple(from_plain(v) for v in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"times", "of"}:
        times = value["times"]
        fits = type(times) is int and 0 <= times <= 10_000
        must(fits, "times", "must be a whole number from 0 to 10000", times, "mend the file")
        return (from_plain(value["of"]),) * times
    kind = value.get("kind")
    must(isinstance(kind, str), "part", "kind must be a word", _short(kind), "such as {'kind': 'RMSNorm'}")
    if kind not in KINDS:
        raise BadSetting(f"no part is called {kind!r}; {nearest(str(kind), KINDS)}")
    known = {f.name for f in dataclasses.fields(KINDS[kind])}
    fields = {k: from_plain(v) for k, v in value.items() if k != "kind"}
    for name in fields:
        if name not in known:
            raise BadSetting(f"{kind} has no field {name!r}; {nearest(name, known)}")
    try:
        return KINDS[kind](**fields)
    except TypeError as error:
        raise BadSetting(f"{kind} cannot be made: {error}; give every field it needs") from None


def swap(value: Any, kind: type[P], change: Callable[[P], Any]) -> Any:
    """The same tree of parts with change(p) in place of every part p of exactly that kind."""
    if isinstance(value, tuple):
        return tuple(swap(v, kind, change) for v in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: swap(getattr(value, f.name), kind, change) for f in dataclasses.fields(value)}
    same = dataclasses.replace(value, **fields)
    return change(same) if type(same) is kind else same


# ---------------------------------------------------------------------------------------------- how a part prints


def _changed(value: Any) -> list[tuple[str, Any]]:
    """The fields that differ from their defaults: all that has to be written to make the part again."""
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return [(f.name, v) for f, v in fields if f.default is dataclasses.MISSING or v != f.default]


def _repeats(value: tuple) -> bool:
    return len(value) > 1 and dataclasses.is_dataclass(value[0]) and all(v == value[0] for v in value)


def _code(value: Any, indent: int = 0) -> str:
    """Python code that makes the value, in lines of at most 120 characters."""
    pad = "    " * (indent + 1)
    if dataclasses.is_dataclass(value):
        open_, close, items = type(value).__name__ + "(", ")", [(n + "=", v) for n, v in _changed(value)]
    elif isinstance(value, tuple):
        times = len(value) if _repeats(value) else 1
        open_, close = "(", f") * {times}" if times > 1 else ")"
        items = [("", v) for v in (value[:1] if times > 1 else value)]
    else:
        return repr(value)
    one = isinstance(value, tuple) and len(items) == 1
    flat = open_ + ", ".join(name + _code(v, indent) for name, v in items) + ("," if one else "") + close
    if len(flat) + 4 * indent <= 112 and "\n" not in flat:
        return flat
    lines = [pad + name + _code(v, indent + 1) + ",\n" for name, v in items]
    return open_ + "\n" + "".join(lines) + "    " * indent + close


# ------------------------------------------------------------------------------------------- what a field may hold


def _check_fields(self: Any) -> None:
    """Each field is checked against its annotation. Any stands for another part.

    An int must be 0 or more and at most LARGEST; a float must be finite. Lists become tuples, so that parts hash.
    """
    hints = _hints(type(self))
    for field in dataclasses.fields(self):
        value, hint = getattr(self, field.name), hints[field.name]
        if isinstance(value, list):
            object.__setattr__(self, field.name, value := tuple(value))
        if type(value) is int and float in (hint, *typing.get_args(hint)):
            object.__setattr__(self, field.name, value := float(value))
        if not _fits(value, hint) and not (value is None and field.default is None):
            must(False, self, f"{field.name} must be {_wanted(hint)}", _short(value), "correct it")


_WORDS = {int: "a whole number from 0 to 2**31 - 1", float: "a finite number", str: "a word", bool: "True or False"}
_SEEN: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _SEEN:
        _SEEN[cls] = typing.get_type_hints(cls)
    return _SEEN[cls]


def _fits(value: Any, hint: Any) -> bool:
    options, inner = typing.get_args(hint), typing.get_origin(hint)
    if inner is tuple:
        if options[-1] is Ellipsis:
            return type(value) is tuple and all(_fits(v, options[0]) for v in value)
        return type(value) is tuple and len(value) == len(options) and all(map(_fits, value, options))
    if options:
        return any(_fits(value, option) for option in options)
    if hint is int:
        return type(value) is int and 0 <= value <= LARGEST
    if hint is float:
        return type(value) is float and math.isfinite(value) and abs(value) <= LARGEST_FLOAT
    if hint in (str, bool, type(None)):
        return type(value) is hint
    return type(value) in KINDS.values() and (hint is Any or isinstance(value, hint))


def _wanted(hint: Any, many: bool = False) -> str:
    """The annotation in words: a whole number, words, pairs of a word and a part."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if options[-1] is Ellipsis:
            return _wanted(options[0], many=True)
        return ("pairs of " if many else "a pair of ") + " and ".join(_wanted(option) for option in options)
    if options:
        return " or ".join(sorted("nothing" if option is type(None) else _wanted(option) for option in options))
    article = "an" if str(getattr(hint, "__name__", ""))[:1] in "AEIOU" else "a"
    one = _WORDS.get(hint) or ("a part" if hint is Any else f"{article} {hint.__name__} part")
    return re.sub("^a (.*?)(?= from |$)", r"\1s", one) if many else one


def _short(value: Any) -> Any:
    """Numbers, words and None as they are; of anything longer its kind is enough for one line."""
    if type(value) is tuple:
        return tuple("tuple" if type(v) is tuple else _short(v) for v in value[:4])
    kind = "class" if isinstance(value, type) else type(value).__name__
    return value if value is None or isinstance(value, int | float | str) else kind
