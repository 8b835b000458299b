"""Inputs of a command: texts from its arguments, files with one text per line, tables, or the standard input.

One rule for every verb that takes texts. An argument is a file if one of that name exists, or if it looks like a file
name: it ends in a data extension (.csv, .txt, .jsonl, .gz …), or it has a path separator, a letter and no space
(1987/03/15 is a text). A file that does not exist is an error. Everything else is a text; --as-text makes all of them
texts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater.cli.parser import CommandParser
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, TooLong
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.data.examples import ExampleFormat
    from headwater.data.readers.source import DataSource, FileGroup

TABLES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json")
EXTENSIONS = (*TABLES, ".txt", ".text", ".conll", ".conllu", ".bio", ".iob", ".iob2", ".gz")
MAX_PROMPT_BYTES = 2**26  # of a prompt file


class InputEntry(NamedTuple):
    """One input of a model: a text, two texts or a list of words. cells: its table row."""

    text: Any
    cells: Mapping[str, Any] = {}

    @property
    def parts(self) -> Sequence[str]:
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def is_blank(self) -> bool:
        return not any(part.strip() for part in self.parts)

    @property
    def length(self) -> int:
        """In characters."""
        return sum(map(len, self.parts))


def add_input_arguments(parser: CommandParser) -> None:
    """Add the flags that decide how the inputs are read."""
    help_text = _("every argument is a text, even one that looks like a file name")
    parser.add_argument("--as-text", action="store_true", help=help_text)
    help_text = _("the table column to read; default: the one the model was trained on")
    parser.add_argument("--column", metavar="NAME", help=help_text)
    help_text = _("format of the standard input: lines, csv, tsv or jsonl [lines]")
    parser.add_argument("--format", choices=("lines", "csv", "tsv", "jsonl"), default="lines", help=help_text)


# ---------------------------------------------------------------------------------------------- a file, or a text?


def looks_like_file(argument: str) -> bool:
    """Whether an argument looks like a file name.

    >>> [looks_like_file(word) for word in ("nofile.csv", "my data.tsv", "data/nofile", "a text", "1987/03/15")]
    [True, True, True, False, False]
    """
    if "\n" in argument or len(argument) > 1000:
        return False
    has_separator = "/" in argument or os.sep in argument
    return argument.lower().endswith(EXTENSIONS) or (
        has_separator and re.fullmatch(r"\S*[^\W\d_]\S*", argument) is not None
    )


def resolve_file(argument: str, files_only: bool = False) -> Path | None:
    """The file that an argument names; None if it is a text."""
    if not (files_only or looks_like_file(argument) or _is_file(argument)):
        return None
    from headwater.data.readers.byte_streams import stat_regular

    try:
        stat_regular(Path(argument))
    except (NotFound, ValueError):
        if files_only:
            raise NotFound(_("no file {word!r}; give an existing file", word=argument)) from None
        raise NotFound(
            _("no file {word!r}; give an existing file, or add --as-text if it is a text", word=argument)
        ) from None
    return Path(argument)


def _is_file(argument: str) -> bool:
    try:
        return len(argument) <= 1000 and Path(argument).is_file()
    except (OSError, ValueError):
        return False


def read_prompt(argument: str, as_text: bool) -> str:
    """A prompt from an argument: the text itself, or the content of the file it names."""
    path = None if as_text else resolve_file(argument)
    if path is None:
        return argument
    if path.stat().st_size > MAX_PROMPT_BYTES:
        raise TooLong(
            _(
                "{path} must have at most {limit:,} bytes to be a prompt, it is larger; shorten it",
                path=path,
                limit=MAX_PROMPT_BYTES,
            )
        )
    return "\n".join(read_text_lines(path)).rstrip("\n")


# ------------------------------------------------------------------------------------------------------------ lines


def read_text_lines(path: Path) -> Iterator[str]:
    """The lines of a file in any encoding that train reads."""
    from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows, iter_lines

    for line in iter_lines(path, DEFAULT_DECODE_OPTIONS, BadRows()):
        if line.error:
            raise BadInput(
                _(
                    "{path}:{number} cannot be read: {reason}; fix or remove the line",
                    path=path,
                    number=line.number,
                    reason=line.error,
                )
            )
        yield line.text


def stdin_lines() -> Iterator[str]:
    """The lines of the standard input, as they arrive."""
    for number, line in enumerate(sys.stdin, 1):
        if any("\ud800" <= c <= "\udfff" for c in line):
            raise BadInput(
                _(
                    "the standard input must be UTF-8, line {number} is not; give the file, or convert it to UTF-8",
                    number=number,
                )
            )
        yield line.removesuffix("\n").removesuffix("\r")


# ----------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class InputTable:
    """A table file. column_names: all of its columns; input_columns: those that the model takes."""

    file_group: FileGroup
    column_names: tuple[str, ...]
    input_columns: tuple[str, ...]
    example_format: ExampleFormat

    @property
    def path(self) -> Path:
        return self.file_group.paths[0]

    @property
    def has_header(self) -> bool:
        return self.file_group.header_rows > 0

    @property
    def is_json(self) -> bool:
        return self.file_group.file_format in ("jsonl", "json")

    def entries(self) -> Iterator[InputEntry]:
        """The rows in file order; raises BadFile for a malformed row, so that none is skipped silently."""
        from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows
        from headwater.data.readers.source import read_table

        class Strict(BadRows):
            def add(self, path: Path, line: int, reason: str) -> None:
                raise BadFile(
                    _("{path}:{line} is not a row of the table: {reason}; fix it", path=path, line=line, reason=reason)
                )

        for row in read_table(self.file_group, DEFAULT_DECODE_OPTIONS, Strict()):
            texts = [self._cell(row.cells.get(name), name, row.line) for name in self.input_columns]
            pair = bool(self.example_format.second_input_role)  # two texts; the second may be empty
            yield InputEntry((texts[0], "".join(texts[1:])) if pair else texts[0], row.cells)

    def _cell(self, value: Any, name: str, line: int) -> Any:
        """A cell as text, or as a list of words for token classification; other lists and objects raise BadInput."""
        if value is None:
            return ""
        if self.example_format.reads_words and isinstance(value, list) and all(isinstance(word, str) for word in value):
            return value
        if isinstance(value, (dict, list)):
            raise BadInput(
                _(
                    "{path}:{line}: column {name!r} must be text, it is a {type}; give --column",
                    path=self.path,
                    line=line,
                    name=name,
                    type=type(value).__name__,
                )
            )
        return str(value)


def open_table(
    path: Path, example_format: ExampleFormat, column: str | None, trained_columns: Mapping[str, str]
) -> InputTable:
    """A table with its input column: --column, else that of training, else the one that training would choose."""
    source = _resolve_layout(path, column, trained_columns.get(example_format.input_role))
    group = source.file_groups[0]
    names = group.header or _json_keys(group)
    if duplicate := next((name for name in names if names.count(name) > 1), ""):
        raise BadFile(
            _("{path} must have unique column names, two are {name!r}; rename one", path=path, name=duplicate)
        )
    input_columns: tuple[str, ...] = (source.roles["text"],)
    second_role = example_format.second_input_role
    if second_role in trained_columns:
        input_columns += (_second_column(path, names, second_role, trained_columns),)
    return InputTable(group, names, input_columns, example_format)


def _resolve_layout(path: Path, column: str | None, trained_column: str | None) -> DataSource:
    """Detect the layout of a table as that of a language-model corpus: its "text" column is the input column."""
    from headwater.data.readers.detect import SourceOptions, detect_source

    if column:
        return detect_source([path], options=SourceOptions("language-model", {"text": column}))
    if trained_column:
        with suppress(BadSetting):  # a table that has no column of that name
            return detect_source([path], options=SourceOptions("language-model", {"text": trained_column}))
    try:
        return detect_source([path], options=SourceOptions("language-model"))
    except BadSetting:
        raise BadSetting(_("the text column of {path} cannot be determined; give --column NAME", path=path)) from None


def _json_keys(group: FileGroup) -> tuple[str, ...]:
    """The keys of a JSON table's first row."""
    from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows
    from headwater.data.readers.source import read_table

    return tuple(next(iter(read_table(group, DEFAULT_DECODE_OPTIONS, BadRows()))).cells)


