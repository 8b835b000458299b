"""Answers as spans of a text: long texts are read through windows that overlap by a stride.

<bos> question <eos> window of the text <eos>       kinds: 0 question, 1 text, 2 word that both have

The third kind says what would otherwise have to be learned from many questions: where the two texts meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headwater.data.examples import Question
from headwater.data.metrics.units import UNIT, UNSPACED, units
from headwater.data.objectives.lesson import Lesson, Marks
from headwater.data.objectives.texts import real
from headwater.data.ragged import Ragged
from headwater.errors import BadSetting
from headwater.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Window:
    """One view of a text with its question. Place 0 (<bos>) means: no answer here."""

    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    answer: tuple[int, int]  # first and last place
    spans: tuple[tuple[int, int], ...]  # characters of each place of the text
    start: int  # the place where the text begins


def windows(
    question: Question, tokenizer: Tokenizer, marks: Marks, width: int = 384, stride: int = 128
) -> list[Window]:
    """The views of one question; together they show every token of the text. The first answer is the one taught."""
    asked = tokenizer.encode(question.question, special=False)[: width // 2]
    text = tokenizer.align(question.context, special=False)
    room = width - len(asked) - 3
    if not 0 < stride <= room:
        raise BadSetting(
            f"a window of {width} leaves {room} tokens of text, so the stride must be 1 to {room}, got {stride}"
        )
    goal = token_span(text.spans, question)
    kinds_of_text = [1 + met for met in shared(text.spans, question)]
    found = []
    for first in range(0, max(1, len(text.ids) - room + stride), stride):
        last = min(first + room, len(text.ids))
        inside = goal is not None and first <= goal[0] and goal[1] < last
        start = len(asked) + 2
        answer = (goal[0] - first + start, goal[1] - first + start) if goal is not None and inside else (0, 0)
        ids = (marks.bos, *asked, marks.eos, *text.ids[first:last], marks.eos)
        kinds = (*(0,) * start, *kinds_of_text[first:last], 1)
        found.append(Window(ids, kinds, answer, tuple(text.spans[first:last]), start))
        if last == len(text.ids):
            break
    return found


def token_span(spans: Sequence[tuple[int, int]], question: Question) -> tuple[int, int] | None:
    """The first and last token of the first answer: those that hold its first and its last character."""
    if not question.answers:
        return None
    begin, end = question.starts[0], question.starts[0] + len(question.answers[0])
    held = [n for n, (a, b) in enumerate(spans) if a < end and b > begin]
    return (held[0], held[-1]) if held else None


def shared(spans: Sequence[tuple[int, int]], question: Question) -> list[bool]:
    """For each token of the text whether the question has its word (two characters, where words have no spaces).

    >>> shared([(0, 5), (6, 8), (8, 9)], Question("Which FOX jumps?", "Quick fox"))
    [False, True, True]
    """
    asked = units(question.question)
    met = np.zeros(len(question.context) + 1, bool)
    for size in (1, 2):  # single characters meet everywhere: of these, two in a row count
        wanted = set(zip(*(asked[i:] for i in range(size)), strict=False))
        found = list(UNIT.finditer(question.context))
        for run in zip(*(found[i:] for i in range(size)), strict=False):
            here = tuple(unit[0].lower() for unit in run)
            alone = size == 1 and re.fullmatch(UNSPACED, here[0])
            if here in wanted and not alone:
                met[run[0].start() : run[-1].end()] = True
    return [bool(met[a:b].any()) for a, b in spans]


def answered(found: Sequence[Window], marks: Marks) -> Lesson:
    """Windows as one lesson; targets [B, 2]."""
    rows, kinds = Ragged.of([w.ids for w in found], np.int64), Ragged.of([w.kinds for w in found], np.int64)
    targets = np.array([w.answer for w in found], np.int64)
    return Lesson(rows.padded(marks.pad), real(rows), targets, kinds=kinds.padded(0))


def said(context: str, window: Window, first: int, last: int) -> str:
    """The text between two places of a window, in whole words; '' for none."""
    if first < window.start or last < first or last >= window.start + len(window.spans):
        return ""
    begin, end = window.spans[first - window.start][0], window.spans[last - window.start][1]
    words = [found.span() for found in UNIT.finditer(context) if found.start() < end and found.end() > begin]
    return context[min([begin, *(a for a, _ in words)]) : max([end, *(b for _, b in words)])].strip()
