"""Weight initialization by rules on paths: the first pattern that matches a tensor's path decides.

Norms use their own reset_parameters, biases are zero; the rules are for the other tensors (matrices and embeddings).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwater.core.base import InitSpec
from headwater.core.modules import ComputedBuffers
from headwater.i18n import _
from headwater.parts import must, part


@part
class Xavier(InitSpec):
    """Xavier (Glorot) uniform: within ±gain · √(6 / (rows + columns))."""

    gain: float = 1.0

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        rows = tensor.shape[0]
        columns = tensor[0].numel()
        bound = self.gain * math.sqrt(6 / (rows + columns))
        tensor.uniform_(-bound, bound, generator=generator)


@part
class Normal(InitSpec):
    """Normal distribution with mean 0."""

    std: float

    def __post_init__(self) -> None:
        must(self.std >= 0, self, _("std must be at least 0"), self.std, _("0.02 is usual"))

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0, self.std, generator=generator)


@part
class FanIn(InitSpec):
    """Normal with std 1/√columns: for embeddings that are scaled by √d_model."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.normal_(0, tensor.shape[-1] ** -0.5, generator=generator)


@part
class Zero(InitSpec):
    """All zeros: for biases, and for branches that start by adding nothing."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        tensor.zero_()


NORMS = nn.LayerNorm | nn.RMSNorm
InitRules = tuple[tuple[str, InitSpec], ...]

PAPER_INIT: InitRules = (("*.tokens.weight", FanIn()), ("*.table.weight", Normal(0.02)), ("*", Xavier()))


def scaled_normal(layers: int, std: float = 0.02) -> InitRules:
    """GPT-2's initialization: normal, and the projections into the residual stream smaller by √(2 · layers)."""
    small = Normal(std / math.sqrt(2 * max(layers, 1)))
    return ("*_attn.out.weight", small), ("*.ffn.down.weight", small), ("*", Normal(std))


class SkipInit(TorchFunctionMode):
    """Skip torch.nn.init while a model is built on the meta device, where it changes nothing and costs seconds."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def materialize(model: nn.Module, rules: InitRules, seed: int | None, device: torch.device | str = "cpu") -> None:
    """Allocate a model built on the meta device and initialize its weights. The same seed gives the same weights."""
    # a tied tensor has one initialization, that of its first path
    inits = {name: match_rule(name, rules) for name, _ in model.named_parameters()}
    model._apply(lambda tensor: _empty(tensor, device))
    if seed is None:
        seed = int(torch.randint(2**62, (1,)))
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, NORMS):
                module.reset_parameters()
                continue
            for name, tensor in module.named_parameters(prefix=path, recurse=False):
                if name in inits:
                    inits[name].fill(tensor, generator)
    init_buffers(model)


def init_buffers(model: nn.Module) -> None:
    """Fill every computed buffer (RoPE frequencies, ALiBi slopes); one on the meta device is allocated first."""
    with torch.no_grad():
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = _empty(buffer, "cpu")
            if isinstance(module, ComputedBuffers):
                module.init_buffers()


def _empty(like: Tensor, device: torch.device | str) -> Tensor:
    """torch.empty with the shape of a meta tensor; empty_like and to_empty would import sympy, half a second."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def match_rule(name: str, rules: InitRules) -> InitSpec:
    """The initialization of the tensor at a path; looked up for all tensors before any memory is allocated."""
    if name.endswith("bias"):
        return Zero()
    init = next((rule for pattern, rule in rules if fnmatch.fnmatchcase(name, pattern)), None)
    must(init is not None, "init", _("some rule must match every path"), name, _("end the rules with ('*', ...)"))
    assert init is not None
    return init
