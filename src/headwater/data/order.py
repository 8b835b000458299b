"""The order of examples: a keyed permutation of range(size), computed place by place.

A Feistel network shuffles the numbers of a power of four; walking along its cycle until a number below `size` comes
makes a permutation of exactly range(size). Which example stands at a place is thus a pure function of (seed, epoch,
place): no list is stored and no generator has a state, so the position in a run is one integer.
"""

from __future__ import annotations

import numpy as np

from headwater.data.chance import bits, scramble
from headwater.errors import BadInput

ROUNDS = 8  # four would do for looks; small sets need more to reach every order evenly


def example_at(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The examples at these places of the epoch; for all places together, each example exactly once.

    >>> sorted(example_at(np.arange(10), 10, seed=1, epoch=0).tolist()) == list(range(10))
    True
    """
    if size < 1:
        raise BadInput(f"an order needs at least one example, got {size}; check that the data is not empty")
    places = np.asarray(places)
    if places.size and (places.min() < 0 or places.max() >= size):
        raise BadInput(f"places must be from 0 to {size - 1}, got {places.min()} to {places.max()}")
    keys = bits(seed, epoch, "order", np.arange(ROUNDS))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    found = _feistel(places.astype(np.uint64), half, keys)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], half, keys)
    return found.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """A bijection of the numbers of 2 * half bits: each round adds a scrambled right half to the left, and swaps."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = x >> half, x & mask
    for key in keys:
        left, right = right, left ^ (scramble(right ^ key) & mask)
    return (left << half) | right
