"""Quantized linear and embedding layers: weights stay in GGUF blocks of 32 (Q8_0, Q4_0, Q4_1), dequantized on use.

    Q8_0   8 bits and a scale per block              int8, per group of 32
    Q4_0   4 bits and a scale                        int4
    Q4_1   4 bits, a scale and an offset             int4, the better one

A quantized layer computes what a plain one computes with the dequantized weights. `quantize` replaces the layers of a
model by path.
"""

from __future__ import annotations

import ctypes
import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.cpu.build import TensorMismatch, decode_constants, decode_library, float_ptr
from headwater.cpu.decode import MAX_SIZE, c_matrix
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.quantization.blocks import GGML_TYPES, GGMLType, dequantize, quantize_q8_0

BLOCK_FORMATS: dict[str, GGMLType] = {
    ggml_type.name: ggml_type for ggml_type in GGML_TYPES.values() if ggml_type.name in ("Q8_0", "Q4_0", "Q4_1")
}
FORMAT_FOR_BITS = {"int8": "Q8_0", "int4": "Q4_1"}
CHUNK_WEIGHTS = 1 << 22  # weights dequantized at a time: 16 MB, whatever the size of the layer


class QuantizedModule(nn.Module):
    """A weight matrix [rows, columns] in quantization blocks: uint8 [rows, bytes of a row]."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, block_format: GGMLType) -> None:
        super().__init__()
        if (
            blocks.dtype != torch.uint8
            or blocks.dim() != 2
            or not blocks.shape[1]
            or blocks.shape[1] % block_format.type_size
        ):
            expected = f"uint8 [rows, a multiple of {block_format.type_size} bytes]"
            raise TensorMismatch(
                f"blocks of {block_format.name} must be {expected}, got {blocks.dtype} {list(blocks.shape)}"
            )
        self.block_format = block_format
        self.rows = blocks.shape[0]
        self.columns = blocks.shape[1] // block_format.type_size * block_format.block_size
        self.register_buffer("blocks", blocks.contiguous())

    @property
    def weight(self) -> Tensor:
        """The dequantized weight in float32, computed at each access: for inspection, not for inference."""
        return self.dequantize_rows(0, self.rows)

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        """Tying embeddings again changes nothing here: quantized layers that are tied share their blocks."""

    def dequantize_rows(self, first: int, last: int) -> Tensor:
        """Rows first to last, dequantized to float32."""
        blocks = self.blocks[first:last]
        rows = len(blocks)
        library = decode_library()
        if library is None or blocks.device.type != "cpu":
            return dequantize(blocks, self.block_format)
        out = torch.empty(rows, self.columns)
        if rows:
            matrix = c_matrix(blocks, self.block_format.name, rows, self.columns)
            address = ctypes.c_void_p(float_ptr(out, rows, self.columns))
            library.dequantize(ctypes.byref(matrix), address, torch.get_num_threads())
        return out

    def extra_repr(self) -> str:
        return f"{self.rows} × {self.columns}, {self.block_format.name}"


class QuantizedLinear(QuantizedModule):
    """A linear layer with a quantized weight."""

    def __init__(self, blocks: Tensor, block_format: GGMLType, bias: Tensor | None = None) -> None:
        super().__init__(blocks, block_format)
        if bias is not None and bias.shape != (self.rows,):
            raise TensorMismatch(f"a bias must have {self.rows} numbers, got {list(bias.shape)}")
        self.in_features = self.columns
        self.out_features = self.rows
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, W dequantized a few rows at a time."""
        if x.shape[-1:] != (self.columns,):
            raise BadInput(
                _(
                    "linear: the last dimension of x must be {columns}, got {shape}; reshape x",
                    columns=self.columns,
                    shape=list(x.shape),
                )
            )
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _FrozenMatmul.apply(x, self)
            return y if self.bias is None else y + self.bias
        if (product := self._matmul(x, self.bias)) is not None:
            return product
        y = self._chunked_matmul(x)
        return y if self.bias is None else y + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        """x Wᵀ without the bias, and without a gradient."""
        with torch.no_grad():
            product = self._matmul(x, None)
            return self._chunked_matmul(x) if product is None else product

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        """grad W, the gradient of x: W dequantized a few rows at a time."""
        grad_x = grad.new_zeros(*grad.shape[:-1], self.columns)
        for rows in self._row_chunks():
            weight = self.dequantize_rows(rows.start, rows.stop).to(grad.dtype)
            grad_x.view(-1, self.columns).addmm_(grad[..., rows].flatten(0, -2), weight)
        return grad_x

    def _row_chunks(self) -> list[slice]:
        """Rows that are dequantized at a time."""
        size = max(1, CHUNK_WEIGHTS // self.columns)
        return [slice(start, min(start + size, self.rows)) for start in range(0, self.rows, size)]

    def _chunked_matmul(self, x: Tensor) -> Tensor:
        """x Wᵀ in torch."""
        parts = [F.linear(x, self.dequantize_rows(rows.start, rows.stop).to(x.dtype)) for rows in self._row_chunks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _matmul(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x Wᵀ + b in C, W dequantized into the L1 cache only; None where C does not support it."""
        library = decode_library()
        bias = None if bias is None else bias.contiguous()
        rows = x.numel() // self.columns
        tensors = [x] if bias is None else [x, bias]
        is_float32 = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if library is None or not is_float32 or needs_grad or not 0 < rows < MAX_SIZE or not self.rows:
            return None

        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], self.rows)
        threads = torch.get_num_threads()
        panels = torch.empty(threads, decode_constants()["PANEL_ROWS"], self.columns)
        matrix = c_matrix(self.blocks, self.block_format.name, self.rows, self.columns, bias)
        library.quantized_linear(
            ctypes.byref(matrix),
            ctypes.c_void_p(float_ptr(x, *x.shape)),
            rows,
            ctypes.c_void_p(float_ptr(y, *y.shape)),
            ctypes.c_void_p(float_ptr(panels, *panels.shape)),
            threads,
        )
        return y


class _FrozenMatmul(torch.autograd.Function):
    """x Wᵀ of a quantized W, which has no gradient: W is dequantized again in the backward pass, and never kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return layer.multiply(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.multiply_transposed(grad), None


class QuantizedEmbedding(QuantizedModule):
    """An embedding with a quantized weight: only the rows that are looked up are dequantized."""

    def __init__(self, blocks: Tensor, block_format: GGMLType) -> None:
        super().__init__(blocks, block_format)
        self.num_embeddings = self.rows
        self.embedding_dim = self.columns

    def forward(self, ids: Tensor) -> Tensor:
        blocks = F.embedding(ids.flatten(), self.blocks)  # refuses ids as nn.Embedding does
        return dequantize(blocks, self.block_format).view(*ids.shape, self.columns)


def quantize(model: nn.Module, bits: str = "int8", patterns: Sequence[str] = ("*",)) -> list[str]:
    """Quantize in place every linear layer whose path matches a pattern, and the embeddings tied to it; their paths.

    A layer whose width is not a multiple of 32 is left unchanged, and so is an embedding that is not tied. A tied one
    has at least 8 bits: with four, every input token would be rounded (SmolLM2's perplexity would rise by 6 %).
    """
    if bits not in FORMAT_FOR_BITS:
        raise BadSetting(
            _("bits must be int8 or int4, got {bits!r}; {nearest}", bits=bits, nearest=nearest(bits, FORMAT_FOR_BITS))
        )
    block_format = BLOCK_FORMATS[FORMAT_FOR_BITS[bits]]
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = [path for path in linears if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)]
    if not chosen:
        examples = ", ".join(list(linears)[:4])
        raise BadSetting(
            _(
                "no linear layer matches {where}; there are {num_linears}, such as {known}",
                where=list(patterns),
                num_linears=len(linears),
                known=examples,
            )
        )
    paths = []
    for name in chosen:
        if linears[name].in_features % 32 == 0:
            paths += _quantize_linear(model, name, block_format)
    return paths


def _quantize_linear(model: nn.Module, name: str, block_format: GGMLType) -> list[str]:
    """Quantize one linear layer and the embeddings that share its weight; their paths."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    weight = linear.weight
    bias = None if linear.bias is None else linear.bias.detach()
    tied = [path for path, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is weight]
    if tied:
        block_format = BLOCK_FORMATS[FORMAT_FOR_BITS["int8"]]
    blocks = QUANTIZERS[block_format.name](weight.detach())

    replace_module(model, name, QuantizedLinear(blocks, block_format, bias))
    for path in tied:
        replace_module(model, path, QuantizedEmbedding(blocks, block_format))
    return [name, *tied]


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module of a model at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def quantize_q4_1(weights: Tensor) -> Tensor:
    """Quantize [..., n] to Q4_1 [..., 20 n / 32] bytes: m = min, d = (max - min) / 15, q = (w - m) / d rounded."""
    blocks = weights.float().reshape(-1, 32)  # [N, 32]
    minimum = blocks.amin(1, keepdim=True)
    maximum = blocks.amax(1, keepdim=True)
    d = ((maximum - minimum) / 15).half()
    m = minimum.half()
    inverse = torch.where(d == 0, 0, 1 / d.float())
    q = ((blocks - m.float()) * inverse).round().clamp(0, 15).to(torch.uint8)
    nibbles = q[:, :16] | q[:, 16:] << 4
    packed = torch.cat((d.view(torch.uint8), m.view(torch.uint8), nibbles), 1)
    return packed.view(*weights.shape[:-1], -1)


QUANTIZERS = {"Q8_0": quantize_q8_0, "Q4_1": quantize_q4_1}
