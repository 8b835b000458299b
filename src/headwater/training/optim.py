"""Optimizers (AdamW, 8-bit AdamW, Muon), weight decay groups, optimizer state by parameter path, EMA of the weights.

Muon (Jordan et al. 2024): the gradient of a matrix is dominated by a few directions, and a step along it learns little
in the others. Muon takes the momentum M = U S Vᵀ and steps along U Vᵀ, where every direction counts the same. U Vᵀ is
computed by a few matrix products (Newton-Schulz iteration) in place of an SVD. Its updates are scaled to the RMS of
AdamW's, so that one learning rate and one weight decay serve both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from headwater.cpu.adamw8bit import AdamWParams, adamw8bit_step, init_moments
from headwater.cpu.dropout import TWO_POW_32
from headwater.errors import BadFile, BadSetting, nearest
from headwater.i18n import _
from headwater.training.config import TrainConfig
from headwater.training.distributed import to_local
from headwater.tuning.base import trained_parameters

# ----------------------------------------------------------------------------------------------------- parameter groups

OPTIMIZERS = ("auto", "adamw", "adamw8", "muon")
MOMENTS = ("exp_avg", "exp_avg_sq")


def decay_parameters(model: nn.Module) -> set[str]:
    """Paths of the parameters with weight decay: matrices of linear layers, not biases, norms or embedding tables.

    A table that is also the output matrix (tied) is a table.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        n
        for n, p in model.named_parameters()
        if p.dim() >= 2 and id(p) not in tables and not n.endswith("table.weight")
    }


def build_optimizer(model: nn.Module, lr: float, config: TrainConfig) -> AdamW:
    """An optimizer with two parameter groups, with weight decay (Muon's, if chosen) and without; none is frozen."""
    if config.optimizer not in OPTIMIZERS:
        raise BadSetting(
            _(
                "no optimizer is called {optimizer!r}; {nearest}",
                optimizer=config.optimizer,
                nearest=nearest(config.optimizer, OPTIMIZERS),
            )
        )
    if config.optimizer == "muon" and config.fsdp:
        raise BadSetting(_("muon needs full matrices, and fsdp shards them; use optimizer=adamw, or leave fsdp out"))
    if config.optimizer == "adamw8" and config.fsdp:
        raise BadSetting(_("adamw8 needs full tensors, and fsdp shards them; use optimizer=adamw, or leave fsdp out"))
    decayed = decay_parameters(model)
    muon = config.optimizer == "muon"
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for name, p in trainable if name in decayed]
    rest = [p for name, p in trainable if name not in decayed]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay, "use_muon": muon},
        {"params": rest, "weight_decay": 0.0, "use_muon": False},
    ]
    groups = [group for group in groups if group["params"]]
    common: dict[str, Any] = {"lr": lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
    if config.optimizer == "adamw8":
        return init_optimizer_state(AdamW8bit(groups, **common))
    return init_optimizer_state(Muon(groups, momentum=config.momentum, **common) if muon else AdamW(groups, **common))


def init_optimizer_state(optimizer: AdamW) -> AdamW:
    """Allocate zero moments for every parameter before the first step, so that they do not fragment its memory."""
    for group in optimizer.param_groups:
        moments = MOMENTS[:1] if group["use_muon"] else MOMENTS
        for p in group["params"]:
            zeros = (
                init_moments(p) if isinstance(optimizer, AdamW8bit) else {name: torch.zeros_like(p) for name in moments}
            )
            optimizer.state[p] = {"step": torch.zeros(()), **zeros}
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


# ------------------------------------------------------------------------------------ optimizer state by parameter path


def optimizer_state(optimizer: AdamW, model: nn.Module) -> dict[str, Tensor]:
    """The moments of every parameter that has some: exp_avg:PATH, exp_avg_sq:PATH, step:PATH."""
    state: dict[str, Tensor] = {}
    for path, parameter in model.named_parameters():
        for name, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}:{path}"] = torch.as_tensor(value)
    return state


