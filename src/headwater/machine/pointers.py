"""The only place where a tensor becomes an address for C: dtype, shape, strides and device are checked first.

C touches as many bytes as it is told to, whatever lies there. So whoever passes a tensor to C says which shape C will
read or write, and a tensor that does not have it never gets there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Misfit(ValueError):
    """A tensor that is not what C would read: an error of the caller, found before memory is touched."""


def pointer(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The address of a contiguous tensor of this dtype and shape in CPU memory."""
    _check(tensor, dtype, shape)
    if not tensor.is_contiguous():
        raise Misfit(f"C needs a contiguous tensor {list(shape)}, its strides are {list(tensor.stride())}")
    return tensor.data_ptr()


def strided_pointer(tensor: Tensor, dtype: torch.dtype, *shape: int) -> int:
    """The same for a tensor whose strides C is told."""
    _check(tensor, dtype, shape)
    return tensor.data_ptr()


def optional(tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
    """The same for a tensor that may be left out."""
    return None if tensor is None else pointer(tensor, dtype, *shape)


def floats(tensor: Tensor | None, *shape: int) -> int | None:
    """The same for float32, the dtype of nearly everything here."""
    return optional(tensor, torch.float32, *shape)


def _check(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu" or tensor.is_neg():
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device.type}"
        raise Misfit(f"C needs {dtype} {list(shape)} on the CPU, got {got}")
