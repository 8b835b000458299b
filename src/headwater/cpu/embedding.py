"""Embedding lookup for training: the gradient of a large table is lazily mapped zeros plus the rows that were used."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.cpu import memory
from headwater.cpu.build import supported


def embedding_supported(weight: Tensor) -> bool:
    """Whether the gradient of this table should be mapped lazily: the table is large, and gradients are enabled."""
    return torch.is_grad_enabled() and supported(weight) and weight.nbytes >= memory.HUGE_PAGE_MIN_BYTES


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """weight[ids], whose gradient takes memory only for the rows that were looked up."""
    return _EmbeddingLookup.apply(ids, weight)


class _EmbeddingLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, memory.lazy_zeros(*ctx.shape).index_add_(0, ids.flatten(), grad_out.flatten(0, -2))
