"""Settling a recipe: the user's files are looked at once; what the user names is taken, the rest is found and noted."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.data.examples import task_named
from headwater.data.reading.columns import (
    NEEDS,
    check_columns,
    is_header,
    is_language,
    roles_by_content,
    roles_by_name,
    task_of,
)
from headwater.data.reading.files import CLASSES, Side, gather, pair_up, side_of
from headwater.data.reading.lines import USUAL, Reading
from headwater.data.reading.problems import Problems
from headwater.data.reading.recipe import Part, Recipe, table
from headwater.data.reading.sniff import layout_of
from headwater.data.reading.tables import first_rows
from headwater.errors import BadFile, BadSetting

SAMPLE_ROWS = 500
FIXED = {"conll": "tagging", "squad": "answers", "running": "language-model"}


@dataclass(frozen=True)
class Wanted:
    """What the user says about the files; whatever is left out is found."""

    task: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None
    reading: Reading = USUAL


NOTHING = Wanted()


def settle(paths: Iterable[Path | str], valid: Iterable[Path | str] = (), wanted: Wanted = NOTHING) -> Recipe:
    """The recipe for these files."""
    if wanted.task:
        wanted = dataclasses.replace(wanted, task=task_named(wanted.task))
    files, notes = gather(paths)
    sides = [side_of(path) for path in files]
    if valid := list(valid):
        more, more_notes = gather(valid)
        sides += [side_of(path)._replace(split="valid") for path in more]
        notes += more_notes
    sides = _with_train(sides, notes)
    if together := _sharing_a_stem(sides):
        return _parallel_recipe(together, len(sides), wanted, notes)
    parts = tuple(_part(side, wanted) for side in sides)
    layouts = dict.fromkeys(part.layout for part in parts)
    if len(layouts) > 1 and not set(layouts) <= {"tsv", "csv", "jsonl", "json"}:
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


def _sharing_a_stem(sides: list[Side]) -> list[Side]:
    """The files that have another side: same stem, same folder, different language."""
    counts: dict[str, int] = {}
    for side in sides:
        if side.language:
            counts[side.stem] = counts.get(side.stem, 0) + 1
    return [side for side in sides if side.language and counts[side.stem] > 1]


def _parallel_recipe(sides: list[Side], given: int, wanted: Wanted, notes: list[str]) -> Recipe:
    languages = {side.language for side in sides}
    if wanted.task == "classification" or (not wanted.task and languages <= CLASSES):
        splits = dict.fromkeys(side.split for side in sides)
        parts = [Part(s, "by-file", tuple(side.path for side in sides if side.split == s)) for s in splits]
        return Recipe("classification", tuple(parts), {}, (), wanted.reading, tuple(notes))
    if wanted.task not in ("", "text-to-text"):
        raise BadSetting(f"parallel files are for text-to-text, got task {wanted.task!r}; give one file, or no task")
    pairs, (left, right) = pair_up(sides, wanted.source, wanted.target)
    split = {side.stem: side.split for side in sides}
    if unused := given - 2 * len(pairs):
        notes.append(f"{unused} of {given} files are not read: they have no other side in {left} and {right}")
    parts = [Part(split[stem], "parallel", files) for stem, files in pairs.items()]
    names = (left, right) if is_language(left) and is_language(right) else ()
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


def _part(side: Side, wanted: Wanted) -> Part:
    """One file with its layout; for a TSV or CSV also its column names, from its header or as '1', '2', '3'."""
    layout, reading, chosen = layout_of(side.path, wanted.reading), wanted.reading, set(wanted.columns.values())
    if layout not in ("tsv", "csv"):
        return Part(side.split, layout, (side.path,))
    delimiter = "\t" if layout == "tsv" else _delimiter(side.path, reading)
    rows = first_rows(side.path, reading, delimiter, 50)
    if not rows:
        raise BadFile(f"{side.path} holds no rows; give a file with at least one")
    stands = [cell.strip() for cell in rows[0]]
    if is_header(stands) or (chosen and chosen <= set(stands)):
        return Part(side.split, layout, (side.path,), tuple(stands), 1, delimiter)
    widths = [len(row) for row in rows]
    usual = max(set(widths), key=widths.count)
    return Part(side.split, layout, (side.path,), tuple(map(str, range(1, usual + 1))), 0, delimiter)


def _delimiter(path: Path, reading: Reading) -> str:
    """The comma of a CSV file: the separator that most often cuts its first rows as it cuts the very first."""

    def rows_alike(mark: str) -> int:
        rows = first_rows(path, reading, mark, 20)
        return sum(len(row) == len(rows[0]) > 1 for row in rows)

    return max(",;\t", key=rows_alike)


def _table_recipe(parts: tuple[Part, ...], wanted: Wanted, notes: list[str]) -> Recipe:
    sides = {role: name for role, name in (("source", wanted.source), ("target", wanted.target)) if name}
    chosen = {**wanted.columns, **sides}
    sample = _sample(parts[0], wanted.reading)
    names = list(parts[0].header) or list(dict.fromkeys(name for row in sample for name in row))
    check_columns(chosen, names)
    named = parts[0].skip > 0 or parts[0].layout in ("jsonl", "json")
    found = roles_by_name(names) if named else {}
    if not task_of({**found, **chosen}):
        found = {**roles_by_content(sample), **found}
    roles = {**{role: name for role, name in found.items() if name not in chosen.values()}, **chosen}
    roles, task = _fit(roles, wanted.task, names)
    if left := [name for name in names if name not in roles.values()]:
        notes.append("columns not used: " + ", ".join(left))
    languages = tuple(roles[role] for role in ("source", "target") if is_language(roles.get(role, "")))
    return Recipe(task, parts, roles, languages if len(languages) == 2 else (), wanted.reading, tuple(notes))


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
    keep = (*needs, "second") if task == "classification" else needs
    return {role: roles[role] for role in keep if role in roles}, task


def _sample(part: Part, reading: Reading) -> list[dict[str, Any]]:
    lenient = Reading(reading.encoding, "replace" if reading.invalid == "strict" else reading.invalid, reading.longest)
    rows = [row.cells for row, _ in zip(table(part, lenient, Problems(limit=10**9)), range(SAMPLE_ROWS), strict=False)]
    if not rows:
        raise BadFile(f"{part.paths[0]} holds no rows that can be read; check its layout and encoding")
    return rows
