"""Inputs and outputs of the modules of one layer, recorded by forward hooks while the model reads a text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.inspection.subjects import Reading, still


@dataclass(frozen=True)
class Call:
    """One call of a module: its positional inputs and its output [B, ...]."""

    inputs: tuple[Any, ...]
    output: Tensor


@dataclass(frozen=True)
class Calls:
    """of: the calls of the layer's modules by path. before: the layer before it. final_norm: that of the stack."""

    module: Any
    of: dict[str, Call]
    block: Call
    before: Call | None
    final_norm: Call

    def output(self, path: str) -> Tensor:
        """The output for the one text that was read, without the batch dimension."""
        return self.of[path].output[0]


def recorded(reading: Reading, stack: Any, layer: int) -> Calls:
    """Run the model once. A layer that several steps share is recorded at the step that is asked for."""
    block = stack.layers[stack.order[layer]]
    lists: dict[str, list[Call]] = {name: [] for name, _ in block.named_modules()}
    blocks: list[Call] = []
    final: list[Call] = []
    with still(reading.model), torch.inference_mode(), contextlib.ExitStack() as hooks:
        for name, module in block.named_modules():
            hooks.enter_context(_recording(module, lists[name]))
        for module in stack.layers:
            hooks.enter_context(_recording(module, blocks))
        hooks.enter_context(_recording(stack.final_norm, final))
        reading.states()
    nth = stack.order[:layer].count(stack.order[layer])
    of = {name: calls[nth] for name, calls in lists.items() if len(calls) > nth}
    return Calls(block, of, blocks[layer], blocks[layer - 1] if layer else None, final[-1])


@contextlib.contextmanager
def _recording(module: nn.Module, calls: list[Call]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda _, inputs, output: calls.append(Call(inputs, output)))
    try:
        yield
    finally:
        handle.remove()
