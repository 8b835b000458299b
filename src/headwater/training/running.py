"""Running text as courses: one stream, whole documents packed into rows, or sentences in pairs; what is left for
validation is the end of it, in one stretch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from headwater.data.encode import encode_rows
from headwater.data.objectives.denoise import sentence_ends
from headwater.data.objectives.lesson import Marks
from headwater.data.ragged import Ragged
from headwater.data.split import tail
from headwater.errors import BadInput
from headwater.text.tokenizer import Tokenizer
from headwater.training.courses import Course, Denoising, Masked, MaskedNext, Packed, RunningText, SpanCorruption
from headwater.training.settings import Settings


class Taught(NamedTuple):
    train: Course
    valid: Course
    tokens: int
    notes: list[str]


# ------------------------------------------------------------------------------------------------------- one stream


def stream(kind: type[RunningText]) -> Callable[..., Taught]:
    """All documents end to end, an end mark between two of them, cut into rows anew in each epoch."""

    def made(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Taught:
        marks = Marks.of(tokenizer)
        ids, after = (_end_to_end(tokenizer, passages, marks) for passages in (train, valid))
        if not valid:
            cut = tail(len(ids), s.held_out or 0.05, least=2)
            ids, after = ids[:cut], ids[cut:]
        context = min(s.context, len(ids) - 1, len(after) - 1)
        courses = [kind(some, context, marks, s.batch_tokens, s.seed) for some in (ids, after)]
        for course in courses:
            if isinstance(course, Denoising):
                course.ends = sentence_ends(tokenizer)
        notes = [] if context == s.context else [f"the text is short: the context is {context} tokens"]
        return Taught(courses[0], courses[1], len(ids), notes)

    return made


def _end_to_end(tokenizer: Tokenizer, passages: Iterable[Any], marks: Marks) -> np.ndarray:
    whole: list[np.ndarray] = []
    last = None
    for passage in passages:
        if last is not None and passage.document != last:
            whole.append(np.array([marks.eos]))
        last = passage.document
        whole.append(encode_rows(tokenizer, [passage.text]).values)
    return np.concatenate(whole).astype(np.int32) if whole else np.zeros(0, np.int32)


# -------------------------------------------------------------------------------------------------- whole documents


def packed(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Taught:
    """Each document from <bos> to <eos>; one longer than the context is read in pieces."""
    marks = Marks.of(tokenizer)
    sides = [_documents(tokenizer, passages, marks, s.context) for passages in (train, valid)]
    if not valid:
        cut = _kept(len(sides[0]), s.held_out, "objective packed needs two documents (files, or rows of JSONL)")
        sides = [sides[0].take(np.arange(cut)), sides[0].take(np.arange(cut, len(sides[0])))]
    courses = [Packed(side, s.context, marks, s.batch_tokens, s.seed) for side in sides]
    return Taught(courses[0], courses[1], len(sides[0].values), [])


def _documents(tokenizer: Tokenizer, passages: Iterable[Any], marks: Marks, context: int) -> Ragged:
    texts: dict[int, list[str]] = {}
    for passage in passages:
        texts.setdefault(passage.document, []).append(passage.text)
    whole = encode_rows(tokenizer, map("".join, texts.values())).wrapped([marks.bos], [marks.eos])
    starts = [np.arange(a, b, context) for a, b in zip(whole.offsets[:-1], whole.offsets[1:], strict=True)]
    return Ragged(whole.values, np.append(np.concatenate([np.zeros(0, np.int64), *starts]), whole.offsets[-1]))


# ------------------------------------------------------------------------------------------------ sentences in pairs


def sentence_pairs(s: Settings, tokenizer: Tokenizer, train: Sequence[Any], valid: Sequence[Any]) -> Taught:
    """A sentence a line, a blank line between documents; a sentence has at most half of the context."""
    marks, most = Marks.of(tokenizer), (s.context - 3) // 2
    sides = [_sentences(passages) for passages in (train, valid)]
    if not valid:
        texts, numbers = sides[0]
        last = int(numbers[-1]) + 1 if len(numbers) else 0
        cut = _kept(last - 1, s.held_out, "objective masked-next needs four documents, a blank line between")
        at = int(np.searchsorted(numbers, min(cut, last - 2)))  # two documents at least on each side
        sides = [(texts[:at], numbers[:at]), (texts[at:], numbers[at:])]
    rows = [encode_rows(tokenizer, texts).cut(most) for texts, _ in sides]
    courses = [MaskedNext(ids, numbers, marks, s.batch_tokens, s.seed)
               for ids, (_, numbers) in zip(rows, sides, strict=True)]  # fmt: skip
    return Taught(courses[0], courses[1], len(rows[0].values), [])


def _sentences(passages: Iterable[Any]) -> tuple[list[str], np.ndarray]:
    """Sentences, and the number of the document of each, from 0."""
    texts, numbers, number, last = list[str](), list[int](), 0, None
    for passage in passages:
        number += last is not None and passage.document != last and bool(numbers) and numbers[-1] == number
        last = passage.document
        for line in passage.text.splitlines():
            if line.strip():
                texts.append(line.strip())
                numbers.append(number)
            else:
                number += bool(numbers) and numbers[-1] == number
    return texts, np.array(numbers, np.int64)


def _kept(size: int, share: float, law: str) -> int:
    """How many of `size` are learned from: all but a share, and at least one on each side."""
    if size < 2:
        raise BadInput(f"{law}, there are too few; give more text, or --objective causal or masked")
    return min(size - 1, max(1, int(size * (1 - (share or 0.05)))))


TEXTS: dict[str, Callable[..., Taught]] = {
    "causal": stream(RunningText), "packed": packed, "masked": stream(Masked), "masked-next": sentence_pairs,
    "denoise": stream(Denoising), "spans": stream(SpanCorruption)}  # fmt: skip
