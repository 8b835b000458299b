"""Settling a recipe: the user's files are looked at once; what the user names is taken, the rest is found and noted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.data.examples import task_named
from headwater.data.reading.chats import refuse_chats
from headwater.data.reading.columns import (
    NEEDS,
    check_columns,
    instruction_format,
    roles_by_content,
    roles_by_name,
    task_of,
)
from headwater.data.reading.files import CLASSES, Side, gather, pair_up, side_of
from headwater.data.reading.folders import Kind, alike, is_side, named
from headwater.data.reading.headers import column_names, has_header
from headwater.data.reading.lines import USUAL, Reading
from headwater.data.reading.names import language_code
from headwater.data.reading.problems import Problems
from headwater.data.reading.recipe import Part, Recipe, table
from headwater.data.reading.sniff import layout_of
from headwater.data.reading.tables import first_rows
from headwater.errors import BadFile, BadSetting, Fault

SAMPLE_ROWS = 500
HEADER_ROWS = 200  # rows from which a header is told
HEADER = ("auto", "yes", "no")
TABLES = ("tsv", "csv", "jsonl", "json")
MAY_HAVE = {"classification": ("second",), "text-to-text": ("input",)}  # roles a task can do without
FIXED = {"conll": "tagging", "squad": "answers", "running": "language-model"}


@dataclass(frozen=True)
class Wanted:
    """What the user says about the files; whatever is left out is found."""

    task: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None
    reading: Reading = USUAL
    header: str = "auto"  # yes, no: whether the first row of a TSV or CSV names its columns

    def __post_init__(self) -> None:
        if self.header not in HEADER:
            raise BadSetting(f"header must be yes, no or auto, got {self.header!r}; auto finds out")

    @property
    def chosen(self) -> dict[str, str]:
        """Role -> column, as the user names them."""
        sides = {"source": self.source, "target": self.target}
        return {**self.columns, **{role: name for role, name in sides.items() if name}}


NOTHING = Wanted()


def settle(paths: Iterable[Path | str], valid: Iterable[Path | str] = (), wanted: Wanted = NOTHING) -> Recipe:
    """The recipe for these files."""
    if wanted.task:
        wanted = dataclasses.replace(wanted, task=task_named(wanted.task))
    found = gather(paths)
    sides = [side_of(path) for path in found.files]
    if valid := list(valid):
        more = gather(valid)
        sides += [side_of(path)._replace(split="valid") for path in more.files]
        found.notes += more.notes
    notes = found.notes
    if together := _sharing_a_stem(sides, found.in_folder):
        return _parallel_recipe(_with_train(together, notes), sides, wanted, notes)
    if found.in_folder:
        sides = _read_alike(sides, found.in_folder, found.empty, wanted, notes)
    parts = _parts(_with_train(sides, notes), wanted)
    layouts = dict.fromkeys(part.layout for part in parts)
    if len(layouts) > 1 and not set(layouts) <= set(TABLES):
        said = ", ".join(f"{part.paths[0].name} ({part.layout})" for part in parts)
        raise BadFile(f"all files must have one layout, these have {len(layouts)}: {said}; give those of one task")
    if parts[0].layout in FIXED:
        return _fixed_recipe(parts, wanted, notes)
    return _table_recipe(parts, wanted, notes)


def _with_train(sides: list[Side], notes: list[str]) -> list[Side]:
    """Something must be learned from: when no name says train, the first set is taken for it."""
    if any(side.split == "train" for side in sides):
        return sides
    first = sides[0].split
    notes.append(f"no file is called train; {first} is taken for it")
    return [side._replace(split="train") if side.split == first else side for side in sides]


def _sharing_a_stem(sides: list[Side], in_folder: set[Path]) -> list[Side]:
    """The files that have another side: same stem, same folder, different language.

    A folder may hold model.c and model.h: of files nobody named those count whose suffix is a language, a side or a
    class; without any, all of them if each has another side.
    """
    together = _with_another([side for side in sides if side.language])
    sure = _with_another([side for side in together if side.path not in in_folder or is_side(side.language)])
    if sure or len(together) < len(sides):
        return sure
    return together


def _with_another(sides: list[Side]) -> list[Side]:
    stems = Counter(side.stem for side in sides)
    return [side for side in sides if stems[side.stem] > 1]


def _read_alike(
    sides: list[Side], in_folder: set[Path], empty: list[Path], wanted: Wanted, notes: list[str]
) -> list[Side]:
    """Of the files in a folder those that are read alike; files that were named stay."""
    kinds, faults = [], list[Fault]()
    for side in sides:
        if side.path in in_folder:
            try:
                kinds.append(_kind(side, wanted))
            except Fault as fault:  # a photo, a program, a table of something else
                faults.append(fault)
    if not kinds and len(in_folder) == len(sides) + len(empty):
        raise faults[0]
    chosen = alike(kinds) if kinds else set[Path]()
    kept = [side for side in sides if side.path in chosen or side.path not in in_folder]
    if unused := sorted({*empty, *(side.path for side in sides)} - {side.path for side in kept}):
        read = [side.path for side in kept]
        notes.append(f"of the folder, read: {named(read)}; not read: {named(unused)}")
    return kept


def _kind(side: Side, wanted: Wanted) -> Kind:
    """What a file would be read as, alone."""
    part = _part(side, wanted)
    if part.layout == "running":
        return Kind(side.path, ("running", Path(side.path.name.removesuffix(".gz")).suffix), False)
    if part.layout in FIXED:
        return Kind(side.path, part.layout, True)
    recipe = _table_recipe((part,), wanted, [])
    named_columns = part.skip > 0 or part.layout in ("jsonl", "json")
    key = (recipe.task, tuple(recipe.roles.items())) if named_columns else ("columns", len(part.header))
    return Kind(side.path, key, True)


def _parallel_recipe(sides: list[Side], given: list[Side], wanted: Wanted, notes: list[str]) -> Recipe:
    languages = {side.language for side in sides}
    if wanted.task == "classification" or (not wanted.task and languages <= CLASSES):
        splits = dict.fromkeys(side.split for side in sides)
        parts = [Part(s, "by-file", tuple(side.path for side in sides if side.split == s)) for s in splits]
        return Recipe("classification", tuple(parts), {}, (), wanted.reading, tuple(notes))
    if wanted.task not in ("", "text-to-text"):
        raise BadSetting(f"parallel files are for text-to-text, got task {wanted.task!r}; give one file, or no task")
    pairs, (left, right) = pair_up(sides, wanted.source, wanted.target)
    split = {side.stem: side.split for side in sides}
    read = {path for files in pairs.values() for path in files}
    if unused := [side.path for side in given if side.path not in read]:
        notes.append(f"not read, without another side in {left} and {right}: {named(unused)}")
    parts = [Part(split[stem], "parallel", files) for stem, files in pairs.items()]
    names = tuple(filter(None, map(language_code, (left, right))))
    names = names if len(names) == 2 else ()
    return Recipe("text-to-text", tuple(parts), {"source": left, "target": right}, names, wanted.reading, tuple(notes))


def _fixed_recipe(parts: tuple[Part, ...], wanted: Wanted, notes: list[str]) -> Recipe:
    layout, task = parts[0].layout, FIXED[parts[0].layout]
    if wanted.task not in ("", task):
        raise BadSetting(f"{parts[0].paths[0].name} is {layout}, which is for {task}, not {wanted.task}; "
                         "give a file for that task")  # fmt: skip
    if layout == "running":
        splits = dict.fromkeys(part.split for part in parts)
        parts = tuple(Part(s, layout, tuple(p.paths[0] for p in parts if p.split == s)) for s in splits)
    return Recipe(task, parts, {}, (), wanted.reading, tuple(notes))


def _parts(sides: Sequence[Side], wanted: Wanted) -> tuple[Part, ...]:
    """Every file with its layout. A first row that is the header of an earlier file is a header too."""
    parts: list[Part] = []
    for side in sides:
        headers = {part.header for part in parts if part.skip}
        parts.append(_part(side, wanted, headers))
    return tuple(parts)


def _part(side: Side, wanted: Wanted, headers: Collection[tuple[str, ...]] = ()) -> Part:
    """One file with its layout; for a TSV or CSV also its column names, from its header or as '1', '2', '3'."""
    layout, reading = layout_of(side.path, wanted.reading), wanted.reading
    if layout not in ("tsv", "csv"):
        return Part(side.split, layout, (side.path,))
    delimiter = "\t" if layout == "tsv" else _delimiter(side.path, reading)
    rows = first_rows(side.path, reading, delimiter, HEADER_ROWS)
    if not rows:
        raise BadFile(f"{side.path} holds no rows; give a file with at least one")
    names = column_names(rows[0])
    if wanted.header == "yes" or (wanted.header == "auto" and _is_header(rows, names, wanted, headers)):
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadFile(f"{side.path}: the names of columns must differ, {twice[0]!r} is there twice; rename one")
        return Part(side.split, layout, (side.path,), names, 1, delimiter)
    widths = [len(row) for row in rows]
    usual = max(set(widths), key=widths.count)
    return Part(side.split, layout, (side.path,), tuple(map(str, range(1, usual + 1))), 0, delimiter)


def _is_header(
    rows: list[list[str]], names: tuple[str, ...], wanted: Wanted, headers: Collection[tuple[str, ...]]
) -> bool:
    """Whether the first row is one: the user names its cells, an earlier file has it, or it looks like one."""
    chosen = set(wanted.chosen.values())
    named_here = bool(chosen) and chosen <= set(names) and not all(name.isdigit() for name in chosen)
    return named_here or names in headers or has_header(rows)


def _delimiter(path: Path, reading: Reading) -> str:
    """The comma of a CSV file: the separator that most often cuts its first rows as it cuts the very first."""

    def rows_alike(mark: str) -> int:
        rows = first_rows(path, reading, mark, 20)
        return sum(len(row) == len(rows[0]) > 1 for row in rows)

    return max(",;\t", key=rows_alike)


def _table_recipe(parts: tuple[Part, ...], wanted: Wanted, notes: list[str]) -> Recipe:
    chosen = wanted.chosen
    sample = _sample(parts[0], wanted.reading)
    names = list(parts[0].header) or list(dict.fromkeys(name for row in sample for name in row))
    check_columns(chosen, names)
    named_columns = parts[0].skip > 0 or parts[0].layout in ("jsonl", "json")
    if not chosen:
        refuse_chats(parts[0].paths[0], sample)
    pairs_wanted = not chosen and named_columns and wanted.task in ("", "text-to-text")
    format_name, found = instruction_format(names) if pairs_wanted else ("", {})
    if not format_name:
        found = roles_by_name(names) if named_columns else {}
        if not task_of({**found, **chosen}):
            found = {**roles_by_content(sample), **found}
    roles = {**{role: name for role, name in found.items() if name not in chosen.values()}, **chosen}
    roles, task = _fit(roles, wanted.task, names)
    if left := [name for name in names if name not in roles.values()]:
        notes.append("columns not used: " + ", ".join(left))
    codes = tuple(filter(None, (language_code(roles.get(role, "")) for role in ("source", "target"))))
    languages = codes if len(codes) == 2 else ()
    return Recipe(task, parts, roles, languages, wanted.reading, tuple(notes), format_name)


def _fit(roles: dict[str, str], wanted: str, names: list[str]) -> tuple[dict[str, str], str]:
    """Only the roles that the task needs. A task the user named may read source as text, or target as label."""
    other = {"source": "text", "text": "source", "target": "label", "label": "target"}
    task = wanted or task_of(roles)
    needs = NEEDS.get(task, ())
    for role in needs:
        if role not in roles and (stand_in := roles.get(other.get(role, ""))):
            roles[role] = stand_in
    if missing := [role for role in needs if role not in roles] or ([] if task else ["text"]):
        raise BadSetting(
            f"{task or 'any task'} needs columns {', '.join(needs or missing)}; nothing says which of "
            f"{', '.join(names[:10])} is {missing[0]}; name them, for example --columns "
            + ",".join(f"{role}={name}" for role, name in zip(needs or missing, names, strict=False))
        )
    keep = (*needs, *MAY_HAVE.get(task, ()))
    return {role: roles[role] for role in keep if role in roles}, task


def _sample(part: Part, reading: Reading) -> list[dict[str, Any]]:
    lenient = Reading(reading.encoding, "replace" if reading.invalid == "strict" else reading.invalid, reading.longest)
    rows = [row.cells for row, _ in zip(table(part, lenient, Problems(limit=10**9)), range(SAMPLE_ROWS), strict=False)]
    if not rows:
        raise BadFile(f"{part.paths[0]} holds no rows that can be read; check its layout and encoding")
    return rows
