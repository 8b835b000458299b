"""Checks of weights: the memory a model needs, before anything is allocated, and tensors that must be finite."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from headwater.core import Model, Stack
from headwater.errors import BadFile, Unavailable
from headwater.i18n import _
from headwater.quantization.blocks import GGMLType

# --------------------------------------------------------------------------------------------------
# Check that a model fits into memory: its parameters are counted from the spec before it is built.


CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")


def check_memory(spec: Model, num_tensors: int, where: object) -> None:
    """Reject a model with more layers than the file has tensors, or with more weights than fit into memory."""
    num_layers = sum(len(stack.layers) for stack in _stacks(spec))
    if num_tensors < num_layers:
        raise BadFile(
            _(
                "{where}: config.json has {num_layers:,} layers, but the file holds only {num_tensors:,} tensors",
                where=where,
                num_layers=num_layers,
                num_tensors=num_tensors,
            )
        )
    count = count_parameters(spec)
    available = memory_limit()
    if 4 * count > available:
        raise Unavailable(
            _(
                "{where}: the model has {count:,} weights, {needed} in float32, and this machine has "
                "{available} of memory; choose a smaller model",
                where=where,
                count=count,
                needed=_format_gigabytes(4 * count),
                available=_format_gigabytes(available),
            )
        )


def count_parameters(spec: Model) -> int:
    """The number of parameters of a model, tied ones counted at each path; one layer per kind is built on meta."""
    one_of_each = replace(spec, tied=(), encoder=_distinct_layers(spec.encoder), decoder=_distinct_layers(spec.decoder))
    model = one_of_each.on_meta()
    total = _num_parameters(model)
    for side in ("encoder", "decoder"):
        if (stack := getattr(spec, side)) is not None:
            built = getattr(model, side)
            repeats = Counter(stack.layers)
            for kind, layer in zip(repeats, built.layers, strict=True):
                of_each_layer = (layer, *built.own_encodings(layer))
                total += (repeats[kind] - 1) * sum(map(_num_parameters, of_each_layer))
    return total


def _num_parameters(module: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in module.parameters())


def memory_limit() -> int:
    """Bytes of memory of the machine or the container; a very large number where the system does not report it."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
    limit = CGROUP_MEMORY_MAX.read_text().strip() if CGROUP_MEMORY_MAX.is_file() else "max"
    return min(physical, int(limit)) if limit.isdecimal() else physical


def _stacks(spec: Model) -> Iterator[Stack]:
    return (stack for stack in (spec.encoder, spec.decoder) if stack is not None)


def _distinct_layers(stack: Stack | None) -> Stack | None:
    return None if stack is None else replace(stack, layers=tuple(dict.fromkeys(stack.layers)), order=())


def _format_gigabytes(num_bytes: int) -> str:
    return _("{count:,.1f} GB", count=num_bytes / 1000000000.0)


# --------------------------------------------------------------------------------------------------
# Reject weights that hold NaN or infinity, before they are copied into a model.
#
# Every loader calls this before it puts a tensor into a model. Quantized blocks are not dequantized for the check:
# their integers are always finite, so only the scales are read.


SCALES_PER_BLOCK = {"Q8_0": 1, "Q4_0": 1, "Q4_1": 2}  # float16 scales at the start of a block
FLOAT16_EXPONENT_MASK = 0x7C00  # all ones in a NaN and in an infinity


def check_finite(tensor: Tensor, name: str, where: object) -> None:
    """Reject a floating-point tensor that holds NaN or infinity."""
    if not is_finite(tensor):
        raise BadFile(
            _(
                "{where}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run",
                where=where,
                name=name,
            )
        )


def check_finite_scales(blocks: Tensor, ggml_type: GGMLType, name: str, where: object) -> None:
    """Reject quantized blocks [rows, bytes per row] whose scales hold NaN or infinity."""
    words = blocks.contiguous().view(torch.int16).view(-1, ggml_type.type_size // 2)  # [blocks, 16-bit words]
    scales = words[:, : SCALES_PER_BLOCK[ggml_type.name]]
    if scales.numel() and int((scales & FLOAT16_EXPONENT_MASK).max()) == FLOAT16_EXPONENT_MASK:
        raise BadFile(
            _(
                "{where}: {name} holds NaN or infinity; the file is damaged or was saved from a broken run",
                where=where,
                name=name,
            )
        )


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite. A sum is finite only if they are; if it overflows, each is checked."""
    values = tensor if tensor.dtype.itemsize > 2 else tensor.float()
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
