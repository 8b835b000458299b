"""Losses: sums of -log p over the answers that count, and how many they are.

A sum and a count, never a mean: the loss of a step is sum / count over the whole step, however it was cut into batches,
rows or processes. N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.data.objectives.lesson import IGNORE
from headwater.machine import memory
from headwater.machine.library import serves
from headwater.machine.loss import slope_of_loss

CHUNK = 512  # tokens whose scores over the vocabulary exist at one time


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Σ over counted tokens of (1 - ε)·(-log p[label]) + ε·mean over V of (-log p). logits [..., V], labels [...]."""
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)


def counted(labels: Tensor) -> Tensor:
    """How many labels are asked."""
    return (labels != IGNORE).sum()


def vocabulary_loss(
    states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float = 0.0
) -> Tensor:
    """cross_entropy(states @ weightᵀ + bias, labels), but never more than CHUNK rows of scores exist.

    The gradient is worked out beside the loss, while a chunk's scores are at hand; what is not asked costs nothing.
    states [..., D], weight [V, D], labels [...].
    """
    where = (labels.flatten() != IGNORE).nonzero()[:, 0]
    asked = labels.flatten()[where]
    return _Chunked.apply(states.flatten(0, -2), weight, bias, where, asked, smoothing, torch.is_grad_enabled())


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        where: Tensor,
        asked: Tensor,
        smoothing: float,
        learning: bool,
    ) -> Tensor:
        kind = _working_dtype(states)
        table = weight.to(kind)
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        ctx.needed = [learning and need for need in ctx.needs_input_grad[:3]]
        shapes = (states, weight, bias)
        grads = [_zeros(t) if need and t is not None else None for need, t in zip(ctx.needed, shapes, strict=True)]
        chunk = _InPlace(len(where), len(table)) if serves(states, table) else _spelled_out
        for here, labels in zip(where.split(CHUNK), asked.split(CHUNK), strict=True):
            x = states[here].to(kind)
            loss, slope = chunk(x, table, None if bias is None else bias.to(kind), labels, smoothing)
            total += loss
            if any(ctx.needed):
                _collect(grads, slope, here, x, table)
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients are given away, scaled where they lie: a second copy of a table would be large."""
        if ctx.grads is None:
            raise RuntimeError("the loss over a vocabulary can be gone back through once; work it out again")
        grads, ctx.grads = ctx.grads, None
        return (*(None if grad is None else grad.mul_(upstream) for grad in grads), None, None, None, None)


def _zeros(t: Tensor) -> Tensor:
    return memory.empty(*t.shape).zero_() if serves(t) else torch.zeros_like(t)


def _working_dtype(states: Tensor) -> torch.dtype:
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _spelled_out(x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> tuple[Any, Tensor]:
    """The loss of some rows, and d loss / d scores = p - (1 - ε)·onehot(label) - ε/V in the memory of log p."""
    log_p = F.log_softmax(F.linear(x, table, bias).float(), 1, dtype=torch.float32)
    loss = -(1 - smoothing) * log_p.gather(1, labels[:, None]).sum()
    if smoothing:
        loss -= smoothing * log_p.mean(1).sum()
    slope = log_p.exp_()
    if smoothing:
        slope -= smoothing / slope.shape[1]
    slope.scatter_add_(1, labels[:, None], torch.full_like(labels[:, None], smoothing - 1, dtype=slope.dtype))
    return loss, slope


class _InPlace:
    """The same in C, in the memory of one chunk of scores, which all chunks share: fresh memory costs page faults."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.memory = memory.empty(min(rows, CHUNK), vocab)

    def __call__(
        self, x: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[float, Tensor]:
        scores = self.memory[: len(x)]
        torch.mm(x, table.T, out=scores) if bias is None else torch.addmm(bias, x, table.T, out=scores)
        return slope_of_loss(scores, labels, smoothing), scores


def _collect(grads: list[Tensor | None], slope: Tensor, here: Tensor, x: Tensor, table: Tensor) -> None:
    of_states, of_weight, of_bias = grads
    low = slope.to(table.dtype)
    if of_states is not None:
        of_states[here] = (low @ table).to(of_states.dtype)
    if of_weight is not None and of_weight.dtype == low.dtype:
        of_weight.addmm_(low.T, x)
    elif of_weight is not None:
        of_weight += low.T @ x
    if of_bias is not None:
        of_bias += slope.sum(0)


def span_loss(scores: Tensor, starts: Tensor, ends: Tensor, keep: Tensor | None = None) -> Tensor:
    """The mean of two choices of a place: where an answer starts, where it ends. scores [B, Q, 2], starts and ends [B].

    keep [B, Q]: the places that may be chosen.
    """
    scores = scores.float()
    if keep is not None:
        scores = scores.masked_fill(~keep[..., None], torch.finfo(scores.dtype).min)
    both = [
        F.cross_entropy(scores[..., i], at, ignore_index=IGNORE, reduction="sum") for i, at in ((0, starts), (1, ends))
    ]
    return (both[0] + both[1]) / 2
