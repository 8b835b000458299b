"""The loss of a chunk of scores, and its slope in the same memory: one pass while a row is in the cache."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadInput
from headwater.machine.library import function
from headwater.machine.pointers import floats, pointer


def slope_of_loss(scores: Tensor, labels: Tensor, smoothing: float) -> float:
    """The loss of a chunk of scores [N, V] with labels [N]; its slope then stands in the memory of the scores."""
    rows, vocab = scores.shape
    given = floats(scores, rows, vocab), pointer(labels, torch.int64, rows)
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < vocab:
        bad = next(label for label in labels.tolist() if not 0 <= label < vocab)
        raise BadInput(f"loss: labels must be from 0 to {vocab - 1}, got {bad}; use the tokenizer of this model")
    losses = torch.empty(rows, dtype=torch.float64)
    return float(_run()(*given, rows, vocab, smoothing, pointer(losses, torch.float64, rows)))


@lru_cache(maxsize=1)
def _run() -> Any:
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    return function("slope_of_loss", ctypes.c_double, pointer, pointer, whole, whole, ctypes.c_float, pointer)
