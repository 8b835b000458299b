"""9. How weights follow their gradients: Adam, the learning rate over time, and a limit on the step."""

from __future__ import annotations

import math

import numpy as np

from headwater.reference.gradients import Array


class Adam:
    """m ← β₁ m + (1 − β₁) g            the mean of the gradients
    v ← β₂ v + (1 − β₂) g²           and of their squares
    θ ← θ − rate · (m̂ / (√v̂ + ε) + decay · θ)

    m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ) make up for both starting at zero. With decay this is AdamW: the weights
    shrink by themselves, beside the gradient and not through it. Defaults: the paper's.
    """

    def __init__(self, beta1: float = 0.9, beta2: float = 0.98, eps: float = 1e-9, decay: float = 0.0) -> None:
        self.beta1, self.beta2, self.eps, self.decay = beta1, beta2, eps, decay
        self.steps = 0
        self.mean: dict[str, Array] = {}
        self.square: dict[str, Array] = {}

    def step(self, values: dict[str, Array], gradients: dict[str, Array], rate: float) -> None:
        """Changes the arrays of `values` in place."""
        self.steps += 1
        for path, g in gradients.items():
            m = self.mean[path] = self.beta1 * self.mean.get(path, np.zeros_like(g)) + (1 - self.beta1) * g
            v = self.square[path] = self.beta2 * self.square.get(path, np.zeros_like(g)) + (1 - self.beta2) * g**2
            m_hat, v_hat = m / (1 - self.beta1**self.steps), v / (1 - self.beta2**self.steps)
            values[path] -= rate * (m_hat / (np.sqrt(v_hat) + self.eps) + self.decay * values[path])


def noam(step: int, d_model: int, warmup: int) -> float:
    """d_model^−½ · min(step^−½, step · warmup^−1.5): up in a line, then down with the root. Steps begin at 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def warmup_cosine(step: int, warmup: int, steps: int) -> float:
    """Up in a line to 1 at `warmup`, then down half a cosine wave to 0 at `steps`: a factor on the highest rate."""
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0)))


def clip(gradients: dict[str, Array], limit: float) -> float:
    """g ← g · min(1, limit / |g|), with |g| the norm of all gradients taken as one vector; gives |g| as it was."""
    size = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
    if size > limit:
        for path in gradients:
            gradients[path] = gradients[path] * (limit / size)
    return size
