"""Chance without state: every number is a function of words such as (seed, epoch, index, purpose, place).

Nothing is drawn in sequence, so nothing has to be saved: a run resumed anywhere meets the same numbers, on any number
of processes, in any batch. The function is the splitmix64 finaliser folded over the words.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np

Words: TypeAlias = "int | str | np.ndarray"

_STEP, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def scramble(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit numbers in which every bit of the input moves half the bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def bits(*words: Words) -> np.ndarray:
    """64 bits for each combination of the words; arrays among them broadcast against each other."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = scramble((state ^ _number(word)) + _STEP)
    return state if any(isinstance(w, np.ndarray) and w.ndim for w in words) else state.reshape(())


def uniform(*words: Words) -> np.ndarray:
    """Numbers from 0 up to 1, 53 bits of each."""
    return (bits(*words) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(limit: int, *words: Words) -> np.ndarray:
    """Whole numbers from 0 to limit - 1. The bias is limit / 2**53, far below what any data can show."""
    return (uniform(*words) * limit).astype(np.int64)


def shuffle(count: int, *words: Words) -> np.ndarray:
    """A permutation of range(count), for small counts held in memory."""
    return np.argsort(bits(*words, np.arange(count)), kind="stable")


def _number(word: Words) -> np.ndarray:
    if isinstance(word, str):
        return np.frombuffer(hashlib.blake2b(word.encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    if isinstance(word, np.ndarray):
        return word.astype(np.uint64)
    return np.array([word % 2**64], np.uint64)
