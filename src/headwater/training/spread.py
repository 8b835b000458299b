"""How a model is spread over a team: one has it, each has a copy (DDP), or each has a part (FSDP2).

All three follow one curve: gradients are summed, and the loss of a step is Σ losses / Σ answers over all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from headwater.core.init import constants
from headwater.data.objectives.lesson import IGNORE, TARGET_FIELDS
from headwater.training.buckets import Buckets
from headwater.training.objectives import Batch, Objective
from headwater.weights.native import put

Spare = Callable[[], dict[str, Tensor]]


def mine(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, in memory of its own. Where processes hold parts, all of them must ask for it."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, of which every process has a copy, spread as another one is."""
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class Once:
    """One process has the model."""

    sharded = False

    def __init__(self, model: Any, objective: Objective, team: Any) -> None:
        self.model, self.objective, self.team = model, objective, team

    def loss(self, piece: Batch, smoothing: float) -> Tensor:
        return self.objective(self.model, piece, smoothing)

    def filled(self, pieces: list[dict[str, Tensor]], most: int, spare: Spare) -> list[dict[str, Tensor]]:
        """The pieces this process works on, where some process has `most`."""
        return pieces

    def expect(self, last: bool) -> None:
        """A backward pass follows: the last of its step or not."""

    def settle(self) -> None:
        """After it every gradient is the sum over all processes."""

    def norm_sums(self, squares: Sequence[float]) -> list[float]:
        """Squares of gradients, summed over the processes that hold parts of them."""
        return list(squares)

    @contextmanager
    def plain(self) -> Iterator[Any]:
        """The model as one process would have it: to measure and to keep. Only the first process looks at it."""
        yield self.model


class Copied(Once):
    """A copy in every process; the gradients are summed in buckets while they are worked out."""

    def __init__(self, model: Any, objective: Objective, team: Any) -> None:
        super().__init__(model, objective, team)
        self.buckets = Buckets(model.parameters())

    def expect(self, last: bool) -> None:
        if last:
            self.buckets.expect()

    def settle(self) -> None:
        self.buckets.settle()


class Sharded(Once):
    """A part of every tensor in every process (FSDP2): weights, gradients and moments take 1/world of the memory.

    A layer's weights are gathered just before it is used. That is done by all together, so each process must go forward
    as often as the others: one that has fewer pieces adds some in which nothing is asked.
    """

    sharded = True

    def __init__(self, model: Any, objective: Objective, team: Any) -> None:
        super().__init__(model, objective, team)
        self.root: Any = _Loss(model, objective)
        for module in (*_layers(model), self.root):
            _shard(module, team)

    def loss(self, piece: Batch, smoothing: float) -> Tensor:
        loss: Tensor = self.root(piece, smoothing)
        return loss

    def filled(self, pieces: list[dict[str, Tensor]], most: int, spare: Spare) -> list[dict[str, Tensor]]:
        if len(pieces) == most:
            return pieces
        return [*pieces, *[without_targets(spare())] * (most - len(pieces))]

    def expect(self, last: bool) -> None:
        self.root.set_requires_gradient_sync(last)

    def norm_sums(self, squares: Sequence[float]) -> list[float]:
        found: list[float] = self.team.sums(squares)
        return found

    @contextmanager
    def plain(self) -> Iterator[Any]:
        gathered = {path: whole(p) for path, p in self.model.named_parameters()}
        twin = self.model.spec.skeleton()
        twin.to_empty(device=self.team.device)
        put(twin, gathered, "the gathered weights")
        constants(twin)
        yield twin.eval()


def without_targets(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A filler micro-batch: the same inputs, every target ignored, so that its loss and its gradients are zero."""
    return batch | {name: torch.full_like(batch[name], IGNORE) for name in TARGET_FIELDS if name in batch}


class _Loss(nn.Module):
    """The loss as one forward pass: what FSDP2 must see begin and end."""

    def __init__(self, model: Any, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, piece: Batch, smoothing: float) -> Tensor:
        return self.objective(self.model, piece, smoothing)


def _layers(model: Any) -> list[nn.Module]:
    """Every layer once, though a stack may use one several times."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return list({id(layer): layer for stack in stacks for layer in stack.layers}.values())


def _shard(module: Any, team: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(module, mesh=team.mesh())
    module.set_gradient_divide_factor(1.0)  # a sum, not a mean
    module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def spread(model: Any, objective: Objective, team: Any, shard: bool) -> Once:
    if team.world == 1:
        return Once(model, objective, team)
    return (Sharded if shard else Copied)(model, objective, team)
