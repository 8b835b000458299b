"""9. Optimization: Adam and AdamW, learning-rate schedules with warm-up, gradient clipping."""

from __future__ import annotations

import math

import numpy as np

from headwater.reference.gradients import Array


class Adam:
    """The Adam optimizer (Kingma and Ba 2014):

        m ← β₁ m + (1 − β₁) g            the mean of the gradients
        v ← β₂ v + (1 − β₂) g²           and of their squares
        θ ← θ − lr · (m̂ / (√v̂ + ε) + weight_decay · θ)

    m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ) correct the bias of starting at zero. With weight_decay this is
    AdamW: the decay is decoupled from the gradient. Defaults: those of Vaswani et al. 2017.
    """

    def __init__(self, beta1: float = 0.9, beta2: float = 0.98, eps: float = 1e-9, weight_decay: float = 0.0) -> None:
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.weight_decay = weight_decay
        self.steps = 0
        self.mean: dict[str, Array] = {}
        self.square: dict[str, Array] = {}

    def step(self, values: dict[str, Array], gradients: dict[str, Array], lr: float) -> None:
        """One update: changes the arrays of `values` in place."""
        self.steps += 1
        for path, g in gradients.items():
            m = self.beta1 * self.mean.get(path, np.zeros_like(g)) + (1 - self.beta1) * g
            v = self.beta2 * self.square.get(path, np.zeros_like(g)) + (1 - self.beta2) * g**2
            self.mean[path] = m
            self.square[path] = v
            m_hat = m / (1 - self.beta1**self.steps)
            v_hat = v / (1 - self.beta2**self.steps)
            values[path] -= lr * (m_hat / (np.sqrt(v_hat) + self.eps) + self.weight_decay * values[path])


def noam(step: int, d_model: int, warmup: int) -> float:
    """Learning rate of the 2017 paper: d_model^−½ · min(step^−½, step · warmup^−1.5), for steps from 1 on.

    It rises linearly up to `warmup`, then falls with the inverse square root.
    """
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Linear warm-up to 1 at `warmup`, then cosine decay to 0 at `steps`: a factor on the learning rate."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0)))


def clip(gradients: dict[str, Array], limit: float) -> float:
    """Gradient clipping: g ← g · min(1, limit / |g|), with |g| the norm of all gradients, which is returned."""
    norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    if norm > limit:
        for path in gradients:
            gradients[path] = gradients[path] * (limit / norm)
    return norm
