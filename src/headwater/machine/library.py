"""The C of this folder as Python functions, and which tensors it serves: float32 on a CPU with a compiler."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.machine.build import library


@lru_cache(maxsize=1)
def compiled() -> ctypes.CDLL | None:
    return library(Path(__file__).parent)


def serves(*tensors: Tensor) -> bool:
    """float32 on this processor, and nobody compiles or counts what torch does. If not, torch does the work."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or not all(
            type(t) in (Tensor, torch.nn.Parameter) and t.dtype == torch.float32 and t.device.type == "cpu"
            for t in tensors
        )
    ):
        return False
    return compiled() is not None


def function(name: str, gives: Any, *takes: Any) -> Any:
    """One function of the library, with the kinds of its arguments."""
    found = getattr(compiled(), name)
    found.restype, found.argtypes = gives, takes
    return found