def load_optimizer_state(optimizer: AdamW, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of optimizer_state: every tensor is copied, and must fit the model."""
    known = dict(model.named_parameters())
    unused = dict.fromkeys(tensors)
    for path, parameter in known.items():
        if f"step:{path}" not in tensors:
            continue
        for name, moment in optimizer.state[parameter].items():  # as initialized: they depend on the optimizer
            value = tensors.get(f"{name}:{path}")
            if value is None or (value.dtype == torch.uint8) != (moment.dtype == torch.uint8):
                raise BadFile(
                    _(
                        "optimizer state of {path} must be of this optimizer; resume with the one the run began with",
                        path=path,
                    )
                )
            if value.shape != moment.shape:
                raise BadFile(
                    _(
                        "optimizer state of {path} must be {shape}, got {shape2}",
                        path=path,
                        shape=tuple(moment.shape),
                        shape2=tuple(value.shape),
                    )
                )
            moment.copy_(value)
            unused.pop(f"{name}:{path}")
    if unused:
        raise BadFile(
            _(
                "optimizer state must belong to this model, {next} does not; use the run's own checkpoint",
                next=next(iter(unused)),
            )
        )


# ----------------------------------------------------------------------------------------------------------------- Muon

# X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X, thrice: each the odd polynomial that comes closest to 1 over what the one before
# leaves of 0.01 … 1 (a minimax problem). Singular values in that range end between 0.73 and 1.27.
NEWTON_SCHULZ_COEFFICIENTS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
ADAMW_RMS = 0.2  # root mean square of AdamW's steps, as a fraction of the learning rate


@torch.no_grad()
def orthogonalize(matrices: Tensor) -> Tensor:
    """[..., R, C] -> U Vᵀ of each, nearly: singular vectors are kept, singular values come close to 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-20)
    for a, b, c in NEWTON_SCHULZ_COEFFICIENTS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon(AdamW):
    """Groups with `use_muon: True` hold matrices; their one moment is exp_avg. All others are AdamW's."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.95, **rest: Any) -> None:
        super().__init__(groups, **rest)
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for group in self.param_groups:
            if group.get("use_muon"):
                self._orthogonalize(group)
        return super().step(closure)  # matrices have no gradient any more

    def _orthogonalize(self, group: dict[str, Any]) -> None:
        """Update matrices of one shape together: fewer and larger products."""
        by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if p.grad is not None:
                by_shape[p.shape].append(p)
        for shape, matrices in by_shape.items():
            momentum = torch.stack([self._nesterov(p) for p in matrices])
            lr = group["lr"]
            scale = ADAMW_RMS * math.sqrt(max(shape))
            torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
            torch._foreach_add_(matrices, list(orthogonalize(momentum).unbind()), alpha=-lr * scale)
            for p in matrices:
                p.grad = None

    def _nesterov(self, p: Tensor) -> Tensor:
        """Nesterov momentum: the momentum after one more step with this gradient."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(p)
        state["step"] += 1
        return p.grad.lerp(state["exp_avg"].lerp_(p.grad, 1 - self.momentum), self.momentum)  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------------------------- 8-bit AdamW


class AdamW8bit(AdamW):
    """AdamW with block-wise quantized 8-bit moments, stochastically rounded: a quarter of the memory."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        trainable = [(group, p) for group in self.param_groups for p in group["params"]]
        for number, (group, p) in enumerate(trainable):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), **init_moments(p))
            state["step"] += 1
            step = int(state["step"])
            beta1, beta2 = group["betas"]
            # the seed of the rounding: another for every step and every tensor
            key = (step * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03) % TWO_POW_32**2
            inv_bias_corrections = [1 / (1 - beta**step) for beta in (beta1, beta2)]
            params = AdamWParams(
                group["lr"],
                group["weight_decay"],
                beta1,
                beta2,
                group["eps"],
                *inv_bias_corrections,
                key % TWO_POW_32,
                key // TWO_POW_32,
            )
            adamw8bit_step(p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["block_exponents"], params)
        return loss


# --------------------------------------------------------------------------------------------------- EMA of the weights


class EMA:
    """Exponential moving average: ema ← decay · ema + (1 - decay) · weights after each step. decay 0: no average.

    In the first steps the decay is smaller, (1 + t) / (10 + t), so that the first weights are soon forgotten.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {n: p.detach().clone() for n, p in trained_parameters(model).items()} if decay else {}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        if not self.weights:
            return
        weight = 1 - min(self.decay, (1 + step) / (10 + step))
        new = dict(model.named_parameters())
        torch._foreach_lerp_(
            [to_local(w) for w in self.weights.values()], [to_local(new[n].detach()) for n in self.weights], weight
        )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, kept in self.weights.items():
            kept.copy_(tensors[name])

    @contextmanager
    def swapped_in(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with the EMA weights in a block; then its own are restored. In place: tied tensors stay tied."""
        local = {name: to_local(p.detach()) for name, p in model.named_parameters() if name in self.weights}
        kept = {name: value.clone() for name, value in local.items()}
        try:
            for name, value in local.items():
                value.copy_(to_local(self.weights[name]))
            yield model
        finally:
            for name, value in local.items():
                value.copy_(kept[name])
