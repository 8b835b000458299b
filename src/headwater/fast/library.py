"""The C of this folder: one decoding step, products with packed weights, the best few of a row of scores."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from headwater.machine import build

# Sums may be taken in any order; -ffast-math would also turn subnormal numbers off in the whole process.
SUMS = ("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Compiled, or None where this machine cannot have it (then machine.build.missing() says why)."""
    made = build.library(Path(__file__).parent, *SUMS)
    for name in ("step", "widen", "product", "best") if made else ():
        getattr(made, name).restype = None
    return made
