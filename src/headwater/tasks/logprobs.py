"""Log-probabilities of given tokens, per token and per row, with a gradient, in chunks over a large vocabulary.

N tokens, D width, V vocabulary. The backward pass computes the logits of a chunk again, so that no more than CHUNK_ROWS
rows of them exist at one time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX
from headwater.tasks.batch import TensorBatch, forward_hidden
from headwater.tasks.losses import CHUNK_ROWS, RECOMPUTED_ROWS
from headwater.tuning.paths import LINEAR_TYPES


def target_logprobs(model: Transformer, batch: TensorBatch, temperature: float = 1.0) -> Tensor:
    """[B, Q] log-probability of the target at each position; 0 where there is none."""
    hidden_states, inputs = forward_hidden(model, batch)
    return head_logprobs(language_head(model), hidden_states, inputs, batch["targets"], temperature)


def language_head(model: Transformer) -> nn.Module:
    """The language-model head, also where the model has several heads."""
    heads = model.head
    return heads["lm"] if isinstance(heads, nn.ModuleDict) else heads


def head_logprobs(
    head: Any, hidden_states: Tensor, inputs: ModelInputs, targets: Tensor, temperature: float = 1.0
) -> Tensor:
    """[B, Q] log softmax(logits / temperature)[target]; 0 at positions without a target. hidden_states [B, Q, D]."""
    has_target = targets != IGNORE_INDEX
    out = hidden_states.new_zeros(targets.shape, dtype=torch.float32)
    labels = targets[has_target]
    layer = getattr(head, "out", None)
    if not isinstance(layer, LINEAR_TYPES):  # a head that is more than a matrix computes its own logits
        chosen = _logprobs(head(hidden_states, inputs)[has_target], labels, temperature)
    elif type(layer) is nn.Linear:
        x = head.transform(hidden_states)[has_target] * (head.scale / temperature)
        bias = None if layer.bias is None else layer.bias / temperature
        chosen = _ChunkedLogprobs.apply(x, layer.weight, bias, labels)
    else:
        chosen = _recomputed_logprobs(
            head.transform(hidden_states)[has_target] * head.scale, layer, labels, temperature
        )
    return out.masked_scatter(has_target, chosen)


def _logprobs(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """[N] of logits [N, V]"""
    return torch.log_softmax(logits.float() / temperature, -1).gather(1, labels[:, None])[:, 0]


def _recomputed_logprobs(x: Tensor, out: nn.Module, labels: Tensor, temperature: float) -> Tensor:
    """[N] of an output layer that is quantized or has an adapter: the backward pass computes the logits again."""

    def chunk_logprobs(rows: Tensor, targets: Tensor) -> Tensor:
        return _logprobs(out(rows), targets, temperature)

    chunks = zip(x.split(RECOMPUTED_ROWS), labels.split(RECOMPUTED_ROWS), strict=True)
    return torch.cat([checkpoint(chunk_logprobs, rows, targets, use_reentrant=False) for rows, targets in chunks])


def sum_rows(logprobs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """[B] the log-probability of each row's targets, and their number."""
    return logprobs.sum(1), (targets != IGNORE_INDEX).sum(1)


class _ChunkedLogprobs(torch.autograd.Function):
    """x [N, D], weight [V, D], bias [V] or None, labels [N] -> log softmax(x weightᵀ + bias)[label] [N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        out = torch.empty(len(x), dtype=torch.float32, device=x.device)
        normalizers = torch.empty_like(out)
        for start in range(0, len(x), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = nn.functional.linear(x[rows], weight, bias).float()
            normalizers[rows] = logits.logsumexp(1)
            out[rows] = logits.gather(1, labels[rows, None])[:, 0] - normalizers[rows]
        ctx.save_for_backward(x, weight, bias, labels, normalizers)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot(label) - p, for each row times its own gradient."""
        x, weight, bias, labels, normalizers = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _labels = ctx.needs_input_grad
        grad_x = torch.zeros_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_bias else None
        for start in range(0, len(x), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = nn.functional.linear(x[rows], weight, bias).float()
            grad_logits = (logits - normalizers[rows, None]).exp_().neg_()
            grad_logits.scatter_add_(1, labels[rows, None], torch.ones_like(labels[rows, None], dtype=logits.dtype))
            grad_logits *= grad_output[rows, None]
            grad_logits = grad_logits.to(weight.dtype)
            if grad_x is not None:
                grad_x[rows] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.T, x[rows])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
        return grad_x, grad_weight, grad_bias, None
