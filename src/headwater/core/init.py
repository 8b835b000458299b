"""First weights, by rules on paths: the first pattern that matches a tensor's path says how it is drawn.

Norms start as they define themselves, biases at zero; a rule speaks of the other tensors (matrices and tables).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwater.core.kinds import Filling
from headwater.core.norms import OffsetRMSNormLayer
from headwater.core.positions import Position
from headwater.parts import must, part


@part
class Xavier(Filling):
    """Uniform within ±gain · √(6 / (rows + columns)): the paper's."""

    gain: float = 1.0

    def fill(self, t: Tensor, draw: torch.Generator) -> None:
        rows, columns = t.shape[0], t[0].numel()
        bound = self.gain * math.sqrt(6 / (rows + columns))
        t.uniform_(-bound, bound, generator=draw)


@part
class Normal(Filling):
    """Normal with mean 0."""

    std: float

    def __post_init__(self) -> None:
        must(self.std >= 0, self, "std must be at least 0", self.std, "0.02 is usual")

    def fill(self, t: Tensor, draw: torch.Generator) -> None:
        t.normal_(0, self.std, generator=draw)


@part
class Width(Filling):
    """Normal with std 1/√columns: for tables whose rows are later scaled by √d_model."""

    def fill(self, t: Tensor, draw: torch.Generator) -> None:
        t.normal_(0, t.shape[-1] ** -0.5, generator=draw)


@part
class Zero(Filling):
    """All zeros: every bias, and a branch that is to begin by adding nothing."""

    def fill(self, t: Tensor, draw: torch.Generator) -> None:
        t.zero_()


NORMS = nn.LayerNorm | nn.RMSNorm
Rules = tuple[tuple[str, Any], ...]

PAPER: Rules = (("*.tokens.weight", Width()), ("*.table.weight", Normal(0.02)), ("*", Xavier()))


def scaled_normal(layers: int, std: float = 0.02) -> Rules:
    """GPT-2: all normal, and what writes into the residual stream smaller by √(2 · layers)."""
    small = Normal(std / math.sqrt(2 * max(layers, 1)))
    return ("*_attn.out.weight", small), ("*.ffn.down.weight", small), ("*", Normal(std))


class NoFirstWeights(TorchFunctionMode):
    """While a skeleton is built no weights are drawn: on meta that would change nothing and cost seconds."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def materialise(model: nn.Module, rules: Rules, seed: int | None, device: torch.device | str = "cpu") -> None:
    """Give a model built on meta its memory and its first weights. The same seed gives the same weights."""
    drawn = {name: _rule(name, rules) for name, _ in model.named_parameters()}  # a tied tensor once, by its first path
    model._apply(lambda tensor: _memory(tensor, device))
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    draw = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, NORMS):
                module.reset_parameters()
                continue
            for name, tensor in module.named_parameters(prefix=path, recurse=False):
                if name in drawn:
                    drawn[name].fill(tensor, draw)
    constants(model)


def constants(model: nn.Module) -> None:
    """Fill every buffer that is computed rather than learned; one still on meta gets its memory first."""
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = _memory(buffer, "cpu")
            if isinstance(module, Position):
                module.constants()


def _memory(like: Tensor, device: torch.device | str) -> Tensor:
    """Room for a tensor on meta. empty_like and to_empty would import all of sympy first, half a second of it."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def fresh(model: Any, name: str) -> Tensor:
    """First values for one tensor of a model, by the model's own rules."""
    module, like = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name)
    if isinstance(module, NORMS):
        start = 0.0 if name.endswith("bias") or isinstance(module, OffsetRMSNormLayer) else 1.0
        return torch.full(like.shape, start)
    value = torch.empty(like.shape)
    draw = torch.Generator().manual_seed(int(torch.randint(2**62, (1,))))
    _rule(name, model.spec.init).fill(value, draw)
    return value


def _rule(name: str, rules: Rules) -> Any:
    """The rule for a tensor; found for all of them before any memory is asked for."""
    if name.endswith("bias"):
        return Zero()
    found = next((rule for pattern, rule in rules if fnmatch.fnmatchcase(name, pattern)), None)
    must(found is not None, "init", "some rule must match every path", name, "end the rules with ('*', ...)")
    return found
