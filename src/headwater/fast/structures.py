"""The structures of step.c as ctypes sees them, field for field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p

CODES = {
    "F32": 0,
    "F16": 1,
    "BF16": 2,
    "Q8_0": 3,
    "Q4_0": 4,
    "Q4_1": 5,
}  # how a matrix is stored, as formats.h numbers it
PANEL, TILE = 16, 5  # rows of weights that panels.h lays side by side; rows of activations that meet them together
FEW = 4  # rows that each thread of step.c prepares for itself


class Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kind", "rows", "cols")),
        *((name, c_void_p) for name in ("data", "bias")),
    )


class Norm(ctypes.Structure):
    _fields_ = (("kind", c_int32), ("eps", c_float), ("weight", c_void_p), ("bias", c_void_p))


BRANCHES = ("attn", "cross", "ffn")
LINEARS = ("q", "k", "v", "out", "cross_q", "cross_out", "gate", "up", "down")


class Layer(ctypes.Structure):
    _fields_ = (
        *((branch + end, Norm) for branch in BRANCHES for end in ("_norm", "_post")),
        ("q_norm", Norm),
        ("k_norm", Norm),
        *((name, Matrix) for name in LINEARS),
        ("window", c_int32),
        *((name, c_void_p) for name in ("keys", "values", "source_keys", "source_values")),
    )


SIZES = ("layers", "d_model", "heads", "kv_heads", "head_dim", "turned", "d_ff", "vocab", "length", "act")


class Whole(ctypes.Structure):
    """The Model of step.c."""

    _fields_ = (
        *((name, c_int32) for name in (*SIZES, "heard")),
        *((name, c_float) for name in ("scale", "embed_scale", "head_scale")),
        ("table", Matrix),
        ("head", Matrix),
        *((name, c_void_p) for name in ("places", "cos", "sin")),
        ("embed_norm", Norm),
        ("final", Norm),
        ("layer", ctypes.POINTER(Layer)),
        ("home", c_void_p),
        ("source_length", c_void_p),
    )


class Token(ctypes.Structure):
    """The Row of step.c."""

    _fields_ = tuple((name, c_int32) for name in ("token", "place", "slot", "source", "sees"))


class Scratch(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "qkv", "mixed", "hidden", "scores", "panels", "q", "ds")),
        ("threads", c_int32),
    )
