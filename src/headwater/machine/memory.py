"""What becomes of freed memory: kept, for speed, or at once back to the system, for runs that must be small."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # of mallopt, in glibc's malloc.h


def give_back(size: int = 2**20) -> bool:
    """From now on a block of `size` bytes and more is mapped by itself, and unmapped when it is freed.

    Tensors of many sizes come and go in a step; what lies free between those that stay is else a good part of the
    memory of a run. The price is fresh pages every time. Whether it could be done: only glibc has this switch.
    """
    return _set(MMAP_THRESHOLD, size)


def keep() -> bool:
    """From now on every freed block stays with the process, for the next one of its size.

    A vocabulary's gradient and scores, larger than what the C library keeps by itself, come and go at every step:
    mapped anew, each of their pages is filled with zeros by the system at its first touch.
    """
    return _set(MMAP_MAX, 0) and _set(TRIM_THRESHOLD, 2**31 - 1)


def _set(switch: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(switch, value))
    except (OSError, TypeError, AttributeError):
        return False
