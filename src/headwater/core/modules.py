"""Small shared modules: Tap, a named hook point that costs nothing without hooks, Dropout, and eval_mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core import functional


class Tap(nn.Identity):
    """A hook point: returns its input. has_hooks tells its owner to compute this value for a forward hook."""

    @property
    def has_hooks(self) -> bool:
        return bool(self._forward_hooks)


class ComputedBuffers(nn.Module):
    """Base class of modules whose buffers are computed rather than learned or saved."""

    def init_buffers(self) -> None:
        """Fill the buffers."""

    def _apply(self, fn: Any, recurse: bool = True) -> ComputedBuffers:
        """As nn.Module, but computed buffers stay at least float32: bfloat16 cannot represent position 257."""
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            setattr(self, name, buffer.to(torch.promote_types(buffer.dtype, torch.float32)))
        with torch.no_grad():
            self.init_buffers()
        return self


class Dropout(nn.Dropout):
    """While training each value is 0 with probability p; the others are scaled by 1 / (1 - p)."""

    @property
    def rate(self) -> float:
        """p while training, else 0."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.rate)


@contextlib.contextmanager
def eval_mode(model: nn.Module, *, enable_grad: bool = False) -> Iterator[None]:
    """Evaluation mode (no dropout) in a block, without gradients unless enable_grad; then each mode is restored."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.set_grad_enabled(enable_grad):
            yield
    finally:
        for module, training in modes:
            module.training = training
