"""Memory allocation: huge pages (madvise), lazily mapped zeros, and returning freed memory to the system (mallopt)."""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
from torch import Tensor

M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
MADV_HUGEPAGE = 14  # of madvise, in Linux' mman.h
HUGE_PAGE_SIZE = 2**21
HUGE_PAGE_MIN_BYTES = 2**25  # from this size on the C library maps every block by itself


def empty_huge_pages(*shape: int) -> Tensor:
    """torch.empty with huge pages for a large block.

    The system fills a page with zeros when it is first touched. In small pages that would cost more than the
    computation, for a gradient or the logits of a large vocabulary, which are allocated at every step.
    """
    tensor = torch.empty(shape)
    if tensor.nbytes >= HUGE_PAGE_MIN_BYTES:
        first = -(-tensor.data_ptr() // HUGE_PAGE_SIZE) * HUGE_PAGE_SIZE
        end = tensor.data_ptr() + tensor.nbytes
        _libc_call("madvise", ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_HUGEPAGE)
    return tensor


def lazy_zeros(*shape: int) -> Tensor:
    """torch.zeros whose pages are mapped lazily: what is never written takes no memory."""
    size = 4 * math.prod(shape)
    if not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones would be filled when read
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)


def return_freed_memory(size: int = 2**20) -> bool:
    """From now on map every block of `size` bytes and more by itself, and unmap it when it is freed (mallopt).

    Tensors of many sizes are allocated and freed in a step; the gaps between those that stay would be a good part of
    the memory of a run. The price is fresh pages every time. Returns whether it worked: only glibc has this setting.
    """
    return bool(_libc_call("mallopt", M_MMAP_THRESHOLD, size))


def _libc_call(name: str, *args: object) -> int:
    """Call a function of the C library; 0 where it has none of that name."""
    try:
        return int(getattr(ctypes.CDLL(None), name)(*args))
    except (OSError, TypeError, AttributeError):
        return 0
