"""Memory: large blocks in large pages, and what is freed back to the system at once in runs that must be small."""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
HUGE_PAGES, PAGE = 14, 2**21  # of madvise, in Linux' mman.h
LARGE = 2**25  # bytes from which on the C library maps every block anew


def empty(*shape: int) -> Tensor:
    """torch.empty, and a large block in large pages.

    The system fills a page with zeros when it is first touched. In small ones a gradient or the scores of a large
    vocabulary, which come and go at every step, would cost more for that than for the numbers in them.
    """
    made = torch.empty(shape)
    if made.nbytes >= LARGE:
        first, end = -(-made.data_ptr() // PAGE) * PAGE, made.data_ptr() + made.nbytes
        _call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), HUGE_PAGES)
    return made


def zeros(*shape: int) -> Tensor:
    """torch.zeros, but what is never written takes no memory: to the system, zeros are no pages yet."""
    size = 4 * math.prod(shape)
    if not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones would be filled when read
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


def give_back(size: int = 2**20) -> bool:
    """From now on a block of `size` bytes and more is mapped by itself, and unmapped when it is freed.

    Tensors of many sizes come and go in a step; what lies free between those that stay is else a good part of the
    memory of a run. The price is fresh pages every time. Whether it could be done: only glibc has this switch.
    """
    return bool(_call("mallopt", MMAP_THRESHOLD, size))


def _call(name: str, *args: object) -> int:
    """A function of the C library; 0 where it has none of that name."""
    try:
        return int(getattr(ctypes.CDLL(None), name)(*args))
    except (OSError, TypeError, AttributeError):
        return 0
