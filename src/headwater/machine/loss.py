"""The loss of a chunk of scores, and its slope in the same memory: one pass while a row is in the cache."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwater.machine.library import function


def slope_of_loss(scores: Tensor, labels: Tensor, smoothing: float) -> float:
    """The loss of a chunk of scores [N, V] with labels [N]; its slope then stands in the memory of the scores."""
    losses = torch.empty(len(labels), dtype=torch.float64)
    return float(_run()(scores.data_ptr(), labels.data_ptr(), *scores.shape, smoothing, losses.data_ptr()))


@lru_cache(maxsize=1)
def _run() -> Any:
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    return function("slope_of_loss", ctypes.c_double, pointer, pointer, whole, whole, ctypes.c_float, pointer)
