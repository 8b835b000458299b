"""Muon for matrices, AdamW for the rest: a step whose directions are all equally long.

The gradient of a matrix is dominated by a few directions, and a step along it learns little in the others. Muon takes
the momentum M = U S Vᵀ and steps along U Vᵀ: every direction counts the same. U Vᵀ is not found by a decomposition but
by a few matrix products (Newton-Schulz), which is all that makes it affordable. Its numbers are scaled to the size that
AdamW's steps have, so one learning rate and one decay serve both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

# X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X, thrice: each the odd polynomial that comes closest to 1 over what the one before
# leaves of 0.01 … 1 (a minimax problem). Singular values in that range end between 0.73 and 1.27.
STEPS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
SIZE = 0.2  # root mean square of AdamW's steps, as a share of the learning rate


@torch.no_grad()
def orthogonal(matrices: Tensor) -> Tensor:
    """[..., R, C] -> U Vᵀ of each, nearly: singular vectors are kept, singular values come close to 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-20)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(AdamW):
    """Groups with `orthogonal: True` hold matrices; their one moment is exp_avg. All others are AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.95, **rest: Any) -> None:
        super().__init__(groups, **rest)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if group.get("orthogonal"):
                self._turn(group)
        return super().step(closure)  # matrices have no gradient any more

    def _turn(self, group: dict[str, Any]) -> None:
        """Matrices of one shape are worked on together: fewer and larger products."""
        alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                alike[p.shape].append(p)
        for shape, matrices in alike.items():
            ahead = torch.stack([self._ahead(p) for p in matrices])
            lr, by = group["lr"], SIZE * math.sqrt(max(shape))
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
            torch._foreach_add_(matrices, list(orthogonal(ahead).unbind()), alpha=-lr * by)
            for p in matrices:
                p.grad = None

    def _ahead(self, p: Tensor) -> Tensor:
        """Nesterov: the momentum as it will be if this gradient comes again."""
        state = self.state[p]
        if not state:
            state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(p)
        state["step"] += 1
        return p.grad.lerp(state["exp_avg"].lerp_(p.grad, 1 - self.momentum), self.momentum)  # type: ignore[union-attr]
