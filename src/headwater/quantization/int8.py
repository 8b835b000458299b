"""Int8Linear: a linear layer whose weights and activations have 8 bits, for long inputs such as spectrograms.

    y = (q_x · q_Wᵀ) s_x s_W + b        q_x = round(x / s_x), s_x = max|x| / 127 of each token; s_W of each output

A product of int8 matrices costs a quarter of that of floats on a processor that has instructions for it. The blocks of
quantization/layers.py are for single tokens, where the time is that of reading the weights.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headwater.cpu.int8 import dequantize_rows, int8_linear, int8_linear_supported, int8_supported, quantize_rows
from headwater.quantization.layers import replace_module

LARGEST = 127  # of an int8
SMALLEST_SCALE = 1e-12  # of a token whose activations are all zero


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight [out, in], one scale for each output, and activations quantized by token."""

    quantized: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=SMALLEST_SCALE) / LARGEST
        self.register_buffer("quantized", (weight / scale[:, None]).round().to(torch.int8))  # [out, in]
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [out, in]."""
        return self.quantized.float() * self.scale[:, None]

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        """Tying embeddings again changes nothing: the embedding keeps its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]"""
        rows = x.reshape(-1, self.in_features)
        y = self._in_c(rows) if int8_supported(rows) else self._in_torch(rows)
        return y.view(*x.shape[:-1], self.out_features)

    def _in_torch(self, rows: Tensor) -> Tensor:
        """The formula."""
        token_scale = rows.abs().amax(1, keepdim=True).clamp(min=SMALLEST_SCALE) / LARGEST  # [N, 1]
        quantized = (rows / token_scale).round().to(torch.int8)
        y = int8_product(quantized, self.quantized.t()) * token_scale * self.scale
        return y if self.bias is None else y + self.bias

    def _in_c(self, rows: Tensor) -> Tensor:
        """The same in C; without AVX-512 VNNI the product is torch's, one pass over memory before it and one after."""
        x = quantize_rows(rows)
        bias = None if self.bias is None else self.bias.detach()
        if int8_linear_supported(self.in_features):
            return int8_linear(x, self.quantized, self.scale, bias)
        return dequantize_rows(int8_product(x.values, self.quantized.t()), x.scale, self.scale, bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, int8"


def int8_product(a: Tensor, b: Tensor) -> Tensor:
    """The product of int8 matrices [N, K] and [K, M] in int32."""
    return torch._int_mm(a, b)


def quantize_int8(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Replace in place every linear layer whose path matches a pattern, for inference; their paths."""
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    paths = [path for path in linears if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
    for path in paths:
        replace_module(model, path, Int8Linear(linears[path].weight, linears[path].bias))
    return paths
