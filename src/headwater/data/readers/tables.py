"""Rows of TSV, CSV, JSONL and JSON files as dicts by column name, and header detection.

A row that cannot be parsed is counted as a bad row.
"""

from __future__ import annotations

import csv
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from headwater.data.metrics import split_words
from headwater.data.readers.columns import is_known_column
from headwater.data.readers.lines import BadRows, DecodeOptions, TextLine, iter_lines, skip_bad_lines
from headwater.errors import BadFile
from headwater.i18n import _

MAX_JSON_CHARACTERS = 2**30  # a JSON document is parsed in memory
MAX_ROW_LINES = 1000  # lines of a CSV row with quoted line feeds
MAX_ROW_CHARACTERS = 2**24
csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_CHARACTERS))  # by default cells above 131072 are refused


class TableRow(NamedTuple):
    """A row of a table: its line number and its cells by column name."""

    line: int
    cells: dict[str, Any]


def read_jsonl(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TableRow]:
    """The objects of a JSONL file, one per line."""
    for line in skip_bad_lines(path, iter_lines(path, decode_options, bad_rows), bad_rows):
        if not line.text.strip():
            continue
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            bad_rows.add(path, line.number, _("not JSON: {error}", error=_short_message(error)))
            continue
        if isinstance(value, dict):
            yield TableRow(line.number, value)
        else:
            bad_rows.add(path, line.number, _("not a JSON object"))


