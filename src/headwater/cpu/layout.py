"""ctypes definitions of the C structs and constants, and the check of a compiled library against them.

A struct is written down twice: in csrc/ for the compiler, and here for ctypes. Were the two to differ, C would read a
pointer where Python wrote a length. So each library exports a table of its structs and constants (csrc/layout.h), and
a library that differs from what is written here is refused before any of its functions is called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import NamedTuple

import torch

from headwater.errors import Unavailable
from headwater.i18n import _

# ---------------------------------------------------------------------------------------- training library: training.h

VECTOR_SIZE = 8  # floats of a vector
PANEL_COLUMNS = 16  # columns of a packed panel; rows of attention weights are padded to it
MOMENT_BLOCK_SIZE = 256  # 8-bit moments that share an exponent
MOMENT_DROPPED_BITS = 20  # low bits of a float32 that an 8-bit moment does not store
NONE, RELU, GELU, GELU_TANH, QUICK_GELU, SILU = range(6)  # activations
MASK_NONE, MASK_BOOL, MASK_FLOAT = range(3)  # attention masks

TWO_POW_32 = 2**32


class DropoutKey(ctypes.Structure):
    """Key of the counter-based dropout hash: an element is dropped if the hash of its index is below the threshold."""

    _fields_ = (("first", c_uint32), ("second", c_uint32), ("threshold", c_uint32), ("scale", c_float))

    @staticmethod
    def sample(p: float) -> DropoutKey:
        """A key from torch's generator, so that a seed, or a recomputed layer, brings the same dropout back."""
        if not p:
            return DropoutKey(0, 0, 0, 1.0)
        key = int(torch.randint(2**62, ()))
        return DropoutKey(key % TWO_POW_32, key // TWO_POW_32, max(1, round(p * TWO_POW_32)), 1 / (1 - p))


class CStrides(ctypes.Structure):
    """Strides of q, k, v or the output [B, H, S, D], in numbers; D is contiguous."""

    _fields_ = (("batch", c_int64), ("head", c_int64), ("position", c_int64))


class AttentionParams(ctypes.Structure):
    """Parameters of the attention kernels besides their tensors."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys", "head_dim")),
        *((name, c_int64) for name in ("back", "ahead", "block", "first_query", "leading_keys", "random_blocks")),
        ("scale", c_float),
        ("causal", c_int32),
        ("mask_type", c_int32),
        ("mask", c_void_p),
        ("mask_strides", c_int64 * 4),
        ("q_ids", c_void_p),
        ("k_ids", c_void_p),
        ("leading_bias", c_void_p),
        ("leading_bias_strides", c_int64 * 4),
        ("distance_bias", c_void_p),
        ("block_numbers", c_void_p),
        ("dropout", DropoutKey),
    )


class LinearAttentionParams(ctypes.Structure):
    """Parameters of the linear attention kernels besides their tensors."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "length", "key_dim", "value_dim")),
        ("eps", c_float),
        ("keep", c_void_p),
        ("document_ids", c_void_p),
    )


class FavorParams(ctypes.Structure):
    """Parameters of the FAVOR+ kernels besides their tensors."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "queries", "keys")),
        *((name, c_int64) for name in ("key_dim", "value_dim", "features")),
        ("root", c_float),
        ("eps", c_float),
        ("causal", c_int32),
        ("keep", c_void_p),
    )


class LSHParams(ctypes.Structure):
    """Parameters of the LSH attention kernels besides their tensors."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "length", "head_dim", "chunk", "before", "after", "rounds")),
        *((name, c_float) for name in ("scale", "itself", "eps")),
        ("causal", c_int32),
        ("order", c_void_p),
        ("keep", c_void_p),
        ("dropout", DropoutKey),
    )


class AdamWParams(ctypes.Structure):
    """Hyperparameters of one AdamW step, and the key of its stochastic rounding.

    inv_bias_correction1, inv_bias_correction2: 1 / (1 - beta ** step), the inverse of torch's bias corrections.
    """

    _fields_ = (
        *((name, c_float) for name in ("lr", "weight_decay", "beta1", "beta2", "eps")),
        *((name, c_float) for name in ("inv_bias_correction1", "inv_bias_correction2")),
        *((name, c_uint32) for name in ("first", "second")),
    )


