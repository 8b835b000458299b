"""A public config.json, read by asking: every answer is checked, and a key nobody asked for is refused in the end.

    c = Settings.read(folder / "config.json")
    heads = c.size("num_attention_heads", "n_head")          # aliases: whichever is there
    eps = c.number("layer_norm_eps", default=1e-12)
    c.done()                                                 # refuses what is left, by name

A null counts as absent. A bool is not a number. Sizes are bounded before anything is built from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from headwater.errors import BadFile, nearest
from headwater.weights.files import read_bounded, shown
from headwater.weights.harmless import FORBIDDEN, HARMLESS, HARMLESS_WHEN
from headwater.weights.strict_json import parse_object

MOST_BYTES = 4 << 20  # id2label of a large classifier is the longest honest part
LARGEST, MOST_LAYERS = 2**31 - 1, 10_000

T = TypeVar("T")


class Needed:
    """The default of a setting that has none."""


NEEDED = Needed()


class Settings:
    def __init__(self, values: dict[str, Any], where: object = "config.json"):
        self.where, self._values, self._asked = where, values, set[str]()
        self._parts: list[Settings] = []
        if forbidden := sorted(_keys_within(values) & FORBIDDEN):
            raise BadFile(
                f"{where}: {forbidden[0]!r} asks to run code that came with the weights; Headwater never does. "
                "Remove the key if the model is a plain one of its model_type"
            )

    @classmethod
    def read(cls, path: str | Path) -> Settings:
        return cls(parse_object(read_bounded(path, MOST_BYTES), path), path)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def size(self, *names: str, least: int = 1, most: int = LARGEST, default: int | Needed = NEEDED) -> int:
        """A whole number: a width, a count, an id (with least=0)."""
        return self._get(
            names, default, lambda v: type(v) is int and least <= v <= most, f"a whole number, {least} to {most}"
        )

    def layers(self, *names: str, default: int | Needed = NEEDED) -> int:
        return self.size(*names, most=MOST_LAYERS, default=default)

    def number(self, *names: str, least: float = 0.0, most: float = 1e18, default: float | Needed = NEEDED) -> float:
        """A finite number, as a float."""
        fits = lambda v: type(v) in (int, float) and least <= v <= most  # noqa: E731
        return float(self._get(names, default, fits, f"a number, {least:g} to {most:g}"))

    def flag(self, *names: str, default: bool | Needed = NEEDED) -> bool:
        return self._get(names, default, lambda v: type(v) is bool, "true or false")

    def word(self, *names: str, known: Iterable[str] = (), default: str | Needed = NEEDED) -> str:
        """A text; where the known ones are given, one of them."""
        value = self._get(names, default, lambda v: isinstance(v, str) and len(v) <= 1000, "a text")
        if (known := list(known)) and value not in known:
            raise BadFile(f"{self.where}: {names[0]} {shown(value)} is not known; {nearest(value[:50], known)}")
        return value

    @overload
    def items(self, name: str, kind: type[T], default: None) -> list[T] | None: ...
    @overload
    def items(self, name: str, kind: type[T], default: list[T] | Needed = NEEDED) -> list[T]: ...
    def items(self, name: str, kind: type[T], default: list[T] | Needed | None = NEEDED) -> list[T] | None:
        """A list of at most 10,000 things of one kind: a head's eos ids, a pattern of layer types."""
        fits = lambda v: isinstance(v, list) and len(v) <= 10_000 and all(type(x) is kind for x in v)  # noqa: E731
        return self._get((name,), default, fits, f"a list of {kind.__name__}")

    def ids(self, name: str) -> list[int]:
        """Token ids written as a number, a list, or not at all: eos_token_id is all three in the wild."""
        value = self._get((name,), [], lambda v: type(v) in (int, list), "an id or a list of ids")
        found = value if isinstance(value, list) else [value]
        if len(found) > 1000 or not all(type(n) is int and 0 <= n <= LARGEST for n in found):
            raise BadFile(f"{self.where}: {name} must be token ids, got {shown(value)}")
        return found

    def labels(self, default: int = 2) -> list[str]:
        """The names of the classes, in order: id2label, or as many as num_labels says."""
        named = self._get(("id2label",), {}, lambda v: isinstance(v, dict), "a table from number to name")
        count = len(named) or self.size("num_labels", "_num_labels", most=1_000_000, default=default)
        return [str(named.get(str(i), f"LABEL_{i}")) for i in range(count)]

    def maybe(self, read: Literal["size", "number", "flag", "word"], *names: str, **bounds: Any) -> Any:
        """What `size`, `number` ... would give, or None where the key is absent: c.maybe("size", "head_dim")."""
        self._asked.update(names)
        return getattr(self, read)(*names, **bounds) if any(name in self for name in names) else None

    def part(self, name: str) -> Settings:
        """A table inside the table, empty if it is absent. Its unread keys count as ours."""
        value = self._get((name,), {}, lambda v: isinstance(v, dict), "a table of settings")
        inner = Settings(value, f"{self.where}: {name}")
        self._parts.append(inner)
        return inner

    def read_by_now(self, *names: str) -> None:
        """Keys the caller knows to be spoken for."""
        self._asked.update(names)

    def done(self) -> None:
        """Refuse keys nobody read: each may change the maths."""
        for inner in self._parts:
            inner.done()
        left = [key for key in self._values if key not in self._asked and not self._harmless(key)]
        if left:
            named = ", ".join(f"{shown(key, 40)} = {shown(self._values[key], 30)}" for key in left[:5])
            rest = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise BadFile(
                f"{self.where}: settings nobody reads, which may change what the model computes: {named}{rest}; "
                "remove them if they do not matter"
            )

    def _harmless(self, key: str) -> bool:
        return key in HARMLESS or (key in HARMLESS_WHEN and self._values[key] in HARMLESS_WHEN[key])

    def _get(self, names: tuple[str, ...], default: Any, fits: Any, law: str) -> Any:
        self._asked.update(names)
        present = [name for name in names if self._values.get(name) is not None]
        if not present:
            if isinstance(default, Needed):
                raise BadFile(f"{self.where}: {' or '.join(names)} is missing; it must be {law}")
            return default
        value = self._values[present[0]]
        if not fits(value):
            raise BadFile(f"{self.where}: {present[0]} must be {law}, got {shown(value)}")
        for other in present[1:]:
            if self._values[other] != value:
                said = f"{present[0]} = {shown(value)} and {other} = {shown(self._values[other])}"
                raise BadFile(f"{self.where}: {said} mean the same and must be equal")
        return value


def _keys_within(value: Any) -> set[str]:
    found: set[str] = set()
    level = [value]
    while level:
        tables = [node for node in level if isinstance(node, dict)]
        found.update(key for node in tables for key in node)
        level = [
            child
            for node in level
            if isinstance(node, (dict, list))
            for child in (node.values() if isinstance(node, dict) else node)
        ]
    return found
