"""Gradient norms by parameter and layer; the first module that outputs NaN or infinity, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.modules import eval_mode
from headwater.i18n import _
from headwater.inspection.hooks import extract_logits
from headwater.inspection.inputs import ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.logit_lens import text_loss
from headwater.inspection.results import InspectionResult
from headwater.training.nonfinite import NonFinite, first_nonfinite_module, flatten_tensors, forward_hooks, is_nonfinite


@dataclass(frozen=True)
class ParameterGradient:
    """The norm of a parameter's gradient, and of the parameter."""

    path: str
    grad_norm: float
    weight_norm: float


@dataclass(frozen=True, eq=False)
class GradientFlow(InspectionResult):
    """Gradients of a text's loss.

    norms: by parameter, in the order of the model. flow: by layer, the root mean square over tokens of ‖∂loss/∂x‖ of
    the residual stream x. token_norms: ‖∂loss/∂embedding‖ of each input token of the stack before the head.
    """

    loss: float
    loss_name: str
    total_norm: float
    norms: tuple[ParameterGradient, ...]
    flow: tuple[tuple[str, float], ...]
    tokens: tuple[Token, ...]
    token_norms: np.ndarray

    @property
    def warning(self) -> str:
        """What is unusual about the gradients, as a message; "" if nothing is."""
        nonfinite = [norm.path for norm in self.norms if not math.isfinite(norm.grad_norm)]
        if nonfinite:
            return _(
                "the gradient of {path} is not finite; first_nonfinite names the module where it starts",
                path=nonfinite[0],
            )
        layers = [value for name, value in self.flow if "embed" not in name]
        if layers and min(layers) > 0 and max(layers) / min(layers) > 1e3:
            if layers[0] < layers[-1]:
                return _(
                    "the gradient vanishes in the backward pass: {last:.1e} at the last layer, {first:.1e} at "
                    "the first",
                    last=layers[-1],
                    first=layers[0],
                )
            return _(
                "the gradient explodes in the backward pass: {last:.1e} at the last layer, {first:.1e} at the first",
                last=layers[-1],
                first=layers[0],
            )
        zero_grad_paths = [norm.path for norm in self.norms if norm.grad_norm == 0]
        if zero_grad_paths:
            return _(
                "{count} parameters get no gradient, such as {path}",
                count=len(zero_grad_paths),
                path=zero_grad_paths[0],
            )
        return ""

    def lines(self) -> list[str]:
        largest = sorted(self.norms, key=lambda norm: -norm.grad_norm)[:3]
        paths = ", ".join(f"{norm.path} {norm.grad_norm:.2g}" for norm in largest)
        summary = _(
            "gradients of the {loss_name} ({loss:.3f}): norm {total_norm:.3g}; largest: {largest}",
            loss_name=self.loss_name,
            loss=self.loss,
            total_norm=self.total_norm,
            largest=paths or _("none"),
        )
        return [summary, self.warning] if self.warning else [summary]


