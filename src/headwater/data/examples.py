"""Example types, one per kind of task, their table columns, and the train/validation split by a hash of the input.

Everything after the readers knows only these types. A new type needs the four members of Example, and an ExampleFormat
that names the columns it is read from. The split is a function of the text: no run, order or machine changes it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from headwater.errors import BadSetting, nearest
from headwater.i18n import _

LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Cells = Mapping[str, Any]  # a row of a table: column -> value; JSON has other values than text
Roles = Mapping[str, str]  # role -> column


class Example(Protocol):
    """One example of a dataset."""

    @property
    def input_text(self) -> str:
        """The input of the model. Examples with equal inputs are in the same split, and count as overlap."""

    @property
    def texts(self) -> Sequence[str]:
        """All texts, to train a tokenizer on; labels and tags are not text."""

    @property
    def labels(self) -> Sequence[str]:
        """The classes or tags; empty for a task without labels."""

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        """Build the example from a table row. A bad row raises ValueError with the reason."""


class TextPair(NamedTuple):
    """A sequence-to-sequence example: translation, summarization, description to code."""

    source: str
    target: str

    @property
    def input_text(self) -> str:
        return self.source

    @property
    def texts(self) -> tuple[str, ...]:
        return self.source, self.target

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        source = text_cell("source", cells.get(roles["source"]))
        second_input = cells.get(roles["input"]) if "input" in roles else None
        if not (second_input is None or (isinstance(second_input, str) and not second_input.strip())):
            source = f"{source}\n{text_cell('input', second_input)}"
        return cls(source, text_cell("target", cells.get(roles["target"])))


class LabeledText(NamedTuple):
    """A classification example: a text, or a pair such as premise and hypothesis, and its label."""

    text: str
    label: str
    text_pair: str = ""

    @property
    def input_text(self) -> str:
        return f"{self.text}\t{self.text_pair}" if self.text_pair else self.text

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.text, self.text_pair)))

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        text = text_cell("text", cells.get(roles["text"]))
        label = text_cell("label", cells.get(roles["label"])).strip()
        return cls(text, label, str(cells.get(roles.get("second", "")) or ""))


class TaggedTokens(NamedTuple):
    """A token classification example: words, each with its tag."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def input_text(self) -> str:
        return " ".join(self.words)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.input_text,)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.tags

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        words, tags = (cells.get(roles[role]) for role in ("words", "tags"))
        words, tags = (value.split() if isinstance(value, str) else value for value in (words, tags))
        if not (isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) and words):
            raise ValueError(_("words and tags are not lists of the same length"))
        return cls(tuple(map(str, words)), tuple(map(str, tags)))


class QAExample(NamedTuple):
    """An extractive question answering example. Answers are spans of the context, with their start in characters."""

    question: str
    context: str
    answers: tuple[str, ...] = ()
    answer_starts: tuple[int, ...] = ()
    question_id: str = ""

    @property
    def input_text(self) -> str:
        return self.context

    @property
    def texts(self) -> tuple[str, ...]:
        return self.question, self.context

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        question, context, answers = (cells.get(roles[role]) for role in ("question", "context", "answers"))
        gold = () if cells.get("is_impossible") else answers or ()
        return cls.checked(question, context, gold, str(cells.get("id", "")))

    @classmethod
    def checked(cls, question: Any, context: Any, answers: Any, question_id: str = "") -> Self:
        """From parsed JSON: question and context must be text, and every answer in the context at its start."""
        if not (isinstance(question, str) and isinstance(context, str)):
            raise ValueError(_("question and context must be text"))
        if isinstance(answers, dict):  # {"text": [...], "answer_start": [...]}, the columnar form
            answers = [
                {"text": t, "answer_start": s} for t, s in zip(answers["text"], answers["answer_start"], strict=True)
            ]
        texts: list[str] = []
        starts: list[int] = []
        for answer in answers:
            text = answer["text"]
            start = answer["answer_start"]
            if type(start) is not int or start < 0 or context[start : start + len(text)] != text or not text:
                raise ValueError(_("the answer is not in the context at answer_start"))
            texts.append(text)
            starts.append(start)
        return cls(question, context, tuple(texts), tuple(starts), question_id)


class CaptionedPicture(NamedTuple):
    """A picture file and its caption; without one, of a task that reads pictures alone."""

    path: str
    text: str = ""

    @property
    def input_text(self) -> str:
        return self.text or self.path

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.text else ()

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        text = text_cell("text", cells.get(roles["text"])) if "text" in roles else ""
        return cls(text_cell("path", cells.get(roles["path"])), text)


class MatchedPicture(CaptionedPicture):
    """A captioned picture whose split depends on the picture: one with several captions is on one side alone."""

    __slots__ = ()

    @property
    def input_text(self) -> str:
        return file_hash(self.path)


class LabeledImage(NamedTuple):
    """An image file and its class."""

    path: str
    label: str

    @property
    def input_text(self) -> str:
        """The hash of the file: copies of an image are in one split, wherever they are."""
        return file_hash(self.path)

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        return cls(text_cell("path", cells.get(roles["path"])), text_cell("label", cells.get(roles["label"])).strip())


class DocumentChunk(NamedTuple):
    """A chunk of a document, for language modelling. Chunks of one document are consecutive and carry its id."""

    text: str
    document_id: int = 0

    @property
    def input_text(self) -> str:
        return self.text

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        return cls(text_cell("text", cells.get(roles["text"])), document)