TRAINING_STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    "DropoutKey": DropoutKey,
    "Strides": CStrides,
    "AttentionParams": AttentionParams,
    "LinearAttentionParams": LinearAttentionParams,
    "FavorParams": FavorParams,
    "LSHParams": LSHParams,
    "AdamWParams": AdamWParams,
}
TRAINING_CONSTANTS: Mapping[str, int] = {
    "VECTOR_SIZE": VECTOR_SIZE,
    "PANEL_COLUMNS": PANEL_COLUMNS,
    "BLOCK_SIZE": MOMENT_BLOCK_SIZE,
    "DROPPED_BITS": MOMENT_DROPPED_BITS,
    "NONE": NONE,
    "RELU": RELU,
    "GELU": GELU,
    "GELU_TANH": GELU_TANH,
    "QUICK_GELU": QUICK_GELU,
    "SILU": SILU,
    "MASK_NONE": MASK_NONE,
    "MASK_BOOL": MASK_BOOL,
    "MASK_FLOAT": MASK_FLOAT,
}

# ------------------------------------------------------------------- decode library: decode_step.c and quant_formats.h

BLOCK_SIZE = 32  # weights of a quantization block: columns come in whole blocks
FORMAT_CODES = {"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5}
BLOCK_BYTES = {"F32": 128, "F16": 64, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
NORM_CODES = {"RMS": 0, "LAYER": 1}
SOURCE_PANEL = 16  # source tokens, or columns of their values, that cross-attention in 16 bits reads at once
DECODE_ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "quick_gelu": 4}

BRANCHES = ("attn", "cross", "ffn")
LINEAR_NAMES = ("q", "k", "v", "out", "cross_q", "cross_out", "gate", "up", "down")


class CMatrix(ctypes.Structure):
    """A weight matrix [rows, cols] in one of the formats of FORMAT_CODES, its bias, and the changes of all adapters."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "rows", "cols")),
        *((name, c_void_p) for name in ("data", "bias", "changes")),
    )


class CLinearChange(ctypes.Structure):
    """What one adapter changes in one matrix (decode_adapters.h)."""

    _fields_ = (("rank", c_int32), *((name, c_void_p) for name in ("a", "b", "gain", "shift", "input_gain")))


class CNorm(ctypes.Structure):
    """A LayerNorm or an RMSNorm; without a weight there is none."""

    _fields_ = (("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p))


class CLayer(ctypes.Structure):
    """One layer: norms, weight matrices, attention window and its keys and values."""

    _fields_ = (
        *((branch + end, CNorm) for branch in BRANCHES for end in ("_norm", "_post")),
        ("q_norm", CNorm),
        ("k_norm", CNorm),
        *((name, CMatrix) for name in LINEAR_NAMES),
        ("window", c_int32),
        *((name, c_void_p) for name in ("keys", "values", "source_keys", "source_values")),
    )


SIZE_FIELDS = ("layers", "d_model", "heads", "kv_heads", "head_dim", "rotary_dim", "d_ff", "vocab", "length", "act")


class CModel(ctypes.Structure):
    """A decoder or an encoder: sizes, embeddings, head, layers, and the batch's maps of rows."""

    _fields_ = (
        *((name, c_int32) for name in (*SIZE_FIELDS, "max_source_length", "source_panels", "adapters", "max_rank")),
        *((name, c_float) for name in ("scale", "embed_scale", "head_scale")),
        ("token_embedding", CMatrix),
        ("head", CMatrix),
        *((name, c_void_p) for name in ("position_embeddings", "cos", "sin")),
        ("embed_norm", CNorm),
        ("final_norm", CNorm),
        ("layer", ctypes.POINTER(CLayer)),
        ("row_of_token", c_void_p),
        ("source_lengths", c_void_p),
    )


class CToken(ctypes.Structure):
    """A token of a step: its id, its position in its cache row, its source, the keys it sees, its adapter or -1."""

    _fields_ = tuple((name, c_int32) for name in ("token_id", "position", "cache_row", "source", "num_keys", "adapter"))


class CScratch(ctypes.Structure):
    """Addresses of the scratch buffers of a step, and the number of threads they were allocated for."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "qkv", "proj_in", "hidden", "scores", "panels")),
        *((name, c_void_p) for name in ("low_rank", "update", "q", "ds")),
        ("threads", c_int32),
    )


class CInt8Rows(ctypes.Structure):
    """Rows of int8 [rows, columns], the scale of each, and the sum of each where they are activations (int8.h)."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "scale", "sum")),
        *((name, c_int64) for name in ("rows", "columns")),
    )


