"""AdamW, alone or beside Muon, with decay where it belongs; the state by parameter path, to be saved and moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from headwater.errors import BadFile, BadSetting, nearest
from headwater.machine.moments import no_moments
from headwater.training.adamw8 import AdamW8
from headwater.training.muon import Muon
from headwater.training.settings import Settings

METHODS, MOMENTS = ("auto", "adamw", "adamw8", "muon"), ("exp_avg", "exp_avg_sq")


def decays(model: nn.Module) -> set[str]:
    """The paths of the tensors that decay: the matrices of linear layers. Biases, norms and tables do not.

    A table that is also the output matrix (tied) is a table.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        n
        for n, p in model.named_parameters()
        if p.dim() >= 2 and id(p) not in tables and not n.endswith("table.weight")
    }


def optimiser_for(model: nn.Module, lr: float, s: Settings) -> AdamW:
    """One group that decays (Muon's, where it is asked for) and one that does not; frozen tensors are in neither."""
    if s.method not in METHODS:
        raise BadSetting(f"no method is called {s.method!r}; {nearest(s.method, METHODS)}")
    if s.method == "muon" and s.shard:
        raise BadSetting("muon works on whole matrices, and shard cuts them; use method=adamw, or leave shard out")
    if s.method == "adamw8" and s.shard:
        raise BadSetting("adamw8 works on whole tensors, and shard cuts them; use method=adamw, or leave shard out")
    chosen, muon = decays(model), s.method == "muon"
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, rest = ([p for name, p in learned if (name in chosen) is wanted] for wanted in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": s.weight_decay, "orthogonal": muon},
        {"params": rest, "weight_decay": 0.0, "orthogonal": False},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": lr, "betas": (s.beta1, s.beta2), "eps": s.eps, "fused": True}
    if s.method == "adamw8":
        return begun(AdamW8(groups, **common))
    return begun(Muon(groups, momentum=s.momentum, **common) if muon else AdamW(groups, **common))


def begun(optimiser: AdamW) -> AdamW:
    """With moments of zero for every tensor. They outlive every step: made in the midst of the first one they would lie
    scattered among what it leaves, and each later step would have to find its memory between them.
    """
    for group in optimiser.param_groups:
        moments = MOMENTS[:1] if group["orthogonal"] else MOMENTS
        for p in group["params"]:
            zeros = no_moments(p) if isinstance(optimiser, AdamW8) else {name: torch.zeros_like(p) for name in moments}
            optimiser.state[p] = {"step": torch.zeros(()), **zeros}
    return optimiser


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr


# ------------------------------------------------------------------------------------------- in and out, by path


def state_of(optimiser: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """The moments of every parameter that has some: exp_avg:PATH, exp_avg_sq:PATH, step:PATH."""
    found: dict[str, Tensor] = {}
    for path, parameter in model.named_parameters():
        for name, value in optimiser.state.get(parameter, {}).items():
            found[f"{name}:{path}"] = torch.as_tensor(value)
    return found


def load_state(optimiser: AdamW, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of state_of. Every tensor is copied into memory of our own, and must fit the model."""
    known = dict(model.named_parameters())
    left = dict.fromkeys(tensors)
    for path, parameter in known.items():
        if f"step:{path}" not in tensors:
            continue
        for name, room in optimiser.state[parameter].items():  # as begun: which there are depends on the method
            value = tensors.get(f"{name}:{path}")
            if value is None or (value.dtype == torch.uint8) != (room.dtype == torch.uint8):
                raise BadFile(
                    f"optimizer state of {path} must be of this method; resume with the one the run began with"
                )
            if value.shape != room.shape:
                raise BadFile(f"optimizer state of {path} must be {tuple(room.shape)}, got {tuple(value.shape)}")
            room.copy_(value)
            left.pop(f"{name}:{path}")
    if left:
        raise BadFile(
            f"optimizer state must belong to this model, {next(iter(left))} does not; use the run's own checkpoint"
        )
