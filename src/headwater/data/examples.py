"""The five shapes of an example, one for each kind of task. Everything after the readers knows only these."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from headwater.errors import BadSetting, nearest


class Pair(NamedTuple):
    """Text to text: translation, summarisation, description to code."""

    source: str
    target: str


class Labelled(NamedTuple):
    """A text (or two: premise and hypothesis) and its class."""

    text: str
    label: str
    second: str = ""


class Tagged(NamedTuple):
    """Words, each with its tag."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


class Question(NamedTuple):
    """A question about a text. Each answer is the text at its start, in characters; none: it has no answer there."""

    question: str
    context: str
    answers: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    name: str = ""


class Passage(NamedTuple):
    """Running text. Passages of one document follow each other and carry its number."""

    text: str
    document: int = 0


Example: TypeAlias = Pair | Labelled | Tagged | Question | Passage

TASKS: dict[str, type] = {
    "text-to-text": Pair,
    "classification": Labelled,
    "tagging": Tagged,
    "answers": Question,
    "language-model": Passage,
}
SAME = {"translation": "text-to-text", "summarization": "text-to-text", "summarisation": "text-to-text",
        "question-answering": "answers", "ner": "tagging", "causal": "language-model"}  # fmt: skip


def task_named(name: str) -> str:
    """The task's one name, from it or a word people use for it."""
    task = SAME.get(name, name)
    if task not in TASKS:
        raise BadSetting(f"no task is called {name!r}; {nearest(name, [*TASKS, *SAME])}")
    return task


def input_of(example: Example) -> str:
    """The text a model is given: what makes two examples the same question. Splits and overlaps go by it."""
    if isinstance(example, Question):
        return example.context
    if isinstance(example, Tagged):
        return " ".join(example.words)
    if isinstance(example, Labelled):
        return example.text + ("\t" + example.second if example.second else "")
    return example[0]
