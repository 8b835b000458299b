"""Where the texts of a command come from: its arguments, files with a text a line, tables, or the standard input.

One rule for every verb that takes texts. An argument is a file

- if a file of that name exists, or
- if it looks like a file name: it ends in a data extension (.csv, .txt, .jsonl, .gz …), or it has a path separator, a
  letter and no space (1987/03/15 is a text).

A file that does not exist is an error, never a text. Everything else is a text; --as-text takes every argument for one.
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

from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, TooLong

if TYPE_CHECKING:
    from headwater.data.reading.recipe import Part

TABLES = (".csv", ".tsv", ".tab", ".jsonl", ".ndjson", ".json")
EXTENSIONS = (*TABLES, ".txt", ".text", ".conll", ".conllu", ".bio", ".iob", ".iob2", ".gz")
LONGEST_PROMPT = 2**26  # bytes of a file that is one prompt
SOURCE_ROLE = {"text-to-text": "source", "classification": "text", "tagging": "words"}  # what each task reads


class Entry(NamedTuple):
    """One input of a model: a text, two texts or a list of words; cells: the row of the table it comes from."""

    text: Any
    cells: Mapping[str, Any] = {}

    @property
    def parts(self) -> Sequence[str]:
        return [self.text] if isinstance(self.text, str) else self.text

    @property
    def blank(self) -> bool:
        return not any(part.strip() for part in self.parts)

    @property
    def length(self) -> int:
        """In characters."""
        return sum(map(len, self.parts))


def arguments(parser: Parser) -> None:
    """The flags that say how the texts are read."""
    told = say(
        "every argument is a text, even one that looks like a file name", "所有参数都当作文本，即使看起来像文件名"
    )
    parser.add_argument("--as-text", action="store_true", help=told)
    told = say(
        "the column of a table to read; else the one it was trained on", "读取表格的哪一列；默认为训练时的那一列"
    )
    parser.add_argument("--column", metavar="NAME", help=told)
    told = say(
        "what the standard input holds: lines, csv, tsv or jsonl [lines]",
        "标准输入的格式：lines（每行一条文本）、csv、tsv 或 jsonl [lines]",
    )
    parser.add_argument("--format", choices=("lines", "csv", "tsv", "jsonl"), default="lines", help=told)


# ---------------------------------------------------------------------------------------------- a file, or a text?


def looks_like_file(word: str) -> bool:
    """
    >>> [looks_like_file(word) for word in ("nofile.csv", "my data.tsv", "data/nofile", "a text", "1987/03/15")]
    [True, True, True, False, False]
    """
    if "\n" in word or len(word) > 1000:
        return False
    has_separator = "/" in word or os.sep in word
    return word.lower().endswith(EXTENSIONS) or (has_separator and re.fullmatch(r"\S*[^\W\d_]\S*", word) is not None)


def file_of(word: str, files_only: bool = False) -> Path | None:
    """The file that an argument names; None where it is a text."""
    if not (files_only or looks_like_file(word) or _is_file(word)):
        return None
    from headwater.data.reading.opening import regular

    try:
        regular(Path(word))
    except (NotFound, ValueError):
        if files_only:
            raise NotFound(f"no file {word!r}; give an existing file") from None
        raise NotFound(f"no file {word!r}; give an existing file, or add --as-text if it is a text") from None
    return Path(word)


def _is_file(word: str) -> bool:
    try:
        return len(word) <= 1000 and Path(word).is_file()
    except (OSError, ValueError):
        return False


def prompt_of(word: str, as_text: bool) -> str:
    """An argument that is one text as a whole: the text itself, or all of a file."""
    path = None if as_text else file_of(word)
    if path is None:
        return word
    if path.stat().st_size > LONGEST_PROMPT:
        raise TooLong(f"{path} must have at most {LONGEST_PROMPT:,} bytes to be one prompt, it is larger; shorten it")
    return "\n".join(lines_of(path)).rstrip("\n")


# ------------------------------------------------------------------------------------------------------------ lines


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a file in any encoding that train reads."""
    from headwater.data.reading.lines import USUAL, lines
    from headwater.data.reading.problems import Problems

    for line in lines(path, USUAL, Problems()):
        if line.fault:
            raise BadInput(f"{path}:{line.number} can not be read, it is {line.fault}; cut it")
        yield line.text


def typed_lines() -> Iterator[str]:
    """The lines of the standard input, as they come."""
    for number, line in enumerate(sys.stdin, 1):
        if any("\ud800" <= c <= "\udfff" for c in line):
            raise BadInput(f"the standard input must be UTF-8, line {number} is not; give its file, or write it anew")
        yield line.removesuffix("\n").removesuffix("\r")


# ----------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Table:
    """A file of rows. names: its columns; reads: those that the model is given."""

    part: Part
    names: tuple[str, ...]
    reads: tuple[str, ...]
    task: str = ""

    @property
    def path(self) -> Path:
        return self.part.paths[0]

    @property
    def has_header(self) -> bool:
        return self.part.skip > 0

    @property
    def is_json(self) -> bool:
        return self.part.layout in ("jsonl", "json")

    def entries(self) -> Iterator[Entry]:
        """The rows in file order; the first that can not be read ends it: none is left out in silence."""
        from headwater.data.reading.lines import USUAL
        from headwater.data.reading.problems import Problems
        from headwater.data.reading.recipe import table

        class Strict(Problems):
            def add(self, path: Path, line: int, reason: str) -> None:
                raise BadFile(f"{path}:{line} is not a row of the table: {reason}; mend it")

        for row in table(self.part, USUAL, Strict()):
            texts = [self._cell(row.cells.get(name), name, row.line) for name in self.reads]
            pair = self.task == "classification"  # two texts, the second of them perhaps empty
            yield Entry((texts[0], "".join(texts[1:])) if pair else texts[0], row.cells)

    def _cell(self, value: Any, name: str, line: int) -> Any:
        if value is None:
            return ""
        if self.task == "tagging" and isinstance(value, list) and all(isinstance(word, str) for word in value):
            return value
        if isinstance(value, (dict, list)):
            raise BadInput(
                f"{self.path}:{line}: column {name!r} must hold text, it holds a {type(value).__name__}; give --column"
            )
        return str(value)


