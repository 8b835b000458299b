"""Loss functions: cross-entropy with label smoothing, chunked over a large vocabulary; of answer spans; contrastive.

Each is a sum over targets, never a mean: the loss of a step is sum / count over the global batch, however it is split
into micro-batches and ranks. N tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headwater.cpu import memory
from headwater.cpu.build import supported
from headwater.cpu.loss import cross_entropy_grad_
from headwater.data.collate import IGNORE_INDEX

CHUNK_ROWS = 512  # tokens whose logits over the vocabulary exist at one time
RECOMPUTED_ROWS = 128  # the same where the backward pass computes them again, with several tensors of their size


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Σ over counted tokens of (1 - ε)·(-log p[label]) + ε·mean over V of (-log p). logits [..., V], labels [...]."""
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(
        flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )


def count_targets(labels: Tensor) -> Tensor:
    """The number of labels that are not IGNORE_INDEX."""
    return (labels != IGNORE_INDEX).sum()


def chunked_cross_entropy(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """cross_entropy(hidden_states @ weightᵀ + bias, labels) without ever holding more than CHUNK_ROWS rows of logits.

    The gradient is computed beside the loss, while the logits of a chunk exist; ignored labels cost nothing.
    hidden_states [..., D], weight [V, D], labels [...].
    """
    rows = (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    targets = labels.flatten()[rows]
    return _ChunkedCE.apply(
        hidden_states.flatten(0, -2), weight, bias, rows, targets, label_smoothing, torch.is_grad_enabled()
    )


def recomputed_cross_entropy(
    hidden_states: Tensor, out: nn.Module, labels: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """cross_entropy(out(hidden_states), labels) of an output layer that is quantized or has an adapter.

    The logits of a chunk are computed again in the backward pass; ignored labels cost nothing.
    """

    def chunk_loss(x: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(out(x), targets, label_smoothing)

    counted = labels != IGNORE_INDEX
    chunks = zip(hidden_states[counted].split(RECOMPUTED_ROWS), labels[counted].split(RECOMPUTED_ROWS), strict=True)
    losses = [checkpoint(chunk_loss, x, targets, use_reentrant=False) for x, targets in chunks]
    return torch.stack(losses).sum()


class _ChunkedCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        label_smoothing: float,
        grad_enabled: bool,
    ) -> Tensor:
        dtype = _compute_dtype(hidden_states)
        table = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
        ctx.needed = [grad_enabled and need for need in ctx.needs_input_grad[:3]]
        shapes = (hidden_states, weight, bias)
        grads = [_zeros_like(t) if need and t is not None else None for need, t in zip(ctx.needed, shapes, strict=True)]
        chunk = _NativeChunk(len(rows), len(table)) if supported(hidden_states, table) else _eager_chunk
        for here, labels in zip(rows.split(CHUNK_ROWS), targets.split(CHUNK_ROWS), strict=True):
            x = hidden_states[here].to(dtype)
            loss, grad_logits = chunk(x, table, None if bias is None else bias.to(dtype), labels, label_smoothing)
            total += loss
            if any(ctx.needed):
                _accumulate_grads(grads, grad_logits, here, x, table)
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients are scaled in place and handed over: a second copy of a table would be large."""
        if ctx.grads is None:
            raise RuntimeError("the loss over a vocabulary can be gone back through once; work it out again")
        grads, ctx.grads = ctx.grads, None
        return (*(None if grad is None else grad.mul_(grad_output) for grad in grads), None, None, None, None)


def _zeros_like(t: Tensor) -> Tensor:
    return memory.empty_huge_pages(*t.shape).zero_() if supported(t) else torch.zeros_like(t)


def _compute_dtype(hidden_states: Tensor) -> torch.dtype:
    device = hidden_states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_states.dtype


def _eager_chunk(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float
) -> tuple[Any, Tensor]:
    """The loss of some rows, and d loss / d logits = p - (1 - ε)·onehot(label) - ε/V in the memory of log p."""
    log_p = F.log_softmax(F.linear(x, weight, bias).float(), 1, dtype=torch.float32)
    loss = -(1 - label_smoothing) * log_p.gather(1, labels[:, None]).sum()
    if label_smoothing:
        loss -= label_smoothing * log_p.mean(1).sum()
    grad_logits = log_p.exp_()
    if label_smoothing:
        grad_logits -= label_smoothing / grad_logits.shape[1]
    grad_logits.scatter_add_(
        1, labels[:, None], torch.full_like(labels[:, None], label_smoothing - 1, dtype=grad_logits.dtype)
    )
    return loss, grad_logits


class _NativeChunk:
    """The same in C, in one buffer of logits that all chunks share: fresh memory costs page faults."""

    def __init__(self, rows: int, vocab: int) -> None:
        self.logits_buffer = memory.empty_huge_pages(min(rows, CHUNK_ROWS), vocab)

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, label_smoothing: float
    ) -> tuple[float, Tensor]:
        logits = self.logits_buffer[: len(x)]
        torch.mm(x, weight.T, out=logits) if bias is None else torch.addmm(bias, x, weight.T, out=logits)
        return cross_entropy_grad_(logits, labels, label_smoothing), logits


def _accumulate_grads(grads: list[Tensor | None], grad_logits: Tensor, rows: Tensor, x: Tensor, weight: Tensor) -> None:
    grad_hidden, grad_weight, grad_bias = grads
    grad_low = grad_logits.to(weight.dtype)
    if grad_hidden is not None:
        grad_hidden[rows] = (grad_low @ weight).to(grad_hidden.dtype)
    if grad_weight is not None and grad_weight.dtype == grad_low.dtype:
        grad_weight.addmm_(grad_low.T, x)
    elif grad_weight is not None:
        grad_weight += grad_low.T @ x
    if grad_bias is not None:
        grad_bias += grad_logits.sum(0)


def span_loss(logits: Tensor, starts: Tensor, ends: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Span loss: the mean cross-entropy of the start and end position. logits [B, Q, 2], starts and ends [B].

    attention_mask [B, Q]: the positions that may be chosen.
    """
    logits = logits.float()
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask[..., None], torch.finfo(logits.dtype).min)
    both = [
        F.cross_entropy(logits[..., i], at, ignore_index=IGNORE_INDEX, reduction="sum")
        for i, at in ((0, starts), (1, ends))
    ]
    return (both[0] + both[1]) / 2


def contrastive_loss(logits: Tensor, positives: Tensor) -> Tensor:
    """The loss of CLIP, Σ over rows of the mean of both directions, where a row may have several positives.

    -Σ_j P_ij log softmax_j(logits_ij), P_ij = positives_ij / Σ_j positives_ij, over texts and over images.
    logits, positives [T, I]. A caption that two images have, or an image with two captions, is no negative.
    """
    targets = positives.float()
    logits = logits.float()
    per_text = -(targets / targets.sum(1, keepdim=True) * logits.log_softmax(1)).sum()
    per_image = -(targets / targets.sum(0, keepdim=True) * logits.log_softmax(0)).sum()
    return (per_text + per_image) / 2
