"""AdamW in a quarter of its memory: moments of eight bits, rounded by chance (machine/moments.c says how)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW

from headwater.machine.dropout import WORD
from headwater.machine.moments import Step, adamw8, no_moments


class AdamW8(AdamW):
    """As AdamW, but its state is codes: exp_avg, exp_avg_sq, and the bases of their blocks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        learned = [(group, p) for group in self.param_groups for p in group["params"]]
        for number, (group, p) in enumerate(learned):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), **no_moments(p))
            state["step"] += 1
            done, (beta1, beta2) = int(state["step"]), group["betas"]
            # no two steps and no two tensors are rounded alike
            key = (done * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % WORD**2
            by = [1 / (1 - beta**done) for beta in (beta1, beta2)]
            told = Step(group["lr"], group["weight_decay"], beta1, beta2, group["eps"], *by, key % WORD, key // WORD)
            adamw8(p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["bases"], told)
        return loss
