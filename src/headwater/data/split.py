"""Which examples are kept for validation: a function of their text, so that no run, order or machine changes it."""

from __future__ import annotations

import hashlib

from headwater.data.examples import Example, input_of
from headwater.errors import BadSetting


def fingerprint(text: str) -> int:
    """64 bits of a text, the same everywhere; lone surrogates count too."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def held_out(example: Example, share: float, seed: int = 0) -> bool:
    """True for about that share of the examples. Equal inputs fall on the same side, so a duplicate never leaks."""
    if not 0 <= share < 1:
        raise BadSetting(f"the share held out must be from 0 up to 1, got {share}; 0.05 is usual")
    return fingerprint(f"{seed}:{input_of(example)}") < share * 2**64


def tail(length: int, share: float, least: int = 1) -> int:
    """Where the held-out end of a running text begins: whole stretches, because neighbours give each other away."""
    kept = min(length - least, int(length * (1 - share)))
    if kept < least:
        raise BadSetting(f"a text of {length} tokens cannot be split with {least} on each side; give a longer text")
    return kept
