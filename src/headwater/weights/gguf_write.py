"""Writing a GGUF file: metadata, then tensors as F32, F16 or Q8_0, one at a time."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from headwater.errors import BadSetting, nearest
from headwater.weights.files import atomic
from headwater.weights.gguf import ARRAY, MAGIC, STRING
from headwater.weights.gguf_blocks import BY_NAME, Kind, pack_q8_0
from headwater.weights.header import check_name
from headwater.weights.tensors import as_bytes, outline

ALIGN = 32
WRITABLE = ("F32", "F16", "Q8_0")
_UINT32, _INT32, _FLOAT32, _BOOL = 4, 5, 6, 7


def write_gguf(path: str | Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str = "F16") -> None:
    """Write a GGUF file. Vectors (norms, biases) are F32, as every reader expects; rows that do not fill blocks, F16.

    Python's values choose their types: bool, int (32 bits, signed in lists), float (32 bits), str, lists of one kind.
    """
    if kind not in WRITABLE:
        raise BadSetting(f"a GGUF file is written as {', '.join(WRITABLE)}, got {kind!r}; {nearest(kind, WRITABLE)}")
    plan = {check_name(name, path): _kind_of(outline(tensors, name), kind) for name in tensors}
    with atomic(path) as file:
        file.write(MAGIC + struct.pack("<IQQ", 3, len(plan), len(metadata)))
        for key, value in metadata.items():
            file.write(_text(key) + _value(value))
        offset = 0
        for name, stored in plan.items():
            shape = outline(tensors, name).shape
            file.write(
                _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), stored.code, offset)
            )
            size = shape.numel() // stored.weights * stored.size
            offset += size + -size % ALIGN
        _pad(file)
        for name, stored in plan.items():
            file.write(as_bytes(_packed(tensors[name], stored)))
            _pad(file)


def _kind_of(shape: Tensor, kind: str) -> Kind:
    if shape.dim() < 2:
        return BY_NAME["F32"]
    return BY_NAME["F16" if kind == "Q8_0" and shape.shape[-1] % 32 else kind]


def _packed(tensor: Tensor, kind: Kind) -> Tensor:
    return pack_q8_0(tensor.detach().cpu()) if kind.name == "Q8_0" else tensor.to(kind.dtype or torch.float32)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGN))


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """A type and a value."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    kinds = {type(item) for item in value}
    if kinds == {str}:
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_text, value))
    if kinds <= {int} or kinds == {float}:
        code, letter = (_FLOAT32, "f") if kinds == {float} else (_INT32, "i")
        return struct.pack(f"<IIQ{len(value)}{letter}", ARRAY, code, len(value), *value)
    raise BadSetting(f"GGUF metadata must be bool, int, float, str or a list of one of them, got {value!r}")
