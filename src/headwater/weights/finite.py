"""Weights must be numbers: a file with a NaN or an infinity in it is refused by the name of its tensor.

Every loader asks here before a tensor is put into a model. Quantised blocks are not widened for it: their small whole
numbers are always finite, so only the scales are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.weights.gguf_blocks import Kind

SCALES = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}  # half-precision numbers at the beginning of a block
EXPONENT = 0x7C00  # of a half: all ones in a NaN and in an infinity


def check_finite(tensor: Tensor, name: str, where: object) -> None:
    """Refuse a NaN or an infinity in a floating-point tensor."""
    if not is_finite(tensor):
        raise BadFile(f"{where}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run")


def check_scales(blocks: Tensor, kind: Kind, name: str, where: object) -> None:
    """Refuse a NaN or an infinity in the scales of packed blocks [rows, bytes of a row]."""
    halves = blocks.contiguous().view(torch.int16).view(-1, kind.size // 2)[:, : SCALES[kind.name]]
    if halves.numel() and int((halves & EXPONENT).max()) == EXPONENT:
        raise BadFile(f"{where}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run")


def is_finite(tensor: Tensor) -> bool:
    """One pass over memory: a sum is finite if all are. Where it is not (it may overflow), each one is looked at."""
    wide = tensor if tensor.dtype.itemsize > 2 else tensor.float()
    return bool(wide.sum().isfinite()) or bool(wide.isfinite().all())
