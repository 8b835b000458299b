"""A user's examples as ids, ready to be taken in batches: the one thing a training loop holds of the data.

ready = prepare(recipe, "train", tokenizer)        # read, tokenise, keep in the cache
for batch in Batches(ready.lengths, tokens).after(position):
    lesson = ready.lesson(batch.examples, seed, batch.epoch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headwater.data.encode import check_ids, encode_rows
from headwater.data.examples import Example, Labelled, Pair, Passage, Question, Tagged
from headwater.data.objectives.answers import Window, windows
from headwater.data.objectives.denoise import denoised, sentence_ends
from headwater.data.objectives.labels import classified, label_names, numbers_of, tag_columns, tagged
from headwater.data.objectives.lesson import Lesson, Marks
from headwater.data.objectives.masked import masked
from headwater.data.objectives.spans import corrupted
from headwater.data.objectives.texts import causal, real, seq2seq
from headwater.data.packing import stream_rows, stream_starts
from headwater.data.ragged import Ragged
from headwater.data.reading.problems import Problems
from headwater.data.reading.recipe import Recipe
from headwater.data.split import held_out, tail
from headwater.data.store import cached, key_of
from headwater.errors import BadSetting, NotFound, nearest
from headwater.text.tokenizer import Tokenizer

OBJECTIVES = {  # objective -> the task whose examples it learns from
    "seq2seq": "text-to-text", "classification": "classification", "tagging": "tagging", "answers": "answers",
    "causal": "language-model", "masked": "language-model", "denoising": "language-model",
    "span-corruption": "language-model"}  # fmt: skip
SPECIAL_TOKENS = {"seq2seq": (2, 1), "answers": (0,), "causal": (0,), "span-corruption": (2, 1), "denoising": (2, 1)}


@dataclass(frozen=True)
class Ready:
    """Columns of ids for one objective. lengths [N, K] are tokens as a model will see them."""

    objective: str
    columns: dict[str, Ragged]
    marks: Marks
    context: int = 0
    names: tuple[str, ...] = ()  # labels or tags, by number
    ends: np.ndarray | None = None  # pieces that end a sentence, for denoising

    def __len__(self) -> int:
        if self.objective == "causal":
            return (len(self.columns["text"].values) - 1) // self.context
        return len(next(iter(self.columns.values())))

    @property
    def lengths(self) -> np.ndarray:
        if self.objective == "causal":
            return np.full((len(self), 1), self.context)
        first, *others = self.columns.values()
        extra = SPECIAL_TOKENS.get(self.objective, (2,))
        sides = [first, others[0] if self.objective == "seq2seq" else first][: len(extra)]
        found = np.stack([side.lengths + more for side, more in zip(sides, extra, strict=True)], 1)
        return found + (self.columns["second"].lengths + 1)[:, None] if "second" in self.columns else found

    def lesson(self, examples: np.ndarray, seed: int, epoch: int) -> Lesson:
        """What a model is given for these examples in this epoch."""
        rows = {name: column.take(examples) for name, column in self.columns.items()} if len(self.columns) > 1 else {}
        return LESSONS[self.objective](self, rows, examples, seed, epoch)


def prepare(
    recipe: Recipe, split: str, tokenizer: Tokenizer, *, target_tokenizer: Tokenizer | None = None, objective: str = "",
    names: tuple[str, ...] = (), context: int = 256, share: float = 0.05, seed: int = 0,
    cache: Path | None = None, problems: Problems | None = None,
) -> Ready:  # fmt: skip
    """The examples of a split as ids. names: the labels of the training data, when this is not it."""
    objective = objective or next(name for name, task in OBJECTIVES.items() if task == recipe.task)
    if OBJECTIVES.get(objective) != recipe.task:
        fitting = [name for name, task in OBJECTIVES.items() if task == recipe.task]
        raise BadSetting(f"{objective!r} cannot be learned from {recipe.task} data; {nearest(objective, fitting)}")
    marks, problems = Marks.of(tokenizer), problems if problems is not None else Problems()

    def found() -> Iterator[Example]:
        return examples_of(recipe, split, share, seed, problems)

    if objective in ("classification", "tagging") and not names:
        names = label_names(label for example in found() for label in _labels(example))
    other = target_tokenizer or tokenizer
    paths = [path for part in recipe.parts for path in part.paths]
    words = (repr(recipe.roles), repr(recipe.reading), objective, split, tokenizer.hash, other.hash, repr(names),
             f"{context} {share} {seed}")  # fmt: skip
    columns = cached(cache, key_of(paths, *words),
                     lambda: _columns(objective, found, tokenizer, other, names, context, marks))  # fmt: skip
    if recipe.task == "language-model":
        columns = _stretch(columns, recipe, split, share, context, objective)
    check_ids(next(iter(columns.values())), len(tokenizer), "the kept ids")
    ends = sentence_ends(tokenizer) if objective == "denoising" else None
    return Ready(objective, columns, marks, context, names, ends)


def examples_of(recipe: Recipe, split: str, share: float, seed: int, problems: Problems) -> Iterator[Example]:
    """The examples of a set; where no set for validation was given, some of train are held out for it."""
    if split not in (*recipe.splits, "train", "valid"):
        raise NotFound(f"the data has no set called {split!r}; {nearest(split, [*recipe.splits, 'valid'])}")
    if split in recipe.splits and ("valid" in recipe.splits or split == "test"):
        return recipe.examples(split, problems)
    if recipe.task == "language-model":  # cut where its ids end, see _stretch
        return recipe.examples("train", problems)
    return (e for e in recipe.examples("train", problems) if held_out(e, share, seed) == (split == "valid"))


def _labels(example: Example) -> tuple[str, ...]:
    return example.tags if isinstance(example, Tagged) else (example.label,) if isinstance(example, Labelled) else ()


def _columns(
    objective: str, found: Callable[[], Iterator[Example]], tokenizer: Tokenizer, other: Tokenizer,
    names: tuple[str, ...], context: int, marks: Marks,
) -> dict[str, Ragged]:  # fmt: skip
    if objective == "seq2seq":
        pairs = [e for e in found() if isinstance(e, Pair)]
        return {"source": encode_rows(tokenizer, (p.source for p in pairs)),
                "target": encode_rows(other, (p.target for p in pairs))}  # fmt: skip
    if objective == "classification":
        rows = [e for e in found() if isinstance(e, Labelled)]
        numbers = numbers_of([row.label for row in rows], names)
        columns = {"text": encode_rows(tokenizer, (row.text for row in rows)), "label": Ragged.of(numbers[:, None])}
        return columns | (
            {"second": encode_rows(tokenizer, (r.second for r in rows))} if any(r.second for r in rows) else {}
        )
    if objective == "tagging":
        return tag_columns((e for e in found() if isinstance(e, Tagged)), names, tokenizer)
    if objective == "answers":
        asked = (e for e in found() if isinstance(e, Question))
        return _window_columns([w for q in asked for w in windows(q, tokenizer, marks, context, context // 3)])
    return {"text": encode_documents(tokenizer, (e for e in found() if isinstance(e, Passage)))}


def encode_documents(tokenizer: Tokenizer, passages: Iterator[Passage]) -> Ragged:
    """One row for each document, its chunks joined."""
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for passage in passages:
            numbers.append(passage.document)
            yield passage.text

    chunks = encode_rows(tokenizer, texts())
    starts = np.flatnonzero(np.diff(numbers, prepend=-1)) if numbers else np.zeros(0, np.int64)
    return Ragged(chunks.values, np.append(chunks.offsets[starts], chunks.offsets[-1]))


def _window_columns(found: list[Window]) -> dict[str, Ragged]:
    return {"ids": Ragged.of([w.ids for w in found]), "kinds": Ragged.of([w.kinds for w in found]),
            "answer": Ragged.of([w.answer for w in found])}  # fmt: skip


def _stretch(
    columns: dict[str, Ragged], recipe: Recipe, split: str, share: float, context: int, objective: str
) -> dict[str, Ragged]:
    """Running text of a split: its own files, or one end of train; whole for a stream, in rows for the others."""
    text = columns["text"]
    if "valid" not in recipe.splits and split != "test":
        cut = tail(len(text.values), share, context + 1)
        begin, end = (0, cut) if split == "train" else (cut, len(text.values))
        edges = np.unique(np.clip(text.offsets, begin, end))
        text = Ragged(text.values[begin:end], edges - begin)
    if objective == "causal":
        return {"text": text}
    inner = [np.arange(a, b, context - 2) for a, b in zip(text.offsets[:-1], text.offsets[1:], strict=True)]
    edges = np.append(np.concatenate(inner), text.offsets[-1])
    rows = Ragged(text.values, edges)
    return {"text": rows.take(np.flatnonzero(rows.lengths >= 2))}


# ------------------------------------------------------------------------------------------- one lesson each objective

Make = Callable[[Ready, dict[str, Ragged], np.ndarray, int, int], Lesson]


def _stream_lesson(ready: Ready, rows: dict[str, Ragged], examples: np.ndarray, seed: int, epoch: int) -> Lesson:
    stream = ready.columns["text"].values
    starts = stream_starts(len(stream), ready.context, seed, epoch)
    return causal(stream_rows(stream, starts[examples], ready.context))


def _class_lesson(ready: Ready, rows: dict[str, Ragged], examples: np.ndarray, seed: int, epoch: int) -> Lesson:
    return classified(rows["text"], rows["label"].values.astype(np.int64), ready.marks, rows.get("second"))


def _answer_lesson(ready: Ready, rows: dict[str, Ragged], examples: np.ndarray, seed: int, epoch: int) -> Lesson:
    ids, places = rows["ids"], rows["answer"].values.reshape(-1, 2).astype(np.int64)
    return Lesson(ids.padded(ready.marks.pad), real(ids), places, kinds=rows["kinds"].padded(0))


def _text(ready: Ready, examples: np.ndarray) -> Ragged:
    return ready.columns["text"].take(examples)


LESSONS: dict[str, Make] = {
    "seq2seq": lambda ready, rows, n, seed, epoch: seq2seq(rows["source"], rows["target"], ready.marks),
    "classification": _class_lesson,
    "tagging": lambda ready, rows, n, seed, epoch: tagged(rows["ids"], rows["labels"], ready.marks),
    "answers": _answer_lesson,
    "causal": _stream_lesson,
    "masked": lambda ready, rows, n, seed, epoch: masked(_text(ready, n), ready.marks, n, seed, epoch),
    "span-corruption": lambda ready, rows, n, seed, epoch: corrupted(_text(ready, n), ready.marks, n, seed, epoch),
    "denoising": lambda ready, rows, n, seed, epoch: denoised(
        _text(ready, n), ready.marks, ready.ends if ready.ends is not None else np.zeros(0, np.int64), n, seed, epoch
    ),
}
