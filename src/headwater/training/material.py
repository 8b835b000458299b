"""From settings to what is taught: files are read, split and tokenized; each task makes its own kind of course."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.data.augment import Changing, changes_of
from headwater.data.encode import encode_rows
from headwater.data.examples import Example, input_of
from headwater.data.learn import KINDS, learn
from headwater.data.look import Look, look
from headwater.data.objectives.answers import windows
from headwater.data.objectives.labels import label_names, numbers_of, tag_columns
from headwater.data.objectives.lesson import Marks
from headwater.data.reading.lines import Reading
from headwater.data.reading.problems import Problems
from headwater.data.split import held_out, place
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, nearest
from headwater.text.load import load as load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.training.courses import Answers, Classification, Course, Tagging, TextToText
from headwater.training.running import TEXTS
from headwater.training.settings import Settings
from headwater.training.starting import tokenizer_of_start

LONGEST, SENTINELS, USUAL_KIND = 512, 100, "bpe"
AUGMENTED = ("text-to-text", "classification")
WINDOW, STRIDE = 256, 96  # of the texts that answers are found in
FEWEST_TOKENS, FEW_TOKENS = 16, 1000  # of training: below the first a text is refused, below the second it is said
NULL_THRESHOLD = 0.0  # the default of SQuAD 2.0


@dataclass
class Material:
    """What is taught and what is measured. examples: the validation rows, in the order of the validation course."""

    task: str
    tokenizer: Tokenizer
    train: Course
    valid: Course
    examples: Sequence[Example] = ()
    labels: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)  # role -> column of the table that was read
    objective: str = ""
    languages: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    tokens: int = 0  # of the training rows
    cut: int = 0  # tokens that were read of a longer text; 0: all of it
    null_threshold: float | None = None  # no answer must beat the best span by more than this; None: never said
    files: dict[str, str] = field(default_factory=dict)  # what was read, with its SHA-256

    @property
    def about(self) -> dict[str, Any]:
        """What a model folder says of its model."""
        return {
            "task": self.task,
            "columns": dict(self.columns),
            "objective": self.objective,
            "labels": list(self.labels),
            "languages": list(self.languages),
            "cut": self.cut,
            "null_threshold": self.null_threshold,
        }


def seen(settings: Settings) -> Look:
    """The files looked at, as the settings say."""
    s = settings
    task = None if s.task == "auto" else s.task
    reading = Reading(None if s.encoding == "auto" else s.encoding, s.invalid)
    return look(
        s.paths, s.valid, task, s.columns, s.source or None, s.target or None, reading, s.held_out, s.seed,
        header=s.header,
    )  # fmt: skip


def fingerprints(found: Look, synonyms: str = "") -> dict[str, str]:
    """SHA-256 of every file that is read, by name: a resumed run must find them unchanged, wherever they lie now."""
    said: dict[str, str] = {}
    data = [path for part in found.recipe.parts for path in part.paths]
    for path in dict.fromkeys((*data, *([Path(synonyms)] if synonyms else []))):
        said[path.name if path.name not in said else f"{path.name} ({len(said)})"] = _digest(path)
    return said


def check_unchanged(settings: Settings, known: Mapping[str, str], where: str) -> None:
    """Before a resumed run reads its files: one that no longer fits their layout is first of all another file."""
    paths = [Path(path) for path in (*settings.paths, *settings.valid, settings.synonyms) if path]
    names = [path.name for path in paths]
    for path in paths:
        alone = names.count(path.name) == 1 and path.name in known and path.is_file()
        if alone and _digest(path) != known[path.name]:
            raise BadSetting(f"data must be what it was when {where} was saved, it has changed ({path.name}); "
                             "bring it back, or begin a new run")  # fmt: skip


def gathered(settings: Settings, found: Look, tokenizer: Tokenizer | None = None) -> Material:
    """Everything the files hold, as courses. A tokenizer that is not given is learned, or read from a folder."""
    synonyms = settings.synonyms if settings.synonyms and Path(settings.synonyms).is_file() else ""
    before = fingerprints(found, synonyms)
    train, valid = divided(settings, found)
    made = taught(settings, found.task, train, valid, tokenizer, found.recipe.languages)
    if (after := fingerprints(found, synonyms)) != before:
        changed = next(name for name in before if before[name] != after[name])
        raise BadFile(f"{changed} must not change while it is read, it did; wait until it is written, and begin again")
    made.columns = found.recipe.roles
    made.files = before
    if made.tokens < FEW_TOKENS:
        made.notes.append(
            f"only {made.tokens:,} tokens to learn from: a model can learn them by heart, and no more; give more data"
        )
    return made


def divided(settings: Settings, found: Look) -> tuple[list[Example], list[Example]]:
    """The rows to learn from and those to measure on, each from its own set or by a hash of the text."""
    rows = {split: list(found.recipe.examples(split, Problems())) for split in found.recipe.splits}
    train = rows["train"]
    if "valid" in rows or found.task == "language-model":
        return train, rows.get("valid", [])
    kept = held_out(np.array([place(row, settings.seed) for row in train], dtype=np.uint64), settings.held_out)
    return [train[i] for i in np.flatnonzero(~kept)], [train[i] for i in np.flatnonzero(kept)]


def taught(
    settings: Settings, task: str, train: list[Example], valid: list[Example],
    tokenizer: Tokenizer | None = None, languages: tuple[str, ...] = (),
) -> Material:  # fmt: skip
    """Material from examples."""
    if not train:
        raise BadInput("there must be at least one row to learn from, there is none; check the data")
    if not valid and task != "language-model":
        inputs = len({input_of(row) for row in train})
        raise BadInput(
            f"the validation set is empty, because the rows to learn from (rows: {len(train):,}, different inputs: "
            f"{inputs:,}) are too few to split; give --valid FILE, or at least 2 rows with different inputs"
        )
    if settings.augment and task not in AUGMENTED:
        raise BadSetting(f"augment changes texts of {' and '.join(AUGMENTED)}, the task is {task}; leave it out")
    tokenizer = tokenizer or tokenizer_for(settings, train)
    made = MAKERS[task](settings, tokenizer, train, valid)
    made.languages, made.cut = languages, (settings.longest or LONGEST) if settings.cut else 0
    return made


def tokenizer_for(settings: Settings, examples: Iterable[Example]) -> Tokenizer:
    wanted = settings.tokenizer
    if wanted == "auto":
        if settings.start:
            return tokenizer_of_start(settings.start)
        wanted = USUAL_KIND
    if wanted not in KINDS:
        if not Path(wanted).is_dir():
            raise NotFound(f"tokenizer must be a kind or a folder, {wanted!r} is neither; {nearest(wanted, KINDS)}")
        return load_tokenizer(wanted)
    sentinels = SENTINELS if settings.objective == "spans" else 0
    return learn(texts_of(examples), wanted, settings.vocab, sentinels)


def texts_of(examples: Iterable[Any]) -> Iterable[str]:
    """Every text of the examples; labels and tags are not text."""
    for example in examples:
        kind = type(example).__name__
        if kind == "Tagged":
            yield " ".join(example.words)
        elif kind in ("Pair", "Question"):
            yield from example[:2]
        elif kind == "Labelled":
            yield from filter(None, (example.text, example.second))
        else:
            yield example.text


# ---------------------------------------------------------------------------------------------- one maker a task


def _pairs(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Material:
    marks, notes = Marks.of(tokenizer), list[str]()
    courses, kept = [], valid
    for name, rows in (("train", train), ("valid", valid)):
        sides = [encode_rows(tokenizer, (row[i] for row in rows)) for i in (0, 1)]
        sides[0] = sides[0].cut(s.longest or LONGEST) if s.cut else sides[0]
        short = _short(s, np.maximum(*(side.lengths for side in sides)), name, notes)
        courses.append(TextToText(sides[0].take(short), sides[1].take(short), marks, s.batch_tokens, s.seed))
        kept = [rows[i] for i in short]
        if name == "train":
            courses[0].changing = changing(s, tokenizer, [row[0] for row in kept])
    total = int(courses[0].lengths.sum())
    return Material("text-to-text", tokenizer, courses[0], courses[1], kept, notes=notes, tokens=total)


def _running(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Material:
    name = "causal" if s.objective == "auto" else s.objective
    if name not in TEXTS:
        raise BadSetting(f"no objective is called {name!r}; {nearest(name, TEXTS)}")
    found = TEXTS[name](s, tokenizer, train, valid)
    if not valid and found.tokens < FEWEST_TOKENS:
        raise BadInput(
            f"the text must have at least {FEWEST_TOKENS} tokens to learn from once its end is held out, it has "
            f"{found.tokens}; give more text"
        )
    return Material(
        "language-model", tokenizer, found.train, found.valid, objective=name, notes=found.notes, tokens=found.tokens
    )


def _labelled(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Material:
    marks, notes = Marks.of(tokenizer), list[str]()
    names = label_names(row.label for row in train)
    if len(names) < 2:
        raise BadInput(f"classification needs at least two labels, all rows have {names[0]!r}; is it the right column?")
    courses, kept = [], valid
    for name, rows in (("train", train), ("valid", valid)):
        texts = encode_rows(tokenizer, (row.text for row in rows))
        texts = texts.cut(s.longest or LONGEST) if s.cut else texts
        seconds = encode_rows(tokenizer, (row.second for row in rows))
        short = _short(s, texts.lengths + seconds.lengths, name, notes)
        labels = numbers_of([rows[i].label for i in short], names)
        second = seconds.take(short) if len(seconds.values) else None
        courses.append(Classification(texts.take(short), labels, marks, s.batch_tokens, s.seed, second))
        kept = [rows[i] for i in short]
        if name == "train":
            courses[0].changing = changing(s, tokenizer, [row.text for row in kept])
    total = int(courses[0].lengths.sum())
    return Material("classification", tokenizer, courses[0], courses[1], kept, names, notes=notes, tokens=total)


def _tagged(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Material:
    marks, notes = Marks.of(tokenizer), list[str]()
    names = label_names(tag for rows in (train, valid) for row in rows for tag in row.tags)
    courses, kept = [], valid
    for name, rows in (("train", train), ("valid", valid)):
        columns = tag_columns(rows, names, tokenizer)
        short = _short(s, columns["ids"].lengths, name, notes)
        courses.append(
            Tagging(columns["ids"].take(short), columns["labels"].take(short), marks, s.batch_tokens, s.seed)
        )
        kept = [rows[i] for i in short]
    total = int(courses[0].lengths.sum())
    return Material("tagging", tokenizer, courses[0], courses[1], kept, names, notes=notes, tokens=total)


def _asked(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Material:
    marks = Marks.of(tokenizer)
    width = s.longest or WINDOW
    views = [
        [windows(row, tokenizer, marks, width, min(STRIDE, width // 3)) for row in rows] for rows in (train, valid)
    ]
    courses = [Answers(each, marks, s.batch_tokens, s.seed) for each in views]
    total = int(courses[0].lengths.sum())
    null_threshold = None if all(row.answers for row in train) else NULL_THRESHOLD
    return Material("answers", tokenizer, courses[0], courses[1], valid, tokens=total, null_threshold=null_threshold)


def changing(s: Settings, tokenizer: Tokenizer, texts: list[str]) -> Changing | None:
    """What is read, a little different in each epoch, where the settings ask for it."""
    changes = changes_of(s.augment, s.synonyms)
    return Changing(texts, changes, tokenizer, s.seed, s.longest or LONGEST) if changes else None


MAKERS: dict[str, Callable[..., Material]] = {
    "text-to-text": _pairs,
    "language-model": _running,
    "classification": _labelled,
    "tagging": _tagged,
    "answers": _asked,
}


def _short(s: Settings, lengths: np.ndarray, name: str, notes: list[str]) -> np.ndarray:
    """The rows that are short enough; how many are left out is said."""
    most = s.longest or LONGEST
    short = np.flatnonzero(lengths <= most)
    if len(short) < len(lengths):
        notes.append(
            f"{len(lengths) - len(short):,} of {len(lengths):,} {name} rows are longer than {most} tokens and left out"
        )
    if not len(short):
        raise BadInput(
            f"{name}: no row has at most {most} tokens, the shortest has {int(lengths.min(initial=0))}; raise --longest"
        )
    return short


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
