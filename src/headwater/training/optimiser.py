"""AdamW, fused, with its decay where it belongs; the state by parameter path, so that it can be saved and moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from headwater.errors import BadFile

MOMENTS = ("exp_avg", "exp_avg_sq")


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


def adamw(model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamW:
    """One group that decays and one that does not; frozen tensors are in neither."""
    chosen = decays(model)
    learned = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in learned if name in chosen], "weight_decay": weight_decay},
        {"params": [p for name, p in learned if name not in chosen], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def set_lr(optimiser: torch.optim.Optimizer, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr


def clip(parameters: Iterable[Tensor], most: float) -> float:
    """The norm of all gradients together, which are then scaled down to `most` if it is larger (0: never)."""
    learned = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in learned if p.grad is not None])
    if most > 0 and bool(norm.isfinite()):  # else NaN would spread, and nobody could say where it came from
        nn.utils.clip_grads_with_norm_(learned, most, norm)
    return float(norm)


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
        state = {"step": tensors[f"step:{path}"].clone()}
        for moment in MOMENTS:
            value = tensors[f"{moment}:{path}"]
            if value.shape != parameter.shape:
                raise BadFile(f"optimizer state of {path} must be {tuple(parameter.shape)}, got {tuple(value.shape)}")
            state[moment] = torch.empty_like(parameter).copy_(value)
        for name in ("step", *MOMENTS):
            left.pop(f"{name}:{path}")
        optimiser.state[parameter] = state
    if left:
        raise BadFile(
            f"optimizer state must belong to this model, {next(iter(left))} does not; use the run's own checkpoint"
        )
