"""The lines of a name table: patterns with numbered holes, and how a name finds its row."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from headwater.errors import BadSetting
from headwater.weights.changes import Steps, parse_steps

ENDINGS = (
    "",
    ".weight",
    ".bias",
)  # in this order: a row that names the whole tensor wins over one that means its module
_NUMBER = re.compile(r"(?:(?<=\.)|^)(?:0|[1-9][0-9]{0,5})(?=\.|$)", re.ASCII)
_HOLE = re.compile(r"\{(\w+)\}|(?:(?<=\.)|^)(\d+)(?=\.|$)", re.ASCII)
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


@dataclass(frozen=True)
class Pattern:
    """A name with holes: `h.{i}.mlp` has the key `h.#.mlp`. A literal number is a hole already filled."""

    text: str

    @property
    def key(self) -> str:
        return _HOLE.sub("#", self.text)

    @property
    def holes(self) -> set[str]:
        return {hole[1] for hole in _HOLE.finditer(self.text) if hole[1]}

    def match(self, numbers: list[str]) -> dict[str, str] | None:
        found: dict[str, str] = {}
        for hole, number in zip(_HOLE.finditer(self.text), numbers, strict=True):
            variable, literal = hole.groups()
            if literal not in (None, number) or (variable and found.setdefault(variable, number) != number):
                return None
        return found

    def fill(self, found: Mapping[str, str]) -> str:
        return _HOLE.sub(lambda hole: found[hole[1]] if hole[1] else hole[2], self.text)


@dataclass(frozen=True)
class Row:
    theirs: Pattern  # as it is written
    also: tuple[Pattern, ...]  # as it may be read
    ours: tuple[Pattern, ...]  # none: dropped
    steps: Steps
    unless: tuple[Pattern, ...] = ()  # not written for a model that has this tensor: another row says how


@dataclass(frozen=True)
class Found:
    """One row met in a file: which row, its numbers, and the ending both names share."""

    row: Row
    numbers: tuple[tuple[str, str], ...]
    ending: str

    def ours(self) -> list[str]:
        return [pattern.fill(dict(self.numbers)) + self.ending for pattern in self.row.ours]

    def theirs(self) -> str:
        return self.row.theirs.fill(dict(self.numbers)) + self.ending

    def rules_out(self, ours: Container[str]) -> bool:
        return any(pattern.fill(dict(self.numbers)) + self.ending in ours for pattern in self.row.unless)


def parse_row(line: str) -> Row:
    names, _, changes = line.partition(" :")
    changes, _, unless = changes.partition(" unless ")
    theirs, *ours = names.split()
    if not ours:
        raise BadSetting(f"a line of a name table must say `theirs  ours`, got {line!r}; drop a tensor with `-`")
    written, *also = _spellings(theirs)
    pieces = [] if ours == ["-"] else [piece for name in ours for piece in _choices(name)]
    if any(Pattern(piece).holes != Pattern(written).holes for piece in pieces):
        raise BadSetting(f"both sides of a name table must have the same numbers, or it could not be written: {line!r}")
    return Row(
        Pattern(written),
        tuple(map(Pattern, also)),
        tuple(map(Pattern, pieces)),
        parse_steps(changes),
        tuple(map(Pattern, unless.split())),
    )


def _spellings(name: str) -> list[str]:
    """`[a.]b[.c]` -> with every bracket, then with some left out."""
    parts = re.split(r"\[([^\]]*)\]", name)
    optional = parts[1::2]
    return [
        "".join(itertools.chain.from_iterable(itertools.zip_longest(parts[::2], chosen, fillvalue="")))
        for chosen in itertools.product(*((text, "") for text in optional))
    ]


def _choices(name: str) -> list[str]:
    """`attn.{q,k,v}` -> attn.q attn.k attn.v."""
    choice = _CHOICE.search(name)
    if not choice:
        return [name]
    return [
        made
        for word in choice[1].split(",")
        for made in _choices(name[: choice.start()] + word.strip() + name[choice.end() :])
    ]


def index_rows(pairs: Iterable[tuple[Pattern, Row]]) -> dict[str, list[tuple[Pattern, Row]]]:
    index: dict[str, list[tuple[Pattern, Row]]] = {}
    for pattern, row in pairs:
        index.setdefault(pattern.key, []).append((pattern, row))
    return index


def find_row(index: dict[str, list[tuple[Pattern, Row]]], name: str, having: Container[str] = ()) -> Found | None:
    """The row for a name. having: the tensors of the model that is written, for rows that say `unless`."""
    for ending in ENDINGS:
        if not name.endswith(ending):
            continue
        stem = name.removesuffix(ending)
        for pattern, row in index.get(_NUMBER.sub("#", stem), ()):
            numbers = pattern.match(_NUMBER.findall(stem))
            if numbers is None:
                continue
            found = Found(row, tuple(numbers.items()), ending)
            if not row.unless or not found.rules_out(having):
                return found
    return None