def _second_column(path: Path, names: Sequence[str], role: str, trained_columns: Mapping[str, str]) -> str:
    from headwater.data.readers.columns import roles_by_name

    trained_column = trained_columns[role]
    column = trained_column if trained_column in names else roles_by_name(names).get(role)
    if column is None:
        raise BadSetting(
            _(
                "the model reads two texts, {path} has no column {column!r} for the second; rename the column",
                path=path,
                column=trained_column,
            )
        )
    return column


# ------------------------------------------------------------------------------------------------------- all inputs


@dataclass(frozen=True)
class InputOptions:
    """How arguments are read. format: of the standard input; column: of a table."""

    as_text: bool = False
    files_only: bool = False
    column: str | None = None
    format: str = "lines"

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> InputOptions:
        return cls(args.as_text, False, args.column, args.format)

    def resolve_file(self, argument: str) -> Path | None:
        """The file to read for an argument; None for a text, and for lines of the standard input."""
        if self.as_text:
            return None
        if argument == "-":
            return None if self.format == "lines" else _spool_stdin(self.format)
        return resolve_file(argument, self.files_only)


@dataclass
class CommandInputs:
    """The inputs of a command: the rows of tables, or else texts and lines."""

    sources: Sequence[tuple[str, Path | None]] = ()  # a text or -, or a name with its file
    tables: Sequence[InputTable] = ()
    as_text: bool = False
    interactive: bool = False  # typed in a terminal

    def entries(self) -> Iterator[InputEntry]:
        for table in self.tables:
            yield from table.entries()
        for word, path in () if self.tables else self.sources:
            if path is not None:
                yield from map(InputEntry, read_text_lines(path))
            elif word == "-" and not self.as_text:
                yield from map(InputEntry, stdin_lines())
            else:
                yield InputEntry(word)