def text_cell(role: str, value: Any) -> str:
    """A cell as text. Numbers and booleans become text (labels); lists, objects and blank cells are refused."""
    if value is None:
        raise ValueError(_("no {role}", role=role))
    if isinstance(value, (dict, list)):
        raise ValueError(_("{role} is not text but {name}", role=role, name=type(value).__name__))
    text = value if isinstance(value, str) else str(value)
    if not text.isascii() and LONE_SURROGATE.search(text):
        raise ValueError(_("{role} contains a lone surrogate, which is not valid text", role=role))
    if not text or text.isspace():
        raise ValueError(_("empty {role}", role=role))
    return text


# ------------------------------------------------------------------------------------------- how examples are read


@dataclass(frozen=True)
class ExampleFormat:
    """The format of a task's examples: how they are read from files.

    roles: the columns that a table must have; optional_roles: those it may have
    input_role: the column that prediction reads; second_input_role: an optional second one
    reads_words: whether an input may be a list of words
    file_format: the file format that is for this task only, if there is one
    file_role: the column that names a file, relative to the folder of the table
    split_by_row: True: validation rows are chosen by their hash; False: the end of the text is the validation split
    inferred: whether a table with these columns is read for this task where none is named
    by_keys: True: rows are recognised by their keys (conversations.py), and no column needs a role
    """

    task: str
    example_type: type[Example]
    roles: tuple[str, ...]
    optional_roles: tuple[str, ...] = ()
    input_role: str = "text"
    second_input_role: str = ""
    reads_words: bool = False
    file_format: str = ""
    file_role: str = ""
    split_by_row: bool = True
    inferred: bool = True
    by_keys: bool = False


EXAMPLE_FORMATS: dict[str, ExampleFormat] = {  # by task, the most specific columns first
    each.task: each
    for each in (
        ExampleFormat("question-answering", QAExample, ("question", "context", "answers"), file_format="squad"),
        ExampleFormat(
            "token-classification",
            TaggedTokens,
            ("words", "tags"),
            input_role="words",
            reads_words=True,
            file_format="conll",
        ),
        ExampleFormat("seq2seq", TextPair, ("source", "target"), ("input",), input_role="source"),
        ExampleFormat("classification", LabeledText, ("text", "label"), ("second",), second_input_role="second"),
        ExampleFormat("image-classification", LabeledImage, ("path", "label"), input_role="path", file_role="path"),
        ExampleFormat("image-text", MatchedPicture, ("path", "text"), input_role="path", file_role="path"),
        ExampleFormat("text-to-image", CaptionedPicture, ("path", "text"), file_role="path", inferred=False),
        ExampleFormat(
            "picture-codec", CaptionedPicture, ("path",), ("text",), input_role="path", file_role="path", inferred=False
        ),
        ExampleFormat("language-model", DocumentChunk, ("text",), file_format="text", split_by_row=False),
    )
}
TASK_ALIASES = {
    "translation": "seq2seq",
    "summarization": "seq2seq",
    "summarisation": "seq2seq",
    "ner": "token-classification",
    "causal": "language-model",
}


def resolve_task(name: str) -> str:
    """The canonical name of a task, from its name or an alias."""
    task = TASK_ALIASES.get(name, name)
    if task not in EXAMPLE_FORMATS:
        raise BadSetting(
            _(
                "no task is called {name!r}; {nearest}",
                name=name,
                nearest=nearest(name, [*EXAMPLE_FORMATS, *TASK_ALIASES]),
            )
        )
    return task


# --------------------------------------------------------------------------------------------- train/validation split


@lru_cache(maxsize=16)  # of a long recording each subtitle is an example, of an image each caption
def file_hash(path: str) -> str:
    """SHA-256 of a file; its name where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return path


def text_hash(text: str) -> int:
    """64-bit hash of a text, the same on every machine; lone surrogates count too."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def split_hash(example: Example, seed: int = 0) -> int:
    """Hash of an example's input in [0, 2⁶⁴), which decides its split."""
    return text_hash(f"{seed}:{example.input_text}")


def validation_mask(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """True for the lowest hashes, about this fraction of them; at least one input of few examples, and never all.

    Equal inputs fall on the same side, so a duplicate never leaks.

    >>> validation_mask(np.array([7, 2**63, 7, 2**64 - 1], dtype=np.uint64), 0.05)
    array([ True, False,  True, False])
    """
    if not 0 <= fraction < 1:
        raise BadSetting(
            _("the validation fraction must be from 0 up to 1, got {fraction}; 0.05 is usual", fraction=fraction)
        )
    is_validation: np.ndarray = hashes < np.uint64(int(fraction * 2**64))
    if is_validation.any() and not is_validation.all():
        return is_validation
    lowest = hashes == hashes.min(initial=2**64 - 1)
    return lowest & ~lowest.all()


def validation_start(length: int, fraction: float, min_length: int = 1) -> int:
    """The first validation token of a text: its end is the validation split, because neighbouring tokens would leak."""
    num_train = min(length - min_length, int(length * (1 - fraction)))
    if num_train < min_length:
        raise BadSetting(
            _(
                "a text of {length} tokens cannot be split with {min_length} on each side; give a longer text",
                length=length,
                min_length=min_length,
            )
        )
    return num_train
