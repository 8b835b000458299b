"""Where a NaN or an infinity was born: the first module whose output is not finite though its input was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwater.training.spread import mine


def culprit(model: nn.Module, again: Callable[[], Tensor]) -> str:
    """In words. `again` repeats the forward pass that went wrong, with the same chance, and gives its loss."""
    found, loss = first_bad_output(model, again)  # always: where processes share a model, all of them go forward
    for path, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"the weights {path} hold NaN or inf"
    if found:
        return f"{found} gave NaN or inf from finite input"
    if not _finite(loss):
        return "the loss is NaN or inf, though every module's output is finite"
    return ""


def bad_gradient(model: nn.Module) -> str:
    """In words too: the first gradient that is not finite, where nothing on the way forward was to blame."""
    for path, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            return f"the gradient of {path} is NaN or inf"
    return ""


def first_bad_output(model: nn.Module, again: Callable[[], Tensor]) -> tuple[str, Tensor]:
    """The path of the innermost module that made it, or an empty word; and the loss."""
    found: list[str] = []

    def listen(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(map(_finite, _tensors(output))):
                found.append(path)  # inner modules end before outer ones, so the first heard is the innermost

        return hook

    handles = [m.register_forward_hook(listen(path)) for path, m in model.named_modules() if path]
    try:
        with torch.no_grad():
            loss = again()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "", loss


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _finite(tensor: Tensor) -> bool:
    tensor = mine(tensor)
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
