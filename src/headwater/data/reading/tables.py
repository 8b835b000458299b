"""Rows of TSV, CSV, JSONL and JSON files as dicts by column name. A row that cannot be read is counted, not fatal."""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from headwater.data.reading.lines import Line, Reading, good, lines
from headwater.data.reading.problems import Problems
from headwater.errors import BadFile

LARGEST_JSON = 2**30  # a JSON document is read whole
MOST_LINES, MOST_CHARACTERS = 1000, 2**24  # what one quoted CSV row may span
csv.field_size_limit(max(csv.field_size_limit(), MOST_CHARACTERS))  # by default cells above 131072 are refused


class Row(NamedTuple):
    line: int
    cells: dict[str, Any]


def jsonl(path: Path, reading: Reading, problems: Problems) -> Iterator[Row]:
    for line in good(path, lines(path, reading, problems), problems):
        if not line.text.strip():
            continue
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            problems.add(path, line.number, f"not JSON: {_brief(error)}")
            continue
        if isinstance(value, dict):
            yield Row(line.number, value)
        else:
            problems.add(path, line.number, "not a JSON object")


def json_document(path: Path, reading: Reading, problems: Problems) -> Any:
    """The one value of a JSON file, read whole and bounded."""
    size, parts = 0, []
    for line in good(path, lines(path, Reading(reading.encoding, reading.invalid, LARGEST_JSON), problems), problems):
        parts.append(line.text)
        size += len(line.text) + 1
        if size > LARGEST_JSON:
            raise BadFile(f"{path} is a JSON file above {LARGEST_JSON:,} characters; write one object a line (JSONL)")
    try:
        return json.loads("\n".join(parts))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} is not JSON: {_brief(error)}; mend it, or write one object a line (JSONL)") from None


def json_rows(path: Path, reading: Reading, problems: Problems) -> Iterator[Row]:
    """The objects of a JSON file that is one list; the 'line' is then the place in the list, from 1."""
    value = json_document(path, reading, problems)
    if not isinstance(value, list):
        raise BadFile(f"{path} must hold a list of objects or SQuAD data, it holds {type(value).__name__}")
    for place, item in enumerate(value, 1):
        if isinstance(item, dict):
            yield Row(place, item)
        else:
            problems.add(path, place, "not a JSON object")


def delimited(
    path: Path, reading: Reading, problems: Problems, delimiter: str, header: tuple[str, ...], skip: int
) -> Iterator[Row]:
    """Rows of a TSV or CSV file whose columns are named by header; the first `skip` rows are not data."""
    split = _tabs if delimiter == "\t" else _quoted
    found = split(path, good(path, lines(path, reading, problems), problems), problems, delimiter)
    width = len(header)
    for line, cells in islice(found, skip, None):
        if len(cells) == width:
            yield Row(line, dict(zip(header, cells, strict=True)))
        elif any(cell.strip() for cell in cells):
            problems.add(path, line, f"{len(cells)} columns instead of {width}")


def first_rows(path: Path, reading: Reading, delimiter: str, count: int) -> list[list[str]]:
    """The first rows of a TSV or CSV file as they stand, header or not."""
    split, problems = (_tabs if delimiter == "\t" else _quoted), Problems(limit=count)
    found = split(path, good(path, lines(path, reading, problems), problems), problems, delimiter)
    return [cells for (_, cells), _ in zip(found, range(count), strict=False) if any(c.strip() for c in cells)]


def _tabs(path: Path, found: Iterable[Line], problems: Problems, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Tab-separated: a quote is data, as in every corpus of sentences."""
    for line in found:
        yield line.number, line.text.split("\t")


def _quoted(path: Path, found: Iterable[Line], problems: Problems, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Comma-separated: a row goes on while a quote is open. A quote never closed costs one row, not the file."""
    source, again = iter(found), deque[Line]()
    while line := again.popleft() if again else next(source, None):
        held, inside, size = [line], _still_open(line.text, delimiter, False), len(line.text)
        while inside and len(held) < MOST_LINES and size < MOST_CHARACTERS:
            more = again.popleft() if again else next(source, None)
            if more is None:
                break
            held.append(more)
            inside, size = _still_open(more.text, delimiter, True), size + len(more.text)
        if inside:
            problems.add(path, line.number, "a quote that is never closed")
            again.extendleft(reversed(held[1:]))
            continue
        try:
            yield line.number, next(csv.reader([part.text + "\n" for part in held], delimiter=delimiter), [])
        except csv.Error as error:
            problems.add(path, line.number, f"not CSV: {error}")


def _still_open(text: str, delimiter: str, inside: bool) -> bool:
    """Whether a quoted cell is open at the end of the line. A quote opens one only where a cell begins."""
    closed = False  # the quote just seen ended a cell; a second one beside it is a quote written twice
    for place, before in enumerate(text.split('"')[:-1]):
        if inside:
            inside, closed = False, True
        else:
            inside = before.endswith(delimiter) or (not before and (closed or place == 0))
            closed = False
    return inside


def _brief(error: BaseException) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split("\n")[0][:80]
