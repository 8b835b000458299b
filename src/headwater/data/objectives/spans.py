"""Span corruption (T5): spans are replaced by sentinels; the target lists each sentinel with what it hid.

text     Thank you for inviting me to your party last week
input    Thank you <0> me to your party <1> week <eos>
target   <0> for inviting <1> last <2> <eos>
"""

from __future__ import annotations

import numpy as np

from headwater.data.chance import bits
from headwater.data.objectives.lesson import Lesson, Marks
from headwater.data.objectives.texts import seq2seq
from headwater.data.ragged import Ragged
from headwater.errors import BadInput, BadSetting

RATE, MEAN = 0.15, 3.0


def corrupted(texts: Ragged, marks: Marks, index: np.ndarray, seed: int, epoch: int) -> Lesson:
    """The lesson of text to text, from corrupted texts to what they lack."""
    sides = [corrupt(texts[i], marks.sentinels, seed, epoch, int(n)) for i, n in enumerate(index)]
    sources, targets = (Ragged.of(side, np.int64) for side in zip(*sides, strict=True))
    return seq2seq(sources, targets, marks)


def corrupt(
    ids: np.ndarray, sentinels: tuple[int, ...], seed: int, epoch: int, index: int
) -> tuple[np.ndarray, np.ndarray]:
    """(input, target) of one text: about RATE of it hidden, in spans of MEAN tokens on average."""
    hidden = noise_spans(len(ids), seed, epoch, index)
    starts = hidden & ~np.concatenate([[False], hidden[:-1]])
    spans = int(starts.sum())
    if spans + 1 > len(sentinels):
        raise BadSetting(f"a text of {len(ids)} tokens needs {spans + 1} sentinels, there are {len(sentinels)}; "
                         "learn a tokenizer with more, or cut the texts")  # fmt: skip
    marks = np.array(sentinels)
    source = np.where(starts, marks[np.cumsum(starts) - 1], ids)[~hidden | starts]
    target = np.insert(ids[hidden].astype(np.int64), np.flatnonzero(starts[hidden]), marks[:spans])
    return source, np.append(target, marks[spans])


def restore(source: np.ndarray, target: np.ndarray, sentinels: tuple[int, ...]) -> np.ndarray:
    """The text again, from the corrupted one and what it lacks. The inverse of corrupt."""
    is_mark = np.isin(target, sentinels)
    parts = np.split(target[~is_mark], np.cumsum(~is_mark)[is_mark][1:])
    filling = dict(zip(target[is_mark].tolist(), parts, strict=False))
    pieces = [filling.get(int(n), np.array([n])) for n in source]
    return np.concatenate(pieces) if pieces else source


def noise_spans(length: int, seed: int, epoch: int, index: int) -> np.ndarray:
    """[L] True where hidden: kept and hidden stretches in turn, each at least one token, a kept one first."""
    if length < 2:
        raise BadInput(f"a text must have at least 2 tokens to hide one, got {length}; leave such texts out")
    noise = min(max(round(length * RATE), 1), length - 1)
    spans = min(max(round(noise / MEAN), 1), noise, length - noise)
    hidden = _parts(noise, spans, seed, epoch, index, "hidden")
    kept = _parts(length - noise, spans, seed, epoch, index, "kept")
    return np.repeat(np.tile([False, True], spans), np.stack([kept, hidden], 1).ravel())


def _parts(total: int, parts: int, *words: int | str) -> np.ndarray:
    """`parts` whole numbers of at least 1 that sum to `total`, every such row of numbers equally likely."""
    edges = np.sort(np.argsort(bits(*words, np.arange(total - 1)), kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], edges, [total]]))
