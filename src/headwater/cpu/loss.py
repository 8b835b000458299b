"""Reductions over the vocabulary: cross-entropy with its gradient in place, and top-k log-probabilities."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.cpu.build import bind, checked_ptr, decode_library, float_ptr
from headwater.cpu.decode import MAX_SIZE
from headwater.errors import BadInput
from headwater.i18n import _

# ------------------------------------------------------------------------------------- cross-entropy with its gradient


def cross_entropy_grad_(logits: Tensor, labels: Tensor, label_smoothing: float) -> float:
    """Cross-entropy (sum) of logits [N, V] with labels [N]; the gradient replaces the logits, in their memory."""
    rows, vocab = logits.shape
    inputs = float_ptr(logits, rows, vocab), checked_ptr(labels, torch.int64, rows)
    if rows and not 0 <= int(labels.min()) <= int(labels.max()) < vocab:
        bad = next(label for label in labels.tolist() if not 0 <= label < vocab)
        raise BadInput(
            _(
                "loss: labels must be from 0 to {vocab}, got {bad}; use the tokenizer of this model",
                vocab=vocab - 1,
                bad=bad,
            )
        )
    losses = torch.empty(rows, dtype=torch.float64)
    return float(_kernel()(*inputs, rows, vocab, label_smoothing, checked_ptr(losses, torch.float64, rows)))


@lru_cache(maxsize=1)
def _kernel() -> Any:
    pointer = ctypes.c_void_p
    integer = ctypes.c_int64
    return bind("cross_entropy_grad", ctypes.c_double, pointer, pointer, integer, integer, ctypes.c_float, pointer)


# --------------------------------------------------------------------------- top-k log-probabilities, without a sort


class TopKLogprobs(NamedTuple):
    """Top-k log-probabilities and ids [B][k], best first (of equals, the smaller id); logsumexp [B] of the logits."""

    logprobs: list[list[float]]
    ids: list[list[int]]
    logsumexp: list[float]


def topk_logprobs(logits: Tensor, k: int) -> TopKLogprobs:
    """Top-k log-probabilities of logits [B, V], V at least k. A row with a NaN or inf has NaN as logsumexp."""
    library = decode_library()
    rows, vocab = logits.shape
    native = (
        library is not None
        and logits.dtype == torch.float32
        and logits.device.type == "cpu"
        and not logits.requires_grad
        and 0 < k <= vocab < MAX_SIZE
        and 0 < rows < MAX_SIZE
    )
    if library is None or not native:
        return _eager_topk(logits, k)

    logits = logits.contiguous()
    values = torch.empty(rows, k)
    ids = torch.empty(rows, k, dtype=torch.int32)
    logsumexp = torch.empty(rows)
    outputs = float_ptr(values, rows, k), checked_ptr(ids, torch.int32, rows, k), float_ptr(logsumexp, rows)
    library.topk_logprobs(
        ctypes.c_void_p(float_ptr(logits, rows, vocab)),
        rows,
        vocab,
        k,
        *map(ctypes.c_void_p, outputs),
        torch.get_num_threads(),
    )
    return _to_result(values, ids, logsumexp)


def _eager_topk(logits: Tensor, k: int) -> TopKLogprobs:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    logsumexp = torch.where(logits.amax(-1).isfinite(), logits.logsumexp(-1), torch.nan)
    return _to_result(logits.gather(1, order), order, logsumexp)


def _to_result(values: Tensor, ids: Tensor, logsumexp: Tensor) -> TopKLogprobs:
    return TopKLogprobs((values - logsumexp[:, None]).tolist(), ids.tolist(), logsumexp.tolist())