def open_inputs(
    arguments: list[str], options: InputOptions, task: str = "", trained_columns: Mapping[str, str] | None = None
) -> CommandInputs:
    """The inputs of the arguments; without any, the standard input. All files are checked before one is read.

    trained_columns: role -> column of the table that the model was trained on.
    """
    sources = [(word, options.resolve_file(word)) for word in arguments or ["-"]]
    paths = [path for _, path in sources if path is not None and _is_table(path)]
    if not paths:  # texts and lines
        if options.column:
            raise BadSetting(
                _(
                    "--column {column} needs a table; give a .csv, .tsv or .jsonl file, or --format csv",
                    column=options.column,
                )
            )
        return CommandInputs(
            sources, as_text=options.as_text and bool(arguments), interactive=not arguments and sys.stdin.isatty()
        )

    # tables
    if len(paths) < len(sources):
        other = next(word for word, path in sources if path not in paths)
        raise BadSetting(
            _(
                "tables and texts must not be mixed, got {paths} and {other!r}; use one command for each",
                paths=paths[0],
                other=other,
            )
        )
    from headwater.data.examples import EXAMPLE_FORMATS

    example_format = EXAMPLE_FORMATS[task or "language-model"]
    tables = [open_table(path, example_format, options.column, trained_columns or {}) for path in paths]
    _check_same_columns(tables)
    for table in tables:
        read = " + ".join(table.input_columns)
        print(_("{name}: reading column {read}", name=table.path.name, read=read), file=sys.stderr)
    return CommandInputs(sources, tables)


def _is_table(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(TABLES)


def _check_same_columns(tables: Sequence[InputTable]) -> None:
    """Several tables are concatenated, so they must have the same format and, unless JSON, the same columns."""
    first = tables[0]
    for other in tables[1:]:
        is_same = (
            other.is_json
            if first.is_json
            else other.column_names == first.column_names
            and other.file_group.file_format == first.file_group.file_format
        )
        if not is_same:
            raise BadSetting(
                _(
                    "all tables must have the same columns, {path} and {other} differ; use one command for each",
                    path=first.path,
                    other=other.path,
                )
            )


def _spool_stdin(format: str) -> Path:
    """Copy the standard input to a temporary file, because the layout of a table is detected before it is read."""
    folder = tempfile.TemporaryDirectory(prefix="headwater-")
    _TEMP_DIRS.append(folder)
    path = Path(folder.name) / f"standard-input.{format}"
    with path.open("wb") as file:
        stream = getattr(sys.stdin, "buffer", None)
        if stream is None:
            file.write(sys.stdin.read().encode())
        else:
            shutil.copyfileobj(stream, file)
    return path


_TEMP_DIRS: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
