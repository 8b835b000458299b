"""Gradients of a text's loss: how large for each parameter, how they flow through the layers; where numbers break."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.inspection.numbers import Spoilt, _word, spoilt
from headwater.inspection.results import Result
from headwater.inspection.scores import loss
from headwater.inspection.subjects import Reading, Token, read, still
from headwater.inspection.traces import hooked, tensors


@dataclass(frozen=True)
class Norm:
    """One parameter: the norm of its gradient and of itself."""

    path: str
    gradient: float
    weight: float


@dataclass(frozen=True, eq=False)
class Gradients(Result):
    """norms: by parameter, in the order of the model. flow: by place in the model, the root mean square over tokens of
    ‖∂loss/∂x‖ for the stream x there. tokens: ‖∂loss/∂embedding‖ of each token of the stack before the head.
    """

    loss: float
    of: str
    total: float
    norms: tuple[Norm, ...]
    flow: tuple[tuple[str, float], ...]
    tokens: tuple[Token, ...]
    token_norms: np.ndarray

    @property
    def hint(self) -> str:
        """What is unusual, in a sentence; nothing where nothing is."""
        bad = [norm.path for norm in self.norms if not math.isfinite(norm.gradient)]
        if bad:
            return f"the gradient of {bad[0]} is not finite; first_bad says where that begins"
        still_ones = [norm.path for norm in self.norms if norm.gradient == 0]
        layers = [value for name, value in self.flow if "embed" not in name]
        if layers and min(layers) > 0 and max(layers) / min(layers) > 1e3:
            way = "vanishes" if layers[0] < layers[-1] else "explodes"
            return f"the gradient {way} on its way down: from {layers[-1]:.1e} at the top to {layers[0]:.1e}"
        return f"{len(still_ones)} parameters get no gradient, such as {still_ones[0]}" if still_ones else ""

    def lines(self) -> list[str]:
        largest = sorted(self.norms, key=lambda norm: -norm.gradient)[:3]
        said = ", ".join(f"{norm.path} {norm.gradient:.2g}" for norm in largest)
        made = [f"gradients of the {self.of} ({self.loss:.3f}): norm {self.total:.3g}; largest: {said or 'none'}"]
        return made + ([self.hint] if self.hint else [])


def gradients(model: Any, text: Any, target: Any = None) -> Gradients:
    """What a text would teach: the gradient of its loss. Weights that stay packed learn nothing and are not listed."""
    reading = read(model, text, target)
    named = [(path, p) for path, p in reading.model.named_parameters() if p.is_floating_point()]
    asked = [p.requires_grad for _, p in named]
    heard: list[tuple[str, Tensor]] = []
    handles = [module.register_forward_hook(_listener(path, heard)) for path, module in _stations(reading)]
    try:
        with still(reading.model, learning=True):
            for _, p in named:
                p.requires_grad_(True)
            value, of = loss(reading)
            wanted = [p for _, p in named] + [x for _, x in heard]
            found = torch.autograd.grad(value, wanted, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
        for (_, p), flag in zip(named, asked, strict=True):
            p.requires_grad_(flag)
    return _gathered(reading, float(value.detach()), of, named, heard, list(found))


def _gathered(
    reading: Reading, value: float, of: str, named: list[Any], heard: list[Any], found: list[Tensor | None]
) -> Gradients:
    sizes = [0.0 if grad is None else float(grad.norm()) for grad in found[: len(named)]]
    norms = tuple(Norm(path, size, float(p.detach().norm())) for (path, p), size in zip(named, sizes, strict=True))
    streams = [(path, grad) for (path, _), grad in zip(heard, found[len(named) :], strict=True) if grad is not None]
    flow = tuple((path, float(grad.norm(dim=-1).square().mean().sqrt())) for path, grad in streams)
    entry = next((grad for path, grad in streams if path == f"{_writer(reading)}.embed"), None)
    each = torch.zeros(len(reading.tokens)) if entry is None else entry[0].norm(dim=-1)
    total = math.sqrt(sum(size * size for size in sizes))
    return Gradients(value, of, total, norms, flow, reading.tokens, each.numpy())


def _writer(reading: Reading) -> str:
    return "decoder" if reading.model.decoder is not None else "encoder"


def _stations(reading: Reading) -> list[tuple[str, nn.Module]]:
    """The embedding and the layers of each stack."""
    sides = [(side, getattr(reading.model, side)) for side in ("encoder", "decoder")]
    return [
        (path, module)
        for side, stack in sides
        if stack is not None
        for path, module in [(f"{side}.embed", stack.embed)]
        + [(f"{side}.layers.{n}", layer) for n, layer in enumerate(stack.layers)]
    ]


def _listener(path: str, heard: list[tuple[str, Tensor]]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        heard.append((path, output))
        return output

    return hook


# ---------------------------------------------------------------------------------------------------------- NaN and inf


def first_bad(model: Any, text: Any, target: Any = None) -> Spoilt | None:
    """The innermost module that first writes NaN or infinity from inputs that had none; None where all is well."""
    reading = read(model, text, target)
    found: list[Spoilt] = []

    def listen(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if found:
                return
            for out in tensors(output):
                if spoilt(out, minus=bool(path)) and not any(spoilt(came, False) for came in tensors((args, kwargs))):
                    rows = (~out.isfinite()).flatten(2).any(2).nonzero()[:5] if out.dim() > 2 else out.new_zeros(0, 2)
                    found.append(Spoilt(path, _word(out), tuple((int(r), int(c)) for r, c in rows)))
                    return

        return hook

    with still(reading.model), hooked(reading.model, listen):
        reading.answer()
    return found[0] if found else None
