"""Outputs of a prediction command: text lines, JSON lines, or the input table with columns added; resumable in a file.

A file is written in windows of rows, which are batched by length and written in their original order. Finished windows
are in OUT.part; after an interruption the same command resumes there, and the file is the same.
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

from headwater.cli.inputs import CommandInputs, InputEntry
from headwater.errors import BadSetting, Fault
from headwater.i18n import _
from headwater.io.files import read_limited
from headwater.io.strict_json import parse_json_object

BATCH_SIZE = 32  # texts per batch
WINDOW = 256  # rows that are sorted by length and written together
MAX_JOB_BYTES = 2**26

PredictFn = Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class OutputFormat:
    """The output format of a verb. columns: added to a table; to_cells: their values; to_line: as one line."""

    columns: tuple[str, ...]
    to_cells: Callable[[Any], tuple[Any, ...]]
    to_line: Callable[[Any], str]


class RowWriter(Protocol):
    """Formats a header, and each entry with its prediction (None: the entry is blank)."""

    def header(self) -> str: ...
    def format_row(self, entry: InputEntry, output: Any) -> str: ...


def build_writer(inputs: CommandInputs, output_format: OutputFormat, as_json: bool) -> RowWriter:
    """The writer for these inputs: JSON lines, a table with added columns, or plain lines."""
    if not inputs.tables:
        return JsonLinesWriter() if as_json else LineWriter(output_format)
    table = inputs.tables[0]
    if table.is_json or as_json:
        return JsonTableWriter(output_format, table.column_names)
    return DelimitedWriter(
        output_format,
        table.column_names,
        table.file_group.delimiter,
        table.file_group.file_format == "csv",
        table.has_header,
    )


@dataclass(frozen=True)
class LineWriter:
    """One line per prediction."""

    output_format: OutputFormat

    def header(self) -> str:
        return ""

    def format_row(self, entry: InputEntry, output: Any) -> str:
        return "\n" if output is None else " ".join(self.output_format.to_line(output).split("\n")) + "\n"


@dataclass(frozen=True)
class JsonLinesWriter:
    """One JSON object per text: {"input": the text, "output": the prediction}."""

    def header(self) -> str:
        return ""

    def format_row(self, entry: InputEntry, output: Any) -> str:
        return json.dumps({"input": entry.text, "output": output}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class JsonTableWriter:
    """The JSON object of each input row, with the columns of the prediction added."""

    output_format: OutputFormat
    column_names: tuple[str, ...]

    def header(self) -> str:
        return ""

    def format_row(self, entry: InputEntry, output: Any) -> str:
        added = unused_column_names(self.output_format.columns, (*self.column_names, *entry.cells))
        values = [None] * len(added) if output is None else self.output_format.to_cells(output)
        return json.dumps({**entry.cells, **dict(zip(added, values, strict=True))}, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class DelimitedWriter:
    """Rows of CSV (quoted where needed) or TSV (never quoted), with the columns of the prediction added."""

    output_format: OutputFormat
    column_names: tuple[str, ...]
    delimiter: str
    quoted: bool
    has_header: bool

    def header(self) -> str:
        return (
            self._join_cells([*self.column_names, *unused_column_names(self.output_format.columns, self.column_names)])
            if self.has_header
            else ""
        )

    def format_row(self, entry: InputEntry, output: Any) -> str:
        values = [""] * len(self.output_format.columns) if output is None else self.output_format.to_cells(output)
        return self._join_cells([*(entry.cells[name] for name in self.column_names), *map(_cell_text, values)])

    def _join_cells(self, cells: Sequence[str]) -> str:
        if not self.quoted:
            return "\t".join(" ".join(cell.replace("\t", " ").split("\n")) for cell in cells) + "\n"
        text = io.StringIO()
        csv.writer(text, delimiter=self.delimiter, lineterminator="\r\n").writerow(
            cells
        )  # so \r and \n are both quoted
        return text.getvalue().removesuffix("\r\n") + "\n"


def unused_column_names(added: Sequence[str], existing: Sequence[str]) -> list[str]:
    """The names of the added columns; a name that the table already has becomes predicted_NAME.

    >>> unused_column_names(("label", "probability"), ("text", "label"))
    ['predicted_label', 'probability']
    """
    names = []
    for name in added:
        while name in existing:
            name = f"predicted_{name}"
        names.append(name)
    return names


def _cell_text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# --------------------------------------------------------------------------------------------------- to a terminal


def print_predictions(
    inputs: CommandInputs, writer: RowWriter, predict: PredictFn, escape: Callable[[str], str]
) -> None:
    """Predict in batches and print each batch; line by line if the input is typed."""
    print(escape(writer.header()), end="")
    entries = inputs.entries()
    size = 1 if inputs.interactive else BATCH_SIZE
    while group := list(islice(entries, size)):
        for entry, output in zip(group, predict_entries(group, predict), strict=True):
            print(escape(writer.format_row(entry, output)), end="")
        sys.stdout.flush()


def predict_entries(entries: Sequence[InputEntry], predict: PredictFn) -> list[Any]:
    """The prediction of each entry, in batches of similar length; None for a blank entry."""
    outputs: list[Any] = [None] * len(entries)
    order = sorted((i for i, entry in enumerate(entries) if not entry.is_blank), key=lambda i: entries[i].length)
    for first in range(0, len(order), BATCH_SIZE):
        batch = order[first : first + BATCH_SIZE]
        for i, output in zip(batch, predict([entries[i].text for i in batch]), strict=True):
            outputs[i] = output
    return outputs


# ------------------------------------------------------------------------------------------------------- to a file


class ResumableFile:
    """A file written in windows of rows that a repeated command resumes.

    OUT.part has the finished windows; OUT.job has the options, and one line [rows, bytes] per window.
    """

    def __init__(self, out: Path, options: dict[str, Any]) -> None:
        if out.exists():
            raise BadSetting(_("--out must be a new file, {out} already exists; choose another name", out=out))
        self.out = out
        self.part_path = out.with_name(out.name + ".part")
        self.job_path = out.with_name(out.name + ".job")
        saved = self._saved_options()
        if saved is None:
            self.part_path.write_bytes(b"")
            self.job_path.write_text(json.dumps(options) + "\n", encoding="utf-8")
            return
        for name, value in options.items():
            if saved.get(name) != value:
                raise BadSetting(
                    _(
                        "{part} was started with {name} {saved!r}, got {value!r}; use the same value, or remove "
                        "the file",
                        part=self.part_path,
                        name=name,
                        saved=saved.get(name),
                        value=value,
                    )
                )

    def _saved_options(self) -> dict[str, Any] | None:
        """The options that the part was started with; None if there is no part, or its job file is incomplete."""
        try:
            return parse_json_object(self._job_lines()[0], self.job_path) if self.part_path.exists() else None
        except Fault:
            return None

    def _job_lines(self) -> list[bytes]:
        return read_limited(self.job_path, MAX_JOB_BYTES).split(b"\n")

    def write(self, entries: Iterator[InputEntry], writer: RowWriter, predict: PredictFn) -> int:
        """Predict and write the entries that are not in the part yet; returns the number of all entries."""
        count = self._resume(writer.header().encode())
        for _unused in islice(entries, count):
            pass
        start_time = time.monotonic()
        num_resumed = count
        with self.part_path.open("ab") as file, self.job_path.open("ab") as job:
            while window := list(islice(entries, WINDOW)):
                file.write("".join(_format_rows(window, writer, predict)).encode())
                file.flush()
                count += len(window)
                job.write(json.dumps([count, file.tell()]).encode() + b"\n")
                job.flush()
                rate = (count - num_resumed) / (time.monotonic() - start_time)
                print(f"\r{count:,} · {rate:.1f}/s", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        self.part_path.replace(self.out)
        self.job_path.unlink()
        return count

    def _resume(self, header: bytes) -> int:
        """Truncate the part after its last complete window; returns the number of finished rows."""
        size = self.part_path.stat().st_size
        finished = [(rows, end) for rows, end in self._finished_windows() if end <= size]
        rows, end = max(finished, default=(0, 0))
        with self.part_path.open("r+b") as file:
            file.truncate(end)
            if not end:
                file.write(header)
        job_lines = [self._job_lines()[0], json.dumps([rows, end]).encode()]
        self.job_path.write_bytes(b"".join(line + b"\n" for line in job_lines))  # without an incomplete last line
        return rows

    def _finished_windows(self) -> Iterable[tuple[int, int]]:
        for line in self._job_lines()[1:-1]:  # the text after the last newline is incomplete
            try:
                rows, end = json.loads(line)
            except ValueError:
                continue
            yield rows, end


def _format_rows(window: Sequence[InputEntry], writer: RowWriter, predict: PredictFn) -> Iterator[str]:
    for entry, output in zip(window, predict_entries(window, predict), strict=True):
        yield writer.format_row(entry, output)
