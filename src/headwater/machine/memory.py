"""Freed memory back to the system at once, for runs that must be small: the C library otherwise keeps it for later."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h


def give_back(size: int = 2**20) -> bool:
    """From now on a block of `size` bytes and more is mapped by itself, and unmapped when it is freed.

    Tensors of many sizes come and go in a step; what lies free between those that stay is else a good part of the
    memory of a run. The price is fresh pages every time. Whether it could be done: only glibc has this switch.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, size))
    except (OSError, TypeError, AttributeError):
        return False
