"""How answers are written: a line each, JSON, or the table they were asked in with columns added; and into a file.

A file is written in windows of rows, sorted by length inside and written in their old order. What is done lies in
OUT.part; the same command, after whatever stopped it, goes on there and ends with the file it would have written.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from headwater.cli.inputs import Entry, Inputs
from headwater.errors import BadSetting, Fault
from headwater.weights.files import read_bounded
from headwater.weights.strict_json import parse_object

TOGETHER = 32  # texts that a model is given at a time
WINDOW = 256  # rows that are sorted and written together
LARGEST_JOB = 2**26

Answer = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Shape:
    """How the answers of a verb look. columns: what is added to a table; cells: their values; line: as one line."""

    columns: tuple[str, ...]
    cells: Callable[[Any], tuple[Any, ...]]
    line: Callable[[Any], str]


class Writer(Protocol):
    """Text for the beginning, and for each entry with its answer (None: the entry is blank)."""

    def header(self) -> str: ...
    def row(self, entry: Entry, found: Any) -> str: ...


def writer_of(inputs: Inputs, shape: Shape, as_json: bool) -> Writer:
    if not inputs.tables:
        return JsonAnswers() if as_json else Lines(shape)
    table = inputs.tables[0]
    if table.is_json or as_json:
        return JsonRows(shape, table.names)
    return Delimited(shape, table.names, table.part.delimiter, table.part.layout == "csv", table.has_header)


@dataclass(frozen=True)
class Lines:
    shape: Shape

    def header(self) -> str:
        return ""

    def row(self, entry: Entry, found: Any) -> str:
        return "\n" if found is None else " ".join(self.shape.line(found).split("\n")) + "\n"


@dataclass(frozen=True)
class JsonAnswers:
    """{"input": a text, "output": all that the model says of it}"""

    def header(self) -> str:
        return ""

    def row(self, entry: Entry, found: Any) -> str:
        return json.dumps({"input": entry.text, "output": found}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class JsonRows:
    """The object of the input, with the answer's columns added."""

    shape: Shape
    names: tuple[str, ...]

    def header(self) -> str:
        return ""

    def row(self, entry: Entry, found: Any) -> str:
        added = free_names(self.shape.columns, (*self.names, *entry.cells))
        values = [None] * len(added) if found is None else self.shape.cells(found)
        return json.dumps({**entry.cells, **dict(zip(added, values, strict=True))}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Delimited:
    """A row of CSV (quoted where it must be) or TSV (never quoted), with the answer's columns added."""

    shape: Shape
    names: tuple[str, ...]
    delimiter: str
    quoted: bool
    has_header: bool

    def header(self) -> str:
        return self._joined([*self.names, *free_names(self.shape.columns, self.names)]) if self.has_header else ""

    def row(self, entry: Entry, found: Any) -> str:
        values = [""] * len(self.shape.columns) if found is None else self.shape.cells(found)
        return self._joined([*(entry.cells[name] for name in self.names), *map(_flat, values)])

    def _joined(self, cells: Sequence[str]) -> str:
        if not self.quoted:
            return "\t".join(" ".join(cell.replace("\t", " ").split("\n")) for cell in cells) + "\n"
        text = io.StringIO()
        csv.writer(text, delimiter=self.delimiter, lineterminator="\r\n").writerow(
            cells
        )  # so \r and \n are both quoted
        return text.getvalue().removesuffix("\r\n") + "\n"


def free_names(added: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The names of the added columns; one that the table has already becomes predicted_NAME.

    >>> free_names(("label", "probability"), ("text", "label"))
    ['predicted_label', 'probability']
    """
    names = []
    for name in added:
        while name in taken:
            name = f"predicted_{name}"
        names.append(name)
    return names


def _flat(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# --------------------------------------------------------------------------------------------------- to a terminal


def print_answers(inputs: Inputs, writer: Writer, answer: Answer, show: Callable[[str], str]) -> None:
    """Answer some at a time and print them at once; a person who types is answered line by line."""
    print(show(writer.header()), end="")
    entries = inputs.entries()
    size = 1 if inputs.interactive else TOGETHER
    while group := list(islice(entries, size)):
        for entry, found in zip(group, answered(group, answer), strict=True):
            print(show(writer.row(entry, found)), end="")
        sys.stdout.flush()


def answered(entries: Sequence[Entry], answer: Answer) -> list[Any]:
    """The answer to each entry, asked in groups of like length; None for one that is blank."""
    found: list[Any] = [None] * len(entries)
    order = sorted((i for i, entry in enumerate(entries) if not entry.blank), key=lambda i: entries[i].length)
    for first in range(0, len(order), TOGETHER):
        some = order[first : first + TOGETHER]
        for i, said in zip(some, answer([entries[i].text for i in some]), strict=True):
            found[i] = said
    return found


# ------------------------------------------------------------------------------------------------------- to a file


class ResumableFile:
    """OUT.part holds whole windows of rows; OUT.job what was asked, and a line [rows, bytes] after each window."""

    def __init__(self, out: Path, asked: dict[str, Any]) -> None:
        if out.exists():
            raise BadSetting(f"--out must be a new file, {out} is there already; choose another name")
        self.out = out
        self.part, self.job = (out.with_name(out.name + end) for end in (".part", ".job"))
        before = self._before()
        for name, value in asked.items() if before is not None else ():
            if before.get(name) != value:  # type: ignore[union-attr]
                came = before.get(name)  # type: ignore[union-attr]
                raise BadSetting(
                    f"{self.part} was begun with {name} {came!r}, got {value!r}; finish it with that, or remove it"
                )
        if before is None:
            self.part.write_bytes(b"")
            self.job.write_text(json.dumps(asked) + "\n", encoding="utf-8")

    def _before(self) -> dict[str, Any] | None:
        """What was asked when the part was begun; None where there is none, or its note is not whole."""
        try:
            return parse_object(self._job_lines()[0], self.job) if self.part.exists() else None
        except Fault:
            return None

    def _job_lines(self) -> list[bytes]:
        return read_bounded(self.job, LARGEST_JOB).split(b"\n")

    def write(self, entries: Iterator[Entry], writer: Writer, answer: Answer) -> int:
        """Write the entries that are still to do; gives how many there are in all."""
        count = self._resume(writer.header().encode())
        for _ in islice(entries, count):
            pass
        begun, first = time.monotonic(), count
        with self.part.open("ab") as file, self.job.open("ab") as job:
            while window := list(islice(entries, WINDOW)):
                file.write("".join(_rows(window, writer, answer)).encode())
                file.flush()
                count += len(window)
                job.write(json.dumps([count, file.tell()]).encode() + b"\n")
                job.flush()
                rate = (count - first) / (time.monotonic() - begun)
                print(f"\r{count:,} · {rate:.1f}/s", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        self.part.replace(self.out)
        self.job.unlink()
        return count

    def _resume(self, header: bytes) -> int:
        """Cut off what follows the last whole window; the rows that are done."""
        size = self.part.stat().st_size
        done = [(rows, end) for rows, end in self._windows() if end <= size]
        rows, end = max(done, default=(0, 0))
        with self.part.open("r+b") as file:
            file.truncate(end)
            if not end:
                file.write(header)
        note = [self._job_lines()[0], json.dumps([rows, end]).encode()]
        self.job.write_bytes(b"".join(line + b"\n" for line in note))  # a torn last line is gone
        return rows

    def _windows(self) -> Iterable[tuple[int, int]]:
        for line in self._job_lines()[1:-1]:  # what follows the last newline is not whole
            try:
                rows, end = json.loads(line)
            except ValueError:
                continue
            yield rows, end


def _rows(window: Sequence[Entry], writer: Writer, answer: Answer) -> Iterator[str]:
    for entry, found in zip(window, answered(window, answer), strict=True):
        yield writer.row(entry, found)
