"""Denoising (BART): sentences in another order, spans of text under one mask; the model writes the text as it was."""

from __future__ import annotations

import math

import numpy as np

from headwater.data.chance import shuffle, uniform
from headwater.data.objectives.lesson import Lesson, Marks
from headwater.data.objectives.texts import seq2seq
from headwater.data.ragged import Ragged
from headwater.errors import BadSetting
from headwater.text.tokenizer import Tokenizer

RATE, MEAN = 0.3, 3.0
ENDS = (".", "!", "?", "。", "！", "？", "\n")
POISSON = np.cumsum([math.exp(-MEAN) * MEAN**k / math.factorial(k) for k in range(20)])


def denoised(texts: Ragged, marks: Marks, ends: np.ndarray, index: np.ndarray, seed: int, epoch: int) -> Lesson:
    """The lesson of text to text, from spoiled texts to the texts."""
    if marks.mask < 0:
        raise BadSetting("denoising needs a tokenizer with a mask token; learn one, or choose another")
    spoiled = [infill(permute(texts[i], ends, seed, epoch, int(n)), marks.mask, seed, epoch, int(n))
               for i, n in enumerate(index)]  # fmt: skip
    return seq2seq(Ragged.of(spoiled, np.int64), texts, marks)


def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
    """The ids of pieces that end a sentence."""
    return np.array([n for n in range(len(tokenizer)) if tokenizer.piece(n).endswith(ENDS)], np.int64)


def permute(ids: np.ndarray, ends: np.ndarray, seed: int, epoch: int, index: int) -> np.ndarray:
    """The sentences of a text in another order; a sentence goes up to and with a token of `ends`."""
    sentences = np.split(ids, np.flatnonzero(np.isin(ids[:-1], ends)) + 1)
    return np.concatenate([sentences[i] for i in shuffle(len(sentences), seed, epoch, index, "sentences")])


def infill(ids: np.ndarray, mask: int, seed: int, epoch: int, index: int) -> np.ndarray:
    """About RATE of the tokens under masks, a Poisson(MEAN) span under each; a span of none inserts a mask."""
    budget = round(RATE * len(ids))
    lengths = np.searchsorted(POISSON, uniform(seed, epoch, index, "span", np.arange(len(ids))))
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), budget) + 1] if budget else lengths[:0]
    if budget:
        lengths[-1] -= int(lengths.sum()) - budget  # the last span takes what is left
    kept = len(ids) - int(lengths.sum())
    gaps = np.sort((uniform(seed, epoch, index, "gap", np.arange(len(lengths))) * (kept + 1)).astype(np.int64))
    starts = gaps + np.cumsum(lengths) - lengths  # spans lie between the kept tokens, in order
    out, last = [], 0
    for start, length in zip(starts, lengths, strict=True):
        out += [ids[last:start], [mask]]
        last = start + length
    return np.concatenate([*out, ids[last:]]).astype(np.int64)
