"""What predictions without a model cost: bits a token of each stage, for tokens that were held out.

unigram   how often a token is, whatever came before
repeat    the token before it (of the same codebook) again, as often as in the training tokens, else unigram
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headwater.audiolm.voice import Voice
from headwater.variants.audiolm import STAGES, AudioTokens

SMOOTHING = 0.5  # added to every count


def baseline_bits(
    train: Sequence[Voice], held_out: Sequence[Voice], tokens: AudioTokens
) -> dict[str, dict[str, float]]:
    """Bits a token: baseline -> stage -> mean over the held-out tokens."""
    bits: dict[str, dict[str, float]] = {"unigram": {}, "repeat": {}}
    for stage in STAGES:
        size = tokens.semantic_codes if stage == "semantic" else tokens.codes
        columns = list(zip(_columns(train, stage, tokens), _columns(held_out, stage, tokens), strict=True))
        costs = [_column_bits(known, unknown, size) for known, unknown in columns]
        for n, name in enumerate(bits):
            bits[name][stage] = float(np.concatenate([cost[n] for cost in costs]).mean())
    return bits


def _columns(voices: Sequence[Voice], stage: str, tokens: AudioTokens) -> Iterator[list[np.ndarray]]:
    """The sequences of a stage, for each codebook those of all voices."""
    if stage == "semantic":
        yield [voice.semantic.numpy() for voice in voices]
        return
    books = range(tokens.coarse_books) if stage == "coarse" else range(tokens.coarse_books, tokens.books)
    for book in books:
        yield [voice.fine[:, book].numpy() for voice in voices]


def _column_bits(train: list[np.ndarray], held_out: list[np.ndarray], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bits of each held-out token, by the unigram and by the repeat baseline."""
    counts = np.bincount(np.concatenate(train), minlength=size) + SMOOTHING
    unigram = counts / counts.sum()
    repeats = sum(int((row[1:] == row[:-1]).sum()) for row in train)
    repeat_rate = (repeats + SMOOTHING) / (sum(len(row) - 1 for row in train) + 2 * SMOOTHING)

    flat = np.concatenate(held_out)
    same = np.concatenate([np.concatenate(([False], row[1:] == row[:-1])) for row in held_out])
    first = np.concatenate([np.arange(len(row)) == 0 for row in held_out])
    probs = np.where(first, 1.0, 1 - repeat_rate) * unigram[flat] + np.where(same, repeat_rate, 0.0)
    return -np.log2(unigram[flat]), -np.log2(probs)