def gradient_flow(model: ModelLike, text: TextLike, target: str | Iterable[int] | None = None) -> GradientFlow:
    """The gradient of a text's loss. Quantized weights have no gradient and are not listed."""
    # forward hooks capture the residual stream after the embedding and each layer
    inputs = tokenize_input(model, text, target)
    parameters = [(path, p) for path, p in inputs.model.named_parameters() if p.is_floating_point()]
    required_grad = [p.requires_grad for _, p in parameters]
    streams: list[tuple[str, Tensor]] = []
    handles = [module.register_forward_hook(_capture_hook(path, streams)) for path, module in _residual_modules(inputs)]

    # frozen parameters are differentiated too, and are frozen again afterwards
    try:
        with eval_mode(inputs.model, enable_grad=True):
            for _, p in parameters:
                p.requires_grad_(True)
            loss, loss_name = text_loss(inputs)
            tensors = [p for _, p in parameters] + [x for _, x in streams]
            grads = torch.autograd.grad(loss, tensors, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
        for (_, p), flag in zip(parameters, required_grad, strict=True):
            p.requires_grad_(flag)
    return _summarize(inputs, float(loss.detach()), loss_name, parameters, streams, list(grads))


def _summarize(
    inputs: TokenizedInput,
    loss: float,
    loss_name: str,
    parameters: list[tuple[str, nn.Parameter]],
    streams: list[tuple[str, Tensor]],
    grads: list[Tensor | None],
) -> GradientFlow:
    """The norms as a result. grads: those of the parameters, then those of the residual streams."""
    grad_norms = [0.0 if grad is None else float(grad.norm()) for grad in grads[: len(parameters)]]
    norms = tuple(
        ParameterGradient(path, grad_norm, float(p.detach().norm()))
        for (path, p), grad_norm in zip(parameters, grad_norms, strict=True)
    )
    stream_grads = {  # path -> [1, Q, D]
        path: grad for (path, _), grad in zip(streams, grads[len(parameters) :], strict=True) if grad is not None
    }
    flow = tuple((path, float(grad.norm(dim=-1).square().mean().sqrt())) for path, grad in stream_grads.items())
    embedding_grad = stream_grads.get(f"{_output_stack_name(inputs)}.embed")
    token_norms = torch.zeros(len(inputs.tokens)) if embedding_grad is None else embedding_grad[0].norm(dim=-1)
    total_norm = math.sqrt(sum(norm * norm for norm in grad_norms))
    return GradientFlow(loss, loss_name, total_norm, norms, flow, inputs.tokens, token_norms.numpy())


def _output_stack_name(inputs: TokenizedInput) -> str:
    return "decoder" if inputs.model.decoder is not None else "encoder"


def _residual_modules(inputs: TokenizedInput) -> list[tuple[str, nn.Module]]:
    """The embedding and the layers of each stack, by path."""
    modules: list[tuple[str, nn.Module]] = []
    for side in ("encoder", "decoder"):
        stack = getattr(inputs.model, side)
        if stack is not None:
            modules.append((f"{side}.embed", stack.embed))
            modules += [(f"{side}.layers.{n}", layer) for n, layer in enumerate(stack.layers)]
    return modules


def _capture_hook(path: str, captured: list[tuple[str, Tensor]]) -> Callable[..., Tensor]:
    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        captured.append((path, output))
        return output

    return hook


# ---------------------------------------------------------------------------------------------------- NaN and infinity


def first_nonfinite(model: ModelLike, text: TextLike, target: str | Iterable[int] | None = None) -> NonFinite | None:
    """The innermost module that first outputs NaN or infinity from finite inputs; None if all outputs are finite."""
    inputs = tokenize_input(model, text, target)
    with eval_mode(inputs.model):
        return first_nonfinite_module(inputs.model, inputs.forward, (1, len(inputs.tokens)))


class BackwardTrace:
    """Whether the gradients at the inputs and outputs of each module call are finite.

    embeddings: the first vectors computed from ids [B, L], to differentiate outputs with respect to tokens.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.size = torch.Size((rows, length))
        self.calls: list[tuple[str, list[int], list[int]]] = []  # path, ids of the inputs, ids of the outputs
        self.keep_alive: list[Tensor] = []  # the id of a freed tensor may be reused by another
        self.is_finite: dict[int, bool] = {}
        self.embeddings: Tensor | None = None

    def record(self, model: nn.Module) -> AbstractContextManager[None]:
        """Record the forward pass of a with-block; the gradients are recorded in the backward pass."""
        return forward_hooks(model, self._hook)

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inputs = flatten_tensors((args, kwargs))
            outputs = flatten_tensors(output)
            embeds = any(t.is_floating_point() for t in outputs[:1]) and not any(t.is_floating_point() for t in inputs)
            if self.embeddings is None and embeds and outputs[0].shape[:2] == self.size:
                self.embeddings = outputs[0].requires_grad_()
            self.calls.append((path, self._track(inputs), self._track(outputs)))

        return hook

    def _track(self, tensors: list[Tensor]) -> list[int]:
        for t in tensors:
            if t.requires_grad and id(t) not in self.is_finite:
                self.keep_alive.append(t)
                self.is_finite[id(t)] = True
                t.register_hook(partial(self._record_grad, id(t)))
        return [id(t) for t in tensors if t.requires_grad]

    def _record_grad(self, key: int, grad: Tensor) -> None:
        self.is_finite[key] = not is_nonfinite(grad)

    def responsible_module(self) -> str | None:
        """The innermost module with finite gradients at its outputs and non-finite ones at its inputs; the last one."""
        paths = [
            path for path, inputs, outputs in self.calls if self._all_finite(outputs) and not self._all_finite(inputs)
        ]
        innermost = [path for path in paths if path and not any(other.startswith(path + ".") for other in paths)]
        if innermost:
            return innermost[-1]
        return paths[-1] if paths else None

    def _all_finite(self, keys: list[int]) -> bool:
        return all(self.is_finite[key] for key in keys)


def random_projection_loss(output: Any, seed: int) -> Tensor:
    """The dot product of all outputs with fixed random weights; non-finite values count as zero."""
    total = torch.zeros((), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for out in flatten_tensors(output) or [extract_logits(output)]:
        if out.is_floating_point() and out.requires_grad:
            weight = torch.randn(out.shape, generator=generator).to(out.device)
            total = total.to(out.device) + (torch.where(out.isfinite(), out, 0).float() * weight).sum()
    return total
