"""8. Cross-entropy loss with label smoothing; padding is ignored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headwater.reference.gradients import Array


def log_softmax(x: Array) -> Array:
    """Log-softmax: log p_j = (x_j − m) − log Σ_k exp(x_k − m), with m = max x."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def cross_entropy(
    logits: Array, targets: Array, padding: int, smoothing: float = 0.0
) -> tuple[float, Callable[..., Array]]:
    """Cross-entropy: L = −(1/N) Σ_tokens Σ_v t_v log p_v, over the N targets that are not padding.

    logits [..., V], targets [...]. smoothing: ε of label smoothing.
    The target distribution t is 1 − ε on the target id, with ε spread over all V ids: no logit is driven to infinity.
    The backward function takes dL, which is 1 by default.
    """
    counts = targets != padding

    # the target distribution [..., V]
    target_probs = np.full_like(logits, smoothing / logits.shape[-1])
    indices = np.where(counts, targets, 0)[..., None]
    peaks = np.take_along_axis(target_probs, indices, axis=-1) + (1 - smoothing)
    np.put_along_axis(target_probs, indices, peaks, axis=-1)

    # the mean over the targets that count
    weight = counts[..., None] / max(int(counts.sum()), 1)
    log_probs = log_softmax(logits)
    loss = -float((weight * target_probs * log_probs).sum())

    def backward(dloss: float = 1.0) -> Array:
        # log p_j = x_j − log Σ exp x gives d(−Σ t log p)/dx = p Σ t − t, and Σ t = 1
        return ((np.exp(log_probs) - target_probs) * weight * dloss).astype(logits.dtype)

    return loss, backward
