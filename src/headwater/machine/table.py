"""A table of rows for training: the gradient of a large one is zeros but for the few rows that were looked up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.machine import memory
from headwater.machine.library import serves


class Table(nn.Embedding):
    """rows[ids]"""

    def forward(self, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled() and serves(self.weight) and self.weight.nbytes >= memory.LARGE:
            return _Rows.apply(ids, self.weight)
        return F.embedding(ids, self.weight)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, memory.zeros(*ctx.shape).index_add_(0, ids.flatten(), above.flatten(0, -2))