def read_json(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Any:
    """The value of a JSON file of at most MAX_JSON_CHARACTERS."""
    options = DecodeOptions(decode_options.encoding, decode_options.errors, MAX_JSON_CHARACTERS)
    parts: list[str] = []
    size = 0
    for line in skip_bad_lines(path, iter_lines(path, options, bad_rows), bad_rows):
        parts.append(line.text)
        size += len(line.text) + 1
        if size > MAX_JSON_CHARACTERS:
            raise BadFile(
                _(
                    "{path} is a JSON file of more than {max_characters:,} characters; write one object per line "
                    "(JSONL)",
                    path=path,
                    max_characters=MAX_JSON_CHARACTERS,
                )
            )
    try:
        return json.loads("\n".join(parts))
    except (ValueError, RecursionError) as error:
        raise BadFile(
            _(
                "{path} is not JSON: {error}; fix it, or write one object per line (JSONL)",
                path=path,
                error=_short_message(error),
            )
        ) from None


def read_json_rows(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TableRow]:
    """The objects of a JSON file that is one list; `line` is then the number in the list, from 1."""
    value = read_json(path, decode_options, bad_rows)
    if not isinstance(value, list):
        raise BadFile(
            _("{path} must hold a list of objects or SQuAD data, it holds {name}", path=path, name=type(value).__name__)
        )
    for number, item in enumerate(value, 1):
        if isinstance(item, dict):
            yield TableRow(number, item)
        else:
            bad_rows.add(path, number, _("not a JSON object"))


def read_delimited(
    path: Path,
    decode_options: DecodeOptions,
    bad_rows: BadRows,
    delimiter: str,
    header: tuple[str, ...],
    header_rows: int,
) -> Iterator[TableRow]:
    """Rows of a TSV or CSV file with these column names; the first header_rows rows are not data."""
    split = _split_tsv if delimiter == "\t" else _split_csv
    lines = skip_bad_lines(path, iter_lines(path, decode_options, bad_rows), bad_rows)
    rows = split(path, lines, bad_rows, delimiter)
    width = len(header)
    for line, cells in islice(rows, header_rows, None):
        if len(cells) == width:
            yield TableRow(line, dict(zip(header, cells, strict=True)))
        elif any(cell.strip() for cell in cells):
            bad_rows.add(path, line, _("{num_cells} columns instead of {width}", num_cells=len(cells), width=width))


def read_first_rows(path: Path, decode_options: DecodeOptions, delimiter: str, count: int) -> list[list[str]]:
    """The cells of the first rows of a TSV or CSV file, with the header if it has one."""
    split = _split_tsv if delimiter == "\t" else _split_csv
    bad_rows = BadRows(max_count=count)
    lines = skip_bad_lines(path, iter_lines(path, decode_options, bad_rows), bad_rows)
    rows = islice(split(path, lines, bad_rows, delimiter), count)
    return [cells for _, cells in rows if any(cell.strip() for cell in cells)]


def _split_tsv(
    path: Path, lines: Iterable[TextLine], bad_rows: BadRows, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Tab-separated values: a quote is data, as is usual in text corpora."""
    for line in lines:
        yield line.number, line.text.split("\t")


def _split_csv(
    path: Path, lines: Iterable[TextLine], bad_rows: BadRows, delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Comma-separated values: a row continues while a quote is open. An unclosed quote costs one row, not the file."""
    source = iter(lines)
    pushed_back = deque[TextLine]()  # lines after an unclosed quote, parsed again
    while line := pushed_back.popleft() if pushed_back else next(source, None):
        # collect the lines of the row
        row = [line]
        in_quote = _ends_in_quote(line.text, delimiter, False)
        size = len(line.text)
        while in_quote and len(row) < MAX_ROW_LINES and size < MAX_ROW_CHARACTERS:
            next_line = pushed_back.popleft() if pushed_back else next(source, None)
            if next_line is None:
                break
            row.append(next_line)
            in_quote = _ends_in_quote(next_line.text, delimiter, True)
            size += len(next_line.text)

        if in_quote:
            bad_rows.add(path, line.number, _("a quote that is never closed"))
            pushed_back.extendleft(reversed(row[1:]))
            continue
        try:
            yield line.number, next(csv.reader([part.text + "\n" for part in row], delimiter=delimiter), [])
        except csv.Error as error:
            bad_rows.add(path, line.number, _("not CSV: {error}", error=error))


def _ends_in_quote(text: str, delimiter: str, in_quote: bool) -> bool:
    """Whether a quoted cell is open at the end of the line. A quote opens one only where a cell begins."""
    closed = False  # the quote just seen ended a cell; a second one next to it is an escaped quote
    for i, before in enumerate(text.split('"')[:-1]):
        if in_quote:
            in_quote = False
            closed = True
        else:
            in_quote = before.endswith(delimiter) or (not before and (closed or i == 0))
            closed = False
    return in_quote


def _short_message(error: BaseException) -> str:
    return _("nested too deeply") if isinstance(error, RecursionError) else str(error).split("\n")[0][:80]


# --------------------------------------------------------------------------------------------------- header detection

HEADER_NAME = re.compile(r"[^\W\d][^\d.!?…。！？,;:\"]{0,39}")  # a short name: no digit, no end of a sentence
MIN_ROWS = 5  # with fewer rows only known column names count

# a column of labels: few distinct short values in many rows
MIN_LABEL_ROWS = 20
MAX_LABEL_FRACTION = 0.2
MAX_LABEL_LENGTH = 30


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether rows[0] is a header: known column names, or cells unlike the rows below.

    >>> has_header([["id", "english", "german"], ["1", "Good morning.", "Guten Morgen."]])
    True
    >>> has_header([["Hi.", "Hallo."], ["Good morning.", "Guten Morgen."]])
    False
    """
    first = [cell.strip() for cell in rows[0]]
    lower = [cell.lower() for cell in first]
    if len(set(lower)) < len(lower) or max(map(len, first)) > 40:
        return False
    data_rows = [row for row in rows[1:] if len(row) == len(first)]
    if any(row[column].strip() == cell for row in data_rows for column, cell in enumerate(first) if cell):
        return False  # a column name is not among the values
    if sum(map(is_known_column, lower)) >= min(2, len(lower)):
        return True
    if len(data_rows) < max(MIN_ROWS, (len(rows) - 1) / 2) or not all(map(HEADER_NAME.fullmatch, first)):
        return False
    votes = [_header_vote(cell, [row[column].strip() for row in data_rows]) for column, cell in enumerate(first)]
    return sum(votes) >= 2 or all(votes)


def _header_vote(name: str, values: Sequence[str]) -> int:
    """Evidence that `name` heads these values: 2 all have digits, 1 labels or longer texts, 0 none."""
    if all(any(c.isdigit() for c in value) for value in values):  # numbers, dates, identifiers
        return 2
    distinct_fraction = len(set(values)) / len(values)
    mean_length = sum(map(len, values)) / len(values)
    if len(values) >= MIN_LABEL_ROWS and distinct_fraction <= MAX_LABEL_FRACTION and mean_length <= MAX_LABEL_LENGTH:
        return 1
    words = len(split_words(name.replace("_", "")))
    longer = sum(len(split_words(value)) >= max(3, 2 * words) for value in values)
    return int(longer >= 0.9 * len(values))


def header_names(first_row: Sequence[str]) -> tuple[str, ...]:
    """The column names of a header row; an empty cell (the index of pandas) is named by its number.

    >>> header_names(["", "text ", "label"])
    ('1', 'text', 'label')
    """
    return tuple(cell.strip() or str(number) for number, cell in enumerate(first_row, 1))
