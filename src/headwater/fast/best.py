"""The best few of each row of scores, without sorting or normalising the rest."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.fast.contract import MOST
from headwater.fast.library import library
from headwater.machine.pointers import floats, pointer


class Best(NamedTuple):
    """logprobs and ids [B][count], best first (of equals, the smaller id); mass [B], log Σ exp of the row's scores."""

    logprobs: list[list[float]]
    ids: list[list[int]]
    mass: list[float]


def best(scores: Tensor, count: int) -> Best:
    """scores [B, V], V at least count. A row with a NaN or an inf in it has a NaN for its mass."""
    lib, plain = library(), scores.dtype == torch.float32 and scores.device.type == "cpu"
    rows, vocab = scores.shape
    if lib is None or not plain or scores.requires_grad or not 0 < count <= vocab < MOST or not 0 < rows < MOST:
        return _plainly(scores, count)
    scores = scores.contiguous()
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int32)
    mass = torch.empty(rows)
    given = floats(scores, rows, vocab)
    made = floats(values, rows, count), pointer(ids, torch.int32, rows, count), floats(mass, rows)
    lib.best(ctypes.c_void_p(given), rows, vocab, count, *map(ctypes.c_void_p, made), torch.get_num_threads())
    return _told(values, ids, mass)


def _plainly(scores: Tensor, count: int) -> Best:
    wide = scores if scores.dtype == torch.float64 else scores.float()
    order = wide.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    mass = wide.logsumexp(-1)
    return _told(wide.gather(1, order), order, torch.where(wide.amax(-1).isfinite(), mass, torch.nan))


def _told(values: Tensor, ids: Tensor, mass: Tensor) -> Best:
    return Best((values - mass[:, None]).tolist(), ids.tolist(), mass.tolist())
