"""Activation functions that the C kernels compute: the formula of each in torch, and its code."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.cpu.layout import GELU, GELU_TANH, QUICK_GELU, RELU, SILU


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))): within 5e-4 of the exact form, and not the same."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x)"""
    return x * torch.sigmoid(1.702 * x)


ACTIVATION_CODES: dict[Callable[[Tensor], Tensor], int] = {
    F.relu: RELU,
    F.gelu: GELU,
    gelu_tanh: GELU_TANH,
    quick_gelu: QUICK_GELU,
    F.silu: SILU,
}
