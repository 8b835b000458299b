"""What a user's files hold, said before training: task, rows, languages or labels, lengths, what is wrong."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from headwater.data.examples import Example, Labelled, Pair, Passage, Question, Tagged, input_of
from headwater.data.reading.lines import USUAL, Reading, encoding_of
from headwater.data.reading.problems import Problems
from headwater.data.reading.recipe import Recipe
from headwater.data.reading.settle import Wanted, settle
from headwater.data.split import fingerprint, held_out, place
from headwater.data.telling import told
from headwater.errors import BadFile

QUANTILES = (0.0, 0.5, 0.95, 1.0)
MOST_LABELS = 10_000


@dataclass
class Facts:
    """What one set of the data (train, valid, test) holds. Lengths are in characters."""

    rows: int = 0
    characters: int = 0
    duplicates: int = 0  # rows equal to an earlier one
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)  # field -> least, median, 95 %, most
    labels: dict[str, int] = field(default_factory=dict)  # classes or tags with their counts
    unanswerable: int = 0  # questions without an answer in their text
    problems: Problems = field(default_factory=Problems)
    sample: tuple[Example, ...] = ()


@dataclass
class Look:
    recipe: Recipe
    sets: dict[str, Facts]
    encodings: dict[str, str]  # file -> encoding and how it was found
    overlap: dict[str, int]  # set -> rows whose input is in train too
    held_out: int = 0  # rows of train kept for validation, when no set was given for it
    whole: bool = True  # False: only the first rows were looked at
    notes: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        return self.recipe.task

    def to_plain(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers, ready for JSON."""
        files: dict[str, list[str]] = {part.split: [] for part in self.recipe.parts}
        for part in self.recipe.parts:
            files[part.split] += [str(path) for path in part.paths]
        return {
            "task": self.task,
            "roles": dict(self.recipe.roles),
            "format": self.recipe.format,
            "header": {str(part.paths[0]): part.skip > 0 for part in self.recipe.parts if part.header},
            "languages": list(self.recipe.languages),
            "sets": {name: _plain(facts, files[name]) for name, facts in self.sets.items()},
            "encodings": self.encodings,
            "overlap_with_train": self.overlap,
            "held_out": self.held_out,
            "whole": self.whole,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return told(self)


def look(
    paths: Iterable[Path | str] | Path | str,
    valid: Iterable[Path | str] = (),
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    source: str | None = None,
    target: str | None = None,
    reading: Reading = USUAL,
    share: float = 0.05,
    seed: int = 0,
    most: int = 2_000_000,
    limit: int = 1000,
    header: str = "auto",
) -> Look:
    """Read the files once and say what they hold. At most `most` rows of a set; `limit` bad rows end it."""
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    recipe = settle(given, valid, Wanted(task or "", columns or {}, source, target, reading, header))
    encodings = {str(path): _say_encoding(path, recipe) for part in recipe.parts for path in part.paths}
    sets: dict[str, Facts] = {}
    inputs: dict[str, np.ndarray] = {}
    kept = 0
    for split in ("train", *(s for s in recipe.splits if s != "train")):
        counter = _Counter(limit, seed)
        sets[split] = counter.over(recipe, split, most)
        inputs[split] = np.array(counter.inputs, dtype=np.uint64)
        if split == "train" and "valid" not in recipe.splits:
            kept = int(held_out(inputs[split], share).sum()) if recipe.task != "language-model" else 0
    if not sets["train"].rows:
        raise BadFile(f"{given[0]} holds no row that can be used; {_first_problem(sets['train'])}")
    overlap = {s: int(np.isin(inputs[s], inputs["train"]).sum()) for s in sets if s != "train"}
    _refuse_copies(overlap, sets)
    whole = all(facts.rows < most for facts in sets.values())
    return Look(recipe, sets, encodings, overlap, kept, whole, recipe.notes)


class _Counter:
    """One pass over a set, in memory of a few bytes a row."""

    def __init__(self, limit: int, seed: int) -> None:
        self.seed = seed
        self.document: int | None = None  # the one being counted, for running text
        self.facts = Facts(problems=Problems(limit=limit))
        self.inputs = array("Q")  # where each input lies: by it rows are held out and found again in other sets
        self.rows = array("q")  # the hash of each row
        self.lengths: dict[str, array[int]] = {}
        self.labels: Counter[str] = Counter()

    def over(self, recipe: Recipe, split: str, most: int) -> Facts:
        for example in islice(recipe.examples(split, self.facts.problems), most):
            if isinstance(example, Passage) and example.document == self.document:
                self._continue(example.text)
            else:
                self._add(example)
        facts, prints = self.facts, np.array(self.rows)
        facts.rows = len(prints)
        facts.duplicates = len(prints) - len(np.unique(prints))
        facts.labels = dict(self.labels.most_common(MOST_LABELS))
        facts.characters = sum(map(sum, self.lengths.values()))
        facts.lengths = {name: _quantiles(values) for name, values in self.lengths.items()}
        return facts

    def _continue(self, text: str) -> None:
        """One more chunk of the document just counted: only its size and its print grow."""
        self.lengths["text"][-1] += len(text)
        self.rows[-1] = hash((self.rows[-1], text))
        self.inputs[-1] = fingerprint(f"{self.inputs[-1]}:{text}")

    def _add(self, example: Example) -> None:
        self.document = example.document if isinstance(example, Passage) else None
        if len(self.rows) < 3:
            self.facts.sample += (example,)
        self.rows.append(hash(example))
        self.inputs.append(place(example, self.seed))
        for name, text in _texts(example):
            if name not in self.lengths:
                self.lengths[name] = array("q")
            self.lengths[name].append(len(text))
        if isinstance(example, Labelled):
            self.labels[example.label] += 1
        elif isinstance(example, Tagged):
            self.labels.update(example.tags)
        elif isinstance(example, Question):
            self.facts.unanswerable += not example.answers


def _texts(example: Example) -> tuple[tuple[str, str], ...]:
    if isinstance(example, Pair):
        return ("source", example.source), ("target", example.target)
    if isinstance(example, Question):
        return ("question", example.question), ("context", example.context)
    return (("text", input_of(example)),)


def _quantiles(values: array[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in np.quantile(np.array(values), QUANTILES, method="nearest"))


def _say_encoding(path: Path, recipe: Recipe) -> str:
    found = encoding_of(path, recipe.reading)
    return f"{found.name} ({found.how})"


def _refuse_copies(overlap: dict[str, int], sets: dict[str, Facts]) -> None:
    for name, count in overlap.items():
        if sets[name].rows >= 10 and count > 0.5 * sets[name].rows:
            raise BadFile(f"{count:,} of {sets[name].rows:,} rows of {name} are in train too, so it would measure "
                          "memory; give other rows, or leave it out to have some held out")  # fmt: skip


def _first_problem(facts: Facts) -> str:
    said = facts.problems.lines()
    return said[0] if said else "it has only blank lines"


def _plain(facts: Facts, files: list[str]) -> dict[str, Any]:
    names = ("least", "median", "most_of_95", "most")
    return {
        "files": files,
        "rows": facts.rows,
        "characters": facts.characters,
        "duplicates": facts.duplicates,
        "lengths": {name: dict(zip(names, values, strict=True)) for name, values in facts.lengths.items()},
        "labels": facts.labels,
        "unanswerable": facts.unanswerable,
        "bad": facts.problems.to_plain(),
    }
