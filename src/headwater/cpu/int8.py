"""Rows of floats quantized to int8, and products of int8 matrices dequantized: one pass over memory each, in C."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.cpu.build import checked_ptr, decode_library, float_ptr


class QuantizedRows(NamedTuple):
    """int8 values [N, K] and the scale [N] of each row: x = values · scale."""

    values: Tensor
    scale: Tensor


def int8_supported(x: Tensor) -> bool:
    """Whether C takes these activations: contiguous float32 in CPU memory, and nothing is recorded for gradients."""
    is_plain = type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    return is_plain and not (x.requires_grad and torch.is_grad_enabled()) and decode_library() is not None


def quantize_rows(x: Tensor) -> QuantizedRows:
    """round(x / scale) with scale = max|x| / 127 of each row of x [N, K]."""
    library = decode_library()
    assert library is not None
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows)
    library.quantize_rows(
        ctypes.c_void_p(float_ptr(x, rows, columns)),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        ctypes.c_void_p(checked_ptr(values, torch.int8, rows, columns)),
        ctypes.c_void_p(float_ptr(scale, rows)),
        torch.get_num_threads(),
    )
    return QuantizedRows(values, scale)


def dequantize_rows(product: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None) -> Tensor:
    """product · row_scale · column_scale + bias: product [N, M] int32, in whose memory the floats are written."""
    library = decode_library()
    assert library is not None
    rows, columns = product.shape
    address = ctypes.c_void_p(checked_ptr(product, torch.int32, rows, columns))
    library.dequantize_rows(
        address,
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        ctypes.c_void_p(float_ptr(row_scale, rows)),
        ctypes.c_void_p(float_ptr(column_scale, columns)),
        ctypes.c_void_p(float_ptr(bias, columns)),
        address,
        torch.get_num_threads(),
    )
    return product.view(torch.float32)