DECODE_STRUCTS: Mapping[str, type[ctypes.Structure]] = {
    "Matrix": CMatrix,
    "LinearChange": CLinearChange,
    "Norm": CNorm,
    "Layer": CLayer,
    "Model": CModel,
    "Token": CToken,
    "Scratch": CScratch,
    "Int8Rows": CInt8Rows,
}
DECODE_CONSTANTS: Mapping[str, int] = {
    "BLOCK_SIZE": BLOCK_SIZE,
    "SOURCE_PANEL": SOURCE_PANEL,
    **FORMAT_CODES,
    **{f"{name}_BYTES": size for name, size in BLOCK_BYTES.items()},
    **NORM_CODES,
    **{name.upper(): code for name, code in DECODE_ACTIVATION_CODES.items()},
}

# ------------------------------------------------------------------------------------------------------------ the check


class LayoutMismatch(Unavailable):
    """A compiled library whose structs or constants differ from those that Python uses."""


class _LayoutEntry(ctypes.Structure):
    """A row of the table that a library exports: LayoutEntry of csrc/layout.h."""

    _fields_ = (("name", c_char_p), ("value", c_int64), ("size", c_int64))


class FieldLayout(NamedTuple):
    """Offset and size of a field, in bytes."""

    offset: int
    size: int


class Layout(NamedTuple):
    """What a library exports: values of constants, sizes of structs, and the fields of each struct by name."""

    constants: dict[str, int]
    sizes: dict[str, int]
    fields: dict[str, dict[str, FieldLayout]]


def read_layout(library: ctypes.CDLL) -> Layout:
    """The table of structs and constants that a compiled library exports."""
    table = library.layout
    table.restype = ctypes.POINTER(_LayoutEntry)
    layout = Layout({}, {}, {})
    for entry in _entries(table()):
        struct, _dot, field = entry.name.decode().partition(".")
        if field:
            layout.fields[struct][field] = FieldLayout(entry.value, entry.size)
        elif entry.size:
            layout.sizes[struct] = entry.size
            layout.fields[struct] = {}
        else:
            layout.constants[struct] = entry.value
    return layout


def _entries(table: ctypes._Pointer[_LayoutEntry]) -> Iterator[_LayoutEntry]:
    index = 0
    while table[index].name is not None:
        yield table[index]
        index += 1


def check_layout(layout: Layout, structs: Mapping[str, type[ctypes.Structure]], constants: Mapping[str, int]) -> None:
    """Refuse a library (LayoutMismatch) that differs in a constant, or in a struct's size, or in a field."""
    for difference in _differences(layout, structs, constants):
        raise LayoutMismatch(
            _(
                "the compiled C kernels do not fit this installation ({difference}); unset HEADWATER_CFLAGS, install "
                "headwater again, or set HEADWATER_FAST=0 to run without them",
                difference=difference,
            )
        )


def _differences(
    layout: Layout, structs: Mapping[str, type[ctypes.Structure]], constants: Mapping[str, int]
) -> Iterator[str]:
    """What differs, one per line: C's side and Python's."""
    for name, value in constants.items():
        if layout.constants.get(name) != value:
            yield f"{name} is {layout.constants.get(name)} in C and {value} in Python"

    for name, struct in structs.items():
        in_c = layout.fields.get(name, {})
        in_python = {field: _field_layout(struct, field) for field, *_rest in struct._fields_}
        for field in [*in_python, *(field for field in in_c if field not in in_python)]:
            ours = in_python.get(field)
            theirs = in_c.get(field)
            if ours != theirs:
                yield f"{name}.{field} is {_describe(theirs)} in C and {_describe(ours)} in Python"
        if layout.sizes.get(name) != ctypes.sizeof(struct):
            yield f"{name} has {layout.sizes.get(name)} bytes in C and {ctypes.sizeof(struct)} in Python"


def _field_layout(struct: type[ctypes.Structure], field: str) -> FieldLayout:
    descriptor = getattr(struct, field)
    return FieldLayout(descriptor.offset, descriptor.size)


def _describe(field: FieldLayout | None) -> str:
    return "missing" if field is None else f"{field.size} bytes at {field.offset}"
