"""Files whose layout is fixed by custom: parallel text, running text, CoNLL columns, SQuAD JSON."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from headwater.data.examples import Labelled, Pair, Passage, Question, Tagged
from headwater.data.reading.lines import Line, Reading, good, lines, pieces
from headwater.data.reading.problems import Problems
from headwater.data.reading.tables import json_document
from headwater.errors import BadFile

CHUNK = 2**16  # characters of running text handed on at a time


def parallel(source: Path, target: Path, reading: Reading, problems: Problems) -> Iterator[Pair]:
    """Line n of one file with line n of the other. Files of different length are refused: the rest is out of step."""
    sides = zip_longest(lines(source, reading, problems), lines(target, reading, problems))
    for place, (left, right) in enumerate(sides, 1):
        if left is None or right is None:
            short, long = (source, target) if left is None else (target, source)
            raise BadFile(
                f"{short} has {place - 1} lines and {long} has more; line n of one must translate line n of the other"
            )
        if left.fault or right.fault:
            problems.add(source if left.fault else target, place, left.fault or right.fault)
        elif left.text.strip() and right.text.strip():
            yield Pair(left.text, right.text)
        else:
            empty = [path.name for path, line in ((source, left), (target, right)) if not line.text.strip()]
            problems.add(source, place, f"empty in {' and '.join(empty)}")


def labelled_by_file(paths: tuple[Path, ...], reading: Reading, problems: Problems) -> Iterator[Labelled]:
    """One file for each class, a text a line; the class is the file's suffix: reviews.pos, reviews.neg."""
    for path in paths:
        label = Path(path.name.removesuffix(".gz")).suffix.lstrip(".")
        for line in good(path, lines(path, reading, problems), problems):
            if line.text.strip():
                yield Labelled(line.text, label)


def running(paths: tuple[Path, ...], reading: Reading, problems: Problems) -> Iterator[Passage]:
    """Running text, each file one document, newlines kept, in chunks that end where a line ends if they can."""
    for document, path in enumerate(paths):
        held, size = [], 0
        for line in good(path, pieces(path, reading, problems), problems):
            text = line.text + "\n" if line.ends else line.text
            held.append(text)
            size += len(text)
            if size >= CHUNK:
                yield Passage("".join(held), document)
                held, size = [], 0
        if held:
            yield Passage("".join(held), document)


def conll(path: Path, reading: Reading, problems: Problems) -> Iterator[Tagged]:
    """A word a line, its tag in the last column, a blank line between sentences. A bad line spoils its sentence."""
    sentence: list[list[str]] = []
    spoiled = 0  # the number of the sentence's first bad line
    reason = ""
    for line in chain(lines(path, reading, problems), [Line(0, "")]):
        if line.text.strip() or line.fault:
            columns = _columns(line.text)
            if columns is None:
                continue
            if not spoiled and (line.fault or len(columns) < 2 or (sentence and len(columns) != len(sentence[0]))):
                spoiled, reason = line.number, line.fault or f"{len(columns)} columns in a sentence of word and tag"
            sentence.append(columns)
            continue
        if spoiled:
            problems.add(path, spoiled, reason)
        elif sentence:
            yield Tagged(tuple(row[0] for row in sentence), tuple(row[-1] for row in sentence))
        sentence, spoiled = [], 0


def _columns(text: str) -> list[str] | None:
    """The columns of one line; None for a line that is about the file, not of it."""
    if text.startswith("-DOCSTART-") or (text.startswith("# ") and " = " in text):
        return None
    return [cell.strip() for cell in text.split("\t")] if "\t" in text else text.split()


def squad(path: Path, reading: Reading, problems: Problems) -> Iterator[Question]:
    """SQuAD 1.1 and 2.0. An answer must stand in its context at the place it names, or its question is bad."""
    place = 0
    for paragraph in _paragraphs(path, json_document(path, reading, problems)):
        for item in paragraph["qas"]:
            place += 1
            try:
                answers = () if item.get("is_impossible") else item["answers"]
                yield asked(item["question"], paragraph["context"], answers, str(item.get("id", "")))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                problems.add(path, place, f"not a question with answers: {_say(error)}")


def asked(question: Any, context: Any, answers: Any, name: str = "") -> Question:
    """A checked question: words are words, and every answer stands where it says."""
    if not (isinstance(question, str) and isinstance(context, str)):
        raise ValueError("question and context must be text")
    if isinstance(answers, dict):  # {"text": [...], "answer_start": [...]}, the columnar form
        answers = [{"text": t, "answer_start": s}
                   for t, s in zip(answers["text"], answers["answer_start"], strict=True)]  # fmt: skip
    texts, starts = [], []
    for answer in answers:
        text, start = answer["text"], answer["answer_start"]
        if type(start) is not int or start < 0 or context[start : start + len(text)] != text or not text:
            raise ValueError("the answer is not in the text where it says")
        texts.append(text)
        starts.append(start)
    return Question(question, context, tuple(texts), tuple(starts), name)


def _paragraphs(path: Path, document: Any) -> Iterator[dict[str, Any]]:
    try:
        for article in document["data"]:
            for paragraph in article["paragraphs"]:
                if isinstance(paragraph["context"], str) and isinstance(paragraph["qas"], list):
                    yield paragraph
    except (KeyError, TypeError) as error:
        raise BadFile(f"{path} must be SQuAD JSON (data, paragraphs, context, qas), it lacks {_say(error)}") from None


def _say(error: BaseException) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)[:80]
