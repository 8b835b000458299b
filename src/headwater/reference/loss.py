"""8. What the model is told: cross-entropy with label smoothing; padding counts for nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headwater.reference.gradients import Array


def log_softmax(x: Array) -> Array:
    """log p_j = (x_j − m) − log Σ_k exp(x_k − m), with m = max x."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def cross_entropy(
    logits: Array, targets: Array, padding: int, smoothing: float = 0.0
) -> tuple[float, Callable[..., Array]]:
    """L = −(1/N) Σ_tokens Σ_v t_v log p_v, over the N targets that are not padding; logits [..., V], targets [...].

    The goal t is 1 − ε on the right id with ε spread evenly over all V ids: no logit is driven to infinity.
    The way back takes dL, which is 1 at the end of every chain.
    """
    counts = targets != padding
    goal = np.full_like(logits, smoothing / logits.shape[-1])
    right = np.where(counts, targets, 0)[..., None]
    np.put_along_axis(goal, right, np.take_along_axis(goal, right, axis=-1) + (1 - smoothing), axis=-1)
    each = counts[..., None] / max(int(counts.sum()), 1)
    logs = log_softmax(logits)
    loss = -float((each * goal * logs).sum())

    def back(dloss: float = 1.0) -> Array:
        # log p_j = x_j − log Σ exp x gives d(−Σ t log p)/dx = p Σ t − t, and Σ t = 1
        return ((np.exp(logs) - goal) * each * dloss).astype(logits.dtype)

    return loss, back
