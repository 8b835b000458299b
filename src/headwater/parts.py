"""Parts: specs as frozen dataclasses, each of which describes one component and builds it. No torch here.

Parts compare and hash by value, print as the Python code that builds them, and convert to JSON and back.
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
from headwater.i18n import _

REGISTRY: dict[str, type] = {}
MAX_INT = 2**31 - 1  # a larger size is a mistake or an attack: no real model has one
MAX_FLOAT = 3.4e38  # larger numbers are infinite in float32

P = TypeVar("P")


@dataclass_transform(frozen_default=True)
def part(cls: type[P]) -> type[P]:
    """Make a class a part: a frozen dataclass, registered by name, whose fields are validated on creation."""
    if cls.__name__ in REGISTRY:
        raise TypeError(f"a part called {cls.__name__} is already defined in {REGISTRY[cls.__name__].__module__}")
    validate = getattr(cls, "__post_init__", None)  # of the class, or of the part it derives from

    def __post_init__(self: Any) -> None:
        _check_fields(self)
        if validate:
            validate(self)

    cls.__post_init__ = __post_init__  # type: ignore[attr-defined]
    cls.__repr__ = _to_code  # type: ignore[method-assign]
    spec = dataclasses.dataclass(frozen=True, repr=False)(cls)
    REGISTRY[cls.__name__] = spec
    return spec


def must(condition: bool, owner: object, requirement: str, got: object, hint: str) -> None:
    """Raise BadSetting unless the condition holds. owner: whose requirement; got: the value; hint: what to do."""
    if not condition:
        name = owner if isinstance(owner, str) else type(owner).__name__
        raise BadSetting(
            _("{name}: {requirement}, got {got!r}; {hint}", name=name, requirement=requirement, got=got, hint=hint)
        )


def to_dict(value: Any) -> Any:
    """Parts and tuples to dicts and lists, ready for JSON. A tuple of equal items is written once, with its length."""
    if dataclasses.is_dataclass(value):
        fields = {name: to_dict(v) for name, v in _non_default_fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple):
        if _is_repeated(value):
            return {"times": len(value), "of": to_dict(value[0])}
        return [to_dict(v) for v in value]
    return value


def from_dict(value: Any) -> Any:
    """The inverse of to_dict. An unknown kind or field is refused by name, with the nearest known one."""
    if isinstance(value, list):
        return tuple(from_dict(v) for v in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {"times", "of"}:
        times = value["times"]
        is_valid = type(times) is int and 0 <= times <= 10_000
        must(is_valid, "times", _("must be an integer from 0 to 10000"), times, _("fix the file"))
        return (from_dict(value["of"]),) * times
    kind = value.get("kind")
    must(isinstance(kind, str), "part", _("kind must be a string"), _summary(kind), _("such as {'kind': 'RMSNorm'}"))
    if kind not in REGISTRY:
        raise BadSetting(_("no part is called {kind!r}; {nearest}", kind=kind, nearest=nearest(str(kind), REGISTRY)))
    known = {f.name for f in dataclasses.fields(REGISTRY[kind])}
    fields = {k: from_dict(v) for k, v in value.items() if k != "kind"}
    for name in fields:
        if name not in known:
            raise BadSetting(
                _("{kind} has no field {name!r}; {nearest}", kind=kind, name=name, nearest=nearest(name, known))
            )
    try:
        return REGISTRY[kind](**fields)
    except TypeError as error:
        raise BadSetting(
            _("{kind} cannot be built: {error}; give every field it needs", kind=kind, error=error)
        ) from None


def swap(value: Any, cls: type[P], change: Callable[[P], Any]) -> Any:
    """The same tree of parts with change(p) in place of every part p of exactly that class."""
    if isinstance(value, tuple):
        return tuple(swap(v, cls, change) for v in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: swap(getattr(value, f.name), cls, change) for f in dataclasses.fields(value)}
    swapped = dataclasses.replace(value, **fields)
    return change(swapped) if type(swapped) is cls else swapped


# --------------------------------------------------------------------------------------------------- printing


def _non_default_fields(value: Any) -> list[tuple[str, Any]]:
    """The fields that differ from their defaults: enough to build the part again."""
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return [(f.name, v) for f, v in fields if f.default is dataclasses.MISSING or v != f.default]


def _is_repeated(value: tuple) -> bool:
    return len(value) > 1 and dataclasses.is_dataclass(value[0]) and all(v == value[0] for v in value)


def _to_code(value: Any, indent: int = 0) -> str:
    """Python code that builds the value, in lines of at most 120 characters."""
    pad = "    " * (indent + 1)
    if dataclasses.is_dataclass(value):
        open_ = type(value).__name__ + "("
        close = ")"
        items = [(n + "=", v) for n, v in _non_default_fields(value)]
    elif isinstance(value, tuple):
        times = len(value) if _is_repeated(value) else 1
        open_ = "("
        close = f") * {times}" if times > 1 else ")"
        items = [("", v) for v in (value[:1] if times > 1 else value)]
    else:
        return repr(value)
    is_single = isinstance(value, tuple) and len(items) == 1
    flat = open_ + ", ".join(name + _to_code(v, indent) for name, v in items) + ("," if is_single else "") + close
    if len(flat) + 4 * indent <= 112 and "\n" not in flat:
        return flat
    lines = [pad + name + _to_code(v, indent + 1) + ",\n" for name, v in items]
    return open_ + "\n" + "".join(lines) + "    " * indent + close


# --------------------------------------------------------------------------------------------- validation of fields


def _check_fields(self: Any) -> None:
    """Check each field against its annotation. Any stands for another part.

    An int must be from 0 to MAX_INT; a float must be finite. Lists become tuples, so that parts hash.
    """
    hints = _type_hints(type(self))
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        hint = hints[field.name]
        if isinstance(value, list):
            object.__setattr__(self, field.name, value := tuple(value))
        if type(value) is int and float in (hint, *typing.get_args(hint)):
            object.__setattr__(self, field.name, value := float(value))
        if not _matches(value, hint) and not (value is None and field.default is None):
            must(
                False,
                self,
                _("{name} must be {expected}", name=field.name, expected=_describe(hint)),
                _summary(value),
                _("correct it"),
            )


TYPE_NAMES = {
    int: _("an integer from 0 to 2**31 - 1"),
    float: _("a finite number"),
    str: _("a string"),
    bool: _("True or False"),
}
_HINTS_CACHE: dict[type, dict[str, Any]] = {}


def _type_hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS_CACHE:
        _HINTS_CACHE[cls] = typing.get_type_hints(cls)
    return _HINTS_CACHE[cls]


def _matches(value: Any, hint: Any) -> bool:
    options = typing.get_args(hint)
    inner = typing.get_origin(hint)
    if inner is tuple:
        if options[-1] is Ellipsis:
            return type(value) is tuple and all(_matches(v, options[0]) for v in value)
        return type(value) is tuple and len(value) == len(options) and all(map(_matches, value, options))
    if options:
        return any(_matches(value, option) for option in options)
    if hint is int:
        return type(value) is int and 0 <= value <= MAX_INT
    if hint is float:
        return type(value) is float and math.isfinite(value) and abs(value) <= MAX_FLOAT
    if hint in (str, bool, type(None)):
        return type(value) is hint
    return type(value) in REGISTRY.values() and (hint is Any or isinstance(value, hint))


def _describe(hint: Any, plural: bool = False) -> str:
    """The annotation in words: an integer, strings, pairs of a string and a part."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        if options[-1] is Ellipsis:
            return _describe(options[0], plural=True)
        return (_("pairs of ") if plural else _("a pair of ")) + " and ".join(_describe(option) for option in options)
    if options:
        return " or ".join(sorted("nothing" if option is type(None) else _describe(option) for option in options))
    article = "an" if str(getattr(hint, "__name__", ""))[:1] in "AEIOU" else "a"
    singular = TYPE_NAMES.get(hint) or (
        _("a part") if hint is Any else _("{article} {hint} part", article=article, hint=hint.__name__)
    )
    return re.sub("^an? (.*?)(?= from |$)", r"\1s", singular) if plural else singular


def _summary(value: Any) -> Any:
    """Numbers, strings and None unchanged; for anything else the name of its type."""
    if type(value) is tuple:
        return tuple("tuple" if type(v) is tuple else _summary(v) for v in value[:4])
    kind = "class" if isinstance(value, type) else type(value).__name__
    return value if value is None or isinstance(value, int | float | str) else kind
