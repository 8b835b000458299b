"""Which examples are kept for validation: a function of their text, so that no run, order or machine changes it."""

from __future__ import annotations

import hashlib

import numpy as np

from headwater.data.examples import Example, input_of
from headwater.errors import BadSetting


def fingerprint(text: str) -> int:
    """64 bits of a text, the same everywhere; lone surrogates count too."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def place(example: Example, seed: int = 0) -> int:
    """Where an example lies in [0, 2⁶⁴). Equal inputs lie at one place."""
    return fingerprint(f"{seed}:{input_of(example)}")


def held_out(places: np.ndarray, share: float) -> np.ndarray:
    """True for those that lie lowest, about that share of them; of few examples at least one input, and never all.

    Equal inputs fall on the same side, so a duplicate never leaks.

    >>> held_out(np.array([7, 2**63, 7, 2**64 - 1], dtype=np.uint64), 0.05)
    array([ True, False,  True, False])
    """
    if not 0 <= share < 1:
        raise BadSetting(f"the share held out must be from 0 up to 1, got {share}; 0.05 is usual")
    inside: np.ndarray = places < np.uint64(int(share * 2**64))
    if inside.any() and not inside.all():
        return inside
    lowest = places == places.min(initial=2**64 - 1)
    return lowest & ~lowest.all()


def tail(length: int, share: float, least: int = 1) -> int:
    """Where the held-out end of a running text begins: whole stretches, because neighbours give each other away."""
    kept = min(length - least, int(length * (1 - share)))
    if kept < least:
        raise BadSetting(f"a text of {length} tokens cannot be split with {least} on each side; give a longer text")
    return kept
