"""A recipe: how a user's files become examples, settled once by looking at them, then followed to the letter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headwater.data.examples import Example
from headwater.data.reading.columns import example_maker
from headwater.data.reading.lines import USUAL, Reading
from headwater.data.reading.problems import Problems
from headwater.data.reading.shapes import conll, labelled_by_file, parallel, running, squad
from headwater.data.reading.tables import Row, delimited, json_rows, jsonl


@dataclass(frozen=True)
class Part:
    """Files read together in one layout, and the set (train, valid, test) they belong to."""

    split: str
    layout: str
    paths: tuple[Path, ...]
    header: tuple[str, ...] = ()
    skip: int = 0  # rows before the data: 1 with a header
    delimiter: str = "\t"


@dataclass(frozen=True)
class Recipe:
    task: str
    parts: tuple[Part, ...]
    roles: Mapping[str, str] = field(default_factory=dict)  # role -> column
    languages: tuple[str, ...] = ()  # codes of those of source and target, where names tell
    reading: Reading = USUAL
    notes: tuple[str, ...] = ()
    format: str = ""  # of instructions: Alpaca, Dolly, prompt/completion

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.split for part in self.parts))

    def examples(self, split: str, problems: Problems) -> Iterator[Example]:
        """Every good example of a set, in file order; the bad ones are counted in `problems`."""
        for part in self.parts:
            if part.split == split:
                yield from self._of(part, problems)

    def _of(self, part: Part, problems: Problems) -> Iterator[Example]:
        if part.layout == "parallel":
            return parallel(part.paths[0], part.paths[1], self.reading, problems)
        if part.layout == "by-file":
            return labelled_by_file(part.paths, self.reading, problems)
        if part.layout == "running":
            return running(part.paths, self.reading, problems)
        if part.layout == "conll":
            return conll(part.paths[0], self.reading, problems)
        if part.layout == "squad":
            return squad(part.paths[0], self.reading, problems)
        return self._of_table(part, problems)

    def _of_table(self, part: Part, problems: Problems) -> Iterator[Example]:
        path, make = part.paths[0], example_maker(self.task, self.roles)
        for document, (line, cells) in enumerate(table(part, self.reading, problems)):
            try:
                yield make(cells, document)
            except (ValueError, KeyError, TypeError) as error:
                problems.add(path, line, str(error)[:80])


def table(part: Part, reading: Reading, problems: Problems) -> Iterator[Row]:
    path = part.paths[0]
    if part.layout == "jsonl":
        return jsonl(path, reading, problems)
    if part.layout == "json":
        return json_rows(path, reading, problems)
    return delimited(path, reading, problems, part.delimiter, part.header, part.skip)