def table_of(path: Path, task: str, column: str | None, known: Mapping[str, str]) -> Table:
    """A table with the column to read: the one named, else that of training, else the one training would choose."""
    recipe = _recipe(path, column, known.get(SOURCE_ROLE.get(task, "text")))
    part = recipe.parts[0]
    names = part.header or _keys(part)
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise BadFile(f"{path} must name each column once, two are called {twice!r}; rename one")
    reads: tuple[str, ...] = (recipe.roles["text"],)
    if task == "classification" and "second" in known:
        reads += (_second(path, names, known["second"]),)
    return Table(part, names, reads, task)


def _recipe(path: Path, column: str | None, known: str | None) -> Any:
    """A table of texts is a corpus to the reader; its role text is the column we look for."""
    from headwater.data.reading.settle import Wanted, settle

    if column:
        return settle([path], wanted=Wanted("language-model", {"text": column}))
    if known:
        with suppress(BadSetting):  # a table that has no column of that name
            return settle([path], wanted=Wanted("language-model", {"text": known}))
    try:
        return settle([path], wanted=Wanted("language-model"))
    except BadSetting:
        raise BadSetting(f"nothing says which column of {path} holds the text; give --column NAME") from None


def _keys(part: Part) -> tuple[str, ...]:
    """The keys of a JSON table's first row."""
    from headwater.data.reading.lines import USUAL
    from headwater.data.reading.problems import Problems
    from headwater.data.reading.recipe import table

    return tuple(next(iter(table(part, USUAL, Problems()))).cells)


def _second(path: Path, names: Sequence[str], known: str) -> str:
    from headwater.data.reading.columns import roles_by_name

    found = known if known in names else roles_by_name(names).get("second")
    if found is None:
        raise BadSetting(f"the model reads two texts, {path} has no column {known!r} for the second; rename the column")
    return found


# ------------------------------------------------------------------------------------------------------- all inputs


@dataclass(frozen=True)
class Options:
    """How arguments are read. format: of the standard input; column: of a table."""

    as_text: bool = False
    files_only: bool = False
    column: str | None = None
    format: str = "lines"

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        return cls(args.as_text, False, args.column, args.format)

    def file_of(self, word: str) -> Path | None:
        """The file to read for an argument; None for a text, and for lines of the standard input."""
        if self.as_text:
            return None
        if word == "-":
            return None if self.format == "lines" else _spooled(self.format)
        return file_of(word, self.files_only)


@dataclass
class Inputs:
    """What a command was given: the rows of tables, or else texts and lines."""

    sources: Sequence[tuple[str, Path | None]] = ()  # a text or -, or a name with its file
    tables: Sequence[Table] = ()
    as_text: bool = False
    interactive: bool = False  # a person types

    def entries(self) -> Iterator[Entry]:
        for table in self.tables:
            yield from table.entries()
        for word, path in () if self.tables else self.sources:
            if path is not None:
                yield from map(Entry, lines_of(path))
            elif word == "-" and not self.as_text:
                yield from map(Entry, typed_lines())
            else:
                yield Entry(word)


def inputs_of(words: list[str], options: Options, task: str = "", known: Mapping[str, str] | None = None) -> Inputs:
    """The inputs that the arguments name; without any, the standard input. Every file is looked for before one is read.

    known: role -> column of the table that the model was trained on.
    """
    sources = [(word, options.file_of(word)) for word in words or ["-"]]
    paths = [path for _, path in sources if path is not None and _is_table(path)]
    if not paths:
        if options.column:
            raise BadSetting(
                f"--column {options.column} needs a table; give a .csv, .tsv or .jsonl file, or --format csv"
            )
        return Inputs(sources, as_text=options.as_text and bool(words), interactive=not words and sys.stdin.isatty())
    if len(paths) < len(sources):
        other = next(word for word, path in sources if path not in paths)
        raise BadSetting(f"tables and texts must not be mixed, got {paths[0]} and {other!r}; use one command for each")
    tables = [table_of(path, task, options.column, known or {}) for path in paths]
    _check_alike(tables)
    for table in tables:
        read = " + ".join(table.reads)
        print(say(f"{table.path.name}: reading column {read}", f"{table.path.name}：读取列 {read}"), file=sys.stderr)
    return Inputs(sources, tables)


def _is_table(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(TABLES)


def _check_alike(tables: Sequence[Table]) -> None:
    """Several tables become one, so they must have one layout and, where it is not JSON, the same columns."""
    first = tables[0]
    for other in tables[1:]:
        same = other.is_json if first.is_json else other.names == first.names and other.part.layout == first.part.layout
        if not same:
            raise BadSetting(
                f"all tables must have the same columns, {first.path} and {other.path} differ; use one command for each"
            )


def _spooled(format: str) -> Path:
    """The standard input as a file that ends with the process: a table is looked at before it is read."""
    folder = tempfile.TemporaryDirectory(prefix="headwater-")
    _KEPT.append(folder)
    path = Path(folder.name) / f"standard-input.{format}"
    with path.open("wb") as file:
        stream = getattr(sys.stdin, "buffer", None)
        if stream is None:
            file.write(sys.stdin.read().encode())
        else:
            shutil.copyfileobj(stream, file)
    return path


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends
