"""The processes that train one model together, each on its share of every batch.

Gradients are summed, never averaged by process: the loss of a step is Σ losses / Σ tokens over all of them, so one
process and many follow the same curve. What must be decided together is decided by numbers that all of them have seen.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from headwater.errors import Unavailable

PATIENCE = timedelta(minutes=60)  # the others wait while the first evaluates


class Alone:
    """One process: nothing to agree on, nothing to add up."""

    rank, world = 0, 1

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number, summed over all processes."""
        return list(numbers)

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Every gradient becomes the sum of all processes' gradients."""

    def told(self, numbers: Sequence[float]) -> list[float]:
        """What the first process knows."""
        return list(numbers)

    def leave(self) -> None:
        """Part as friends."""


class Team(Alone):
    """Processes started by torchrun or by --processes, speaking through gloo (CPU) or nccl (CUDA)."""

    def __init__(self, device: str = "cpu") -> None:
        try:
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise Unavailable(
                f"the processes can not meet: {str(error).splitlines()[0][:80]}; is the port free?"
            ) from None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = device

    def sums(self, numbers: Sequence[float]) -> list[float]:
        held = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        dist.all_reduce(held)
        return [float(x) for x in held.tolist()]

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """All gradients as one flat row: one message a step. A process that had no rows adds zeros."""
        learned = [p for p in parameters if p.requires_grad]
        for p in learned:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        grads = [p.grad for p in learned if p.grad is not None]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def told(self, numbers: Sequence[float]) -> list[float]:
        count = int(self.sums([len(numbers) if self.rank == 0 else 0])[0])
        return self.sums(numbers if self.rank == 0 else [0.0] * count)

    def leave(self) -> None:
        dist.destroy_process_group()


def team(device: str = "cpu") -> Any:
    """The team this process was started in, or none."""
    return Team(device) if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else Alone()
