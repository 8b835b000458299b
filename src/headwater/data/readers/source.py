"""DataSource: a dataset on disk, and how its rows become examples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.data.examples import EXAMPLE_FORMATS, Cells, Example, ExampleFormat
from headwater.data.readers.formats import read_conll, read_documents, read_labeled_files, read_parallel, read_squad
from headwater.data.readers.image_folders import FORMAT, hash_image_folder, read_image_folder
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows, DecodeOptions
from headwater.data.readers.recording_folders import (
    SOUND_FOLDER,
    SPEECH_FOLDER,
    hash_recordings,
    read_sound_folder,
    read_speech_folder,
)
from headwater.data.readers.sound_files import SOUND_FILES, hash_sounds, read_sounds
from headwater.data.readers.tables import TableRow, read_delimited, read_json_rows, read_jsonl
from headwater.errors import BadFile
from headwater.i18n import _

SAMPLE_ROWS = 500
CLIPS = "clips"  # where Common Voice keeps the recordings of its tables


@dataclass(frozen=True)
class FileGroup:
    """Files of one format and one split (train, valid or test) that are read together."""

    split: str
    file_format: str
    paths: tuple[Path, ...]
    header: tuple[str, ...] = ()
    header_rows: int = 0  # rows before the data: 1 with a header
    delimiter: str = "\t"


@dataclass(frozen=True)
class DataSource:
    """A dataset on disk: its task, its files, and how their rows become examples."""

    task: str
    file_groups: tuple[FileGroup, ...]
    roles: Mapping[str, str] = field(default_factory=dict)  # role -> column
    languages: tuple[str, ...] = ()  # language codes of source and target, if the names tell them
    decode_options: DecodeOptions = DEFAULT_DECODE_OPTIONS
    notes: tuple[str, ...] = ()
    instruction_format: str = ""  # Alpaca, Dolly or prompt/completion

    @property
    def example_format(self) -> ExampleFormat:
        return EXAMPLE_FORMATS[self.task]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(group.split for group in self.file_groups))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file of the dataset, once."""
        return tuple(dict.fromkeys(path for group in self.file_groups for path in group.paths))

    def examples(self, split: str, bad_rows: BadRows) -> Iterator[Example]:
        """The examples of a split, in file order; bad rows are counted in bad_rows."""
        for group in self.file_groups:
            if group.split == split:
                yield from self._group_examples(group, bad_rows)

    def _group_examples(self, group: FileGroup, bad_rows: BadRows) -> Iterator[Example]:
        if group.file_format == "parallel":
            return read_parallel(group.paths[0], group.paths[1], self.decode_options, bad_rows)
        if group.file_format == "labeled-files":
            return read_labeled_files(group.paths, self.decode_options, bad_rows)
        if group.file_format == "text":
            return read_documents(group.paths, self.decode_options, bad_rows)
        if group.file_format == "conll":
            return read_conll(group.paths[0], self.decode_options, bad_rows)
        if group.file_format == "squad":
            return read_squad(group.paths[0], self.decode_options, bad_rows)
        if group.file_format == FORMAT:
            return read_image_folder(group.paths, bad_rows)
        if group.file_format == SPEECH_FOLDER:
            return read_speech_folder(group.paths, self.decode_options, bad_rows)
        if group.file_format == SOUND_FOLDER:
            return read_sound_folder(group.paths, bad_rows)
        if group.file_format == SOUND_FILES:
            return read_sounds(group.paths)
        return self._table_examples(group, bad_rows)

    def _table_examples(self, group: FileGroup, bad_rows: BadRows) -> Iterator[Example]:
        path = group.paths[0]
        example_type = self.example_format.example_type
        for document, (line, cells) in enumerate(read_table(group, self.decode_options, bad_rows)):
            try:
                yield example_type.from_cells(self._with_file_path(cells, path.parent), self.roles, document)
            except (ValueError, KeyError, TypeError) as error:
                bad_rows.add(path, line, str(error)[:80])

    def _with_file_path(self, cells: Cells, folder: Path) -> Cells:
        """The cells of a row, the file it names relative to the folder of the table; a missing file is a bad row."""
        column = self.roles.get(self.example_format.file_role)
        if not column or not isinstance(cells.get(column), str):
            return cells
        name = str(cells[column]).strip()
        file = next((path for path in (folder / name, folder / CLIPS / name) if path.is_file()), None)
        if file is None:
            raise ValueError(_("there is no file {name}", name=str(cells[column])[:60]))
        return {**cells, column: str(file)}


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file by name: a resumed run must find them unchanged, wherever they are now."""
    hashes: dict[str, str] = {}
    for path in paths:
        name = path.name if path.name not in hashes else f"{path.name} ({len(hashes)})"
        if path.is_dir():
            hashes[name] = hash_image_folder(path) + hash_recordings(path) + hash_sounds(path)
            continue
        with path.open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def read_table(group: FileGroup, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TableRow]:
    """The rows of a TSV, CSV, JSONL or JSON file."""
    path = group.paths[0]
    if group.file_format == "jsonl":
        return read_jsonl(path, decode_options, bad_rows)
    if group.file_format == "json":
        return read_json_rows(path, decode_options, bad_rows)
    return read_delimited(path, decode_options, bad_rows, group.delimiter, group.header, group.header_rows)


def sample_rows(group: FileGroup, decode_options: DecodeOptions) -> list[dict[str, Any]]:
    """The first rows of a table; invalid bytes are replaced rather than refused."""
    lenient = DecodeOptions(
        decode_options.encoding,
        "replace" if decode_options.errors == "strict" else decode_options.errors,
        decode_options.max_line_bytes,
    )
    rows = [
        row.cells
        for row, _ in zip(read_table(group, lenient, BadRows(max_count=10**9)), range(SAMPLE_ROWS), strict=False)
    ]
    if not rows:
        raise BadFile(_("{path} has no rows that can be read; check its format and encoding", path=group.paths[0]))
    return rows
