"""Rows of floats quantized to int8, and linear layers of such rows, in C."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.cpu.build import checked_ptr, decode_constants, decode_library, float_ptr
from headwater.cpu.layout import CInt8Rows


class QuantizedRows(NamedTuple):
    """int8 values [N, K], the scale [N] of each row: x = values · scale, and the sum [N] of its values (int32)."""

    values: Tensor
    scale: Tensor
    sum: Tensor


def int8_supported(x: Tensor) -> bool:
    """Whether C takes these activations: contiguous float32 in CPU memory, and nothing is recorded for gradients."""
    is_plain = type(x) is Tensor and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous()
    return is_plain and not (x.requires_grad and torch.is_grad_enabled()) and decode_library() is not None


def int8_linear_supported(columns: int) -> bool:
    """Whether C multiplies int8 rows of so many columns: in whole groups, on a processor with AVX-512 VNNI."""
    constants = decode_constants()
    in_groups = columns % constants["INT8_GROUP"] == 0 and columns <= constants["INT8_MAX_COLUMNS"]
    return bool(constants["HAVE_INT8_LINEAR"]) and in_groups


def quantize_rows(x: Tensor) -> QuantizedRows:
    """round(x / scale) with scale = max|x| / 127 of each row of x [N, K]."""
    library = decode_library()
    assert library is not None
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=torch.int8)
    scale = torch.empty(rows)
    total = torch.empty(rows, dtype=torch.int32)
    library.quantize_rows(
        ctypes.c_void_p(float_ptr(x, rows, columns)),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        ctypes.c_void_p(checked_ptr(values, torch.int8, rows, columns)),
        ctypes.c_void_p(float_ptr(scale, rows)),
        ctypes.c_void_p(checked_ptr(total, torch.int32, rows)),
        torch.get_num_threads(),
    )
    return QuantizedRows(values, scale, total)


def int8_linear(x: QuantizedRows, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, K] · Wᵀ + bias -> [N, M] for weights [M, K] of int8 and their scales [M]; see int8_linear_supported."""
    library = decode_library()
    assert library is not None and int8_linear_supported(weight.shape[1])
    rows, columns = x.values.shape
    outputs = len(weight)
    threads = torch.get_num_threads()
    constants = decode_constants()
    panel_bytes = constants["INT8_PANEL"] * columns if rows > constants["INT8_FEW_ROWS"] else 0
    panels = torch.empty(threads * panel_bytes, dtype=torch.uint8)
    y = torch.empty(rows, outputs)
    of_x = CInt8Rows(
        checked_ptr(x.values, torch.int8, rows, columns),
        float_ptr(x.scale, rows),
        checked_ptr(x.sum, torch.int32, rows),
        rows,
        columns,
    )
    of_weight = CInt8Rows(
        checked_ptr(weight, torch.int8, outputs, columns), float_ptr(weight_scale, outputs), None, outputs, columns
    )
    library.int8_linear(
        ctypes.byref(of_x),
        ctypes.byref(of_weight),
        ctypes.c_void_p(float_ptr(bias, outputs)),
        ctypes.c_void_p(float_ptr(y, rows, outputs)),
        ctypes.c_void_p(checked_ptr(panels, torch.uint8, threads * panel_bytes)),
        threads,
    )
    return y


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
