"""Foreign weight names as a two-column table, read in both directions; every tensor is accounted for.

    NAMES = table('''
        [transformer.]wte                 decoder.embed.tokens
        [transformer.]h.{i}.ln_1          decoder.layers.{i}.self_attn_norm
        [transformer.]h.{i}.attn.c_attn   decoder.layers.{i}.self_attn.{q,k,v} : transposed, split
        [transformer.]h.{i}.attn.bias     -
        lm_head                           head.out
        .gamma = .weight
    ''')

One line a rule: their name, ours, and after a colon what changes besides the name (see changes.py). {i}, {j} stand for
numbers; {q,k,v} for several of ours; [prefix] may be absent when reading and is always written; `-` is dropped when
reading and never written; a line with `=` is an old ending and the one it is read as. A name is meant with `.weight` or
`.bias` after it, or as it stands. A row that names the tensor in full wins; otherwise the first that fits. A row that
ends in `: unless decoder.embed.tokens` is not written where the model has that tensor too: a later row says how then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.weights.files import shown
from headwater.weights.name_rows import Found, Row, find_row, index_rows, parse_row
from headwater.weights.tensors import Tensors, outline


def table(text: str) -> Names:
    """Parse a name table (see the top of this file)."""
    rows, respelt = [], {}
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        if " = " in line:
            old, new = line.split(" = ")
            respelt[old.strip()] = new.strip()
        else:
            rows.append(parse_row(line))
    return Names(rows, respelt)


class Names:
    """A parsed table. `read` shows a file under our names, `write` shows our tensors under theirs; neither copies."""

    def __init__(self, rows: Iterable[Row], respelt: Mapping[str, str]):
        self.rows, self.respelt = tuple(rows), dict(respelt)
        self._theirs = index_rows((pattern, row) for row in self.rows for pattern in (row.theirs, *row.also))
        self._ours = index_rows((pattern, row) for row in self.rows for pattern in row.ours)

    def __add__(self, other: Names) -> Names:
        """One table after the other: a family's body, then its head."""
        return Names(self.rows + other.rows, {**self.respelt, **other.respelt})

    def read(
        self,
        file: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        *,
        tied: Mapping[str, str] | None = None,
        spare: tuple[str, ...] = (),
        **sizes: int,
    ) -> Tensors:
        """The file under our names: those in `wanted`, each of its shape, or a BadFile that says what is amiss.

        wanted  our tensors by name; on the meta device will do
        tied    second name -> first name of a shared tensor; the file may hold both if they are equal
        spare   beginnings of our names that the file may hold although nobody wants them: a head we do not build
        sizes   what the changes name after `by`: heads=12, kv_heads=4

        No tensor is read until it is asked for, except where the file holds one twice and both must be compared.
        """
        return _Reading(self, file, wanted, tied or {}, spare, self._checked(sizes))

    def write(self, ours: Mapping[str, Tensor], **sizes: int) -> Tensors:
        """Our tensors under their names, each made when asked for. A tensor no row names is a BadFile."""
        return _Writing(self, ours, self._checked(sizes))

    def find_theirs(self, name: str) -> Found | None:
        for old, new in self.respelt.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return find_row(self._theirs, name)

    def find_ours(self, name: str, having: Container[str] = ()) -> Found | None:
        return find_row(self._ours, name, having)

    def _checked(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        needs = set().union(*(row.steps.needs() for row in self.rows))
        if missing := needs - set(sizes):
            raise BadSetting(
                f"this name table needs the sizes {sorted(missing)}, got {sorted(sizes)}; name them in the call"
            )
        return sizes


class Source(NamedTuple):
    """Where one of our tensors comes from: their name, the row it met, and which piece of it."""

    theirs: str
    found: Found
    piece: int


class _Reading(Tensors):
    def __init__(
        self,
        names: Names,
        file: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        tied: Mapping[str, str],
        spare: tuple[str, ...],
        sizes: Mapping[str, int],
    ):
        self.where = getattr(file, "where", "the file")
        self._file, self._sizes = file, sizes
        sources: dict[str, list[Source]] = {name: [] for name in wanted}
        unknown = []
        for theirs in file:
            found = names.find_theirs(theirs)
            targets = [] if found is None else [tied.get(name, name) for name in found.ours()]
            if found is None or any(t not in sources and not t.startswith(spare or "\0") for t in targets):
                unknown.append(theirs)
                continue
            for piece, target in enumerate(targets):
                sources.get(target, []).append(Source(theirs, found, piece))
        missing = [name for name, from_where in sources.items() if not from_where]
        misshapen = [self._misfit(name, s, wanted[name]) for name, found in sources.items() for s in found]
        self._refuse(missing, unknown, [words for words in misshapen if words])
        self._source = {name: self._one_of(name, found) for name, found in sources.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._made(self._source[name], self._file[self._source[name].theirs])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def outline(self, name: str) -> Tensor:
        return self._made(self._source[name], outline(self._file, self._source[name].theirs))

    def release(self, name: str) -> None:
        if isinstance(self._file, Tensors):
            self._file.release(self._source[name].theirs)

    def _made(self, source: Source, theirs: Tensor) -> Tensor:
        pieces = source.found.row.steps.read(theirs, len(source.found.row.ours), self._sizes)
        assert pieces is not None, "shapes were checked when the file was opened"
        return pieces[source.piece]

    def _misfit(self, name: str, source: Source, wanted: Tensor) -> str:
        theirs = outline(self._file, source.theirs)
        pieces = source.found.row.steps.read(theirs, len(source.found.row.ours), self._sizes)
        if pieces is not None and pieces[source.piece].shape == wanted.shape:
            if theirs.is_floating_point() == wanted.is_floating_point():
                return ""
            return f"{shown(source.theirs)} is {theirs.dtype}, must be {wanted.dtype}".replace("torch.", "")
        came = theirs.shape if pieces is None else pieces[source.piece].shape
        return f"{shown(source.theirs)} gives {name} {list(came)}, must be {list(wanted.shape)}"

    def _refuse(self, missing: list[str], unknown: list[str], misshapen: list[str]) -> None:
        amiss = []
        if missing:
            amiss.append(f"{len(missing)} missing: {listed(missing)}")
        if unknown:
            amiss.append(f"{len(unknown)} not known: {listed(unknown)}")
        if misshapen:
            rest = f" and {len(misshapen) - 2} more" if len(misshapen) > 2 else ""
            amiss.append(f"{len(misshapen)} of the wrong shape or kind: {'; '.join(misshapen[:2])}{rest}")
        if amiss:
            raise BadFile(f"{self.where}: its tensors do not fit this model; " + ". ".join(amiss))

    def _one_of(self, name: str, sources: list[Source]) -> Source:
        first, *others = sources
        for other in others:
            one, two = (self._made(s, self._file[s.theirs]) for s in (first, other))
            if not torch.equal(one, two):
                raise BadFile(
                    f"{self.where}: {shown(first.theirs)} and {shown(other.theirs)} both mean {name} and must be equal "
                    "but differ; the weights are not tied as the model says"
                )
        return first


class _Writing(Tensors):
    def __init__(self, names: Names, ours: Mapping[str, Tensor], sizes: Mapping[str, int]):
        self.where = "the model"
        self._ours, self._sizes = ours, sizes
        found = {name: names.find_ours(name, ours) for name in ours}
        self._found = {row.theirs(): row for row in found.values() if row is not None}
        covered = {piece for row in self._found.values() for piece in row.ours()}
        unknown = [name for name in ours if name not in covered]
        missing = [piece for piece in covered if piece not in ours]
        if unknown or missing:
            raise BadFile(
                f"the model can not be written in this layout: {len(unknown)} tensors have no public name "
                f"({listed(unknown)}), {len(missing)} pieces are missing ({listed(missing)})"
            )

    def __getitem__(self, name: str) -> Tensor:
        row = self._found[name]
        return row.row.steps.write([self._ours[piece] for piece in row.ours()], self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def outline(self, name: str) -> Tensor:
        row = self._found[name]
        return row.row.steps.write([outline(self._ours, piece) for piece in row.ours()], self._sizes)


def listed(names: Iterable[str], most: int = 4) -> str:
    """The first few names, and how many more.

    >>> listed(["a", "b", "c"], most=1)
    "'a' and 2 more"
    """
    names = list(names)
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name, 80) for name in names[:most]) + rest
