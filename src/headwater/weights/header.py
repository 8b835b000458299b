"""The header of a safetensors file, checked before anything is mapped or allocated. No torch here.

Bounds, all compared in Python's unbounded integers:

    header          at most 16 MiB, and inside the file
    tensors         at most 100,000; entries of at most 16 commas each
    names           1 to 256 of A-Z a-z 0-9 _ . - : and never "..": a name is never used as a path
    dimensions      at most 8, none negative
    bytes           shape x item size = end - begin; the tensors tile the data exactly, to the last byte of the file
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from headwater.errors import BadFile, nearest
from headwater.weights.files import shown
from headwater.weights.strict_json import parse_object

MOST_BYTES, MOST_TENSORS, MOST_DIMENSIONS = 16 << 20, 100_000, 8
NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.:-]{0,255}", re.ASCII)


@dataclass(frozen=True)
class Dtype:
    torch: str  # its name there
    size: int  # bytes an element


DTYPES = {
    "F64": Dtype("float64", 8),
    "F32": Dtype("float32", 4),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "C64": Dtype("complex64", 8),
    "I64": Dtype("int64", 8),
    "I32": Dtype("int32", 4),
    "I16": Dtype("int16", 2),
    "I8": Dtype("int8", 1),
    "U64": Dtype("uint64", 8),
    "U32": Dtype("uint32", 4),
    "U16": Dtype("uint16", 2),
    "U8": Dtype("uint8", 1),
    "BOOL": Dtype("bool", 1),
}


@dataclass(frozen=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BinaryIO, where: object) -> tuple[int, dict[str, Entry], dict[str, str]]:
    """Where the data begins, what lies there, and the file's notes. Reads nothing but the header."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MOST_BYTES, size - 8):
        raise BadFile(
            f"{where}: not a safetensors file, or cut short: its header claims {length:,} bytes of {size:,} "
            f"(at most {MOST_BYTES:,}); fetch it again"
        )
    raw = file.read(length)
    if raw.count(b"{") > MOST_TENSORS + 2 or raw.count(b",") > 16 * raw.count(b"{") + 50_000:
        raise BadFile(f"{where}: the header must name at most {MOST_TENSORS:,} tensors, it holds more")
    header = parse_object(raw, where)
    metadata = _metadata(header.pop("__metadata__", {}), where)
    entries = {check_name(name, where): _entry(name, value, where) for name, value in header.items()}
    _check_tiling(entries, size - 8 - length, where)
    return 8 + length, entries, metadata


def check_name(name: str, where: object) -> str:
    if not NAME.fullmatch(name):
        raise BadFile(f"{where}: {shown(name)} is no name of a tensor; use letters, digits and _ . - : (at most 256)")
    return name


def _metadata(value: Any, where: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadFile(f"{where}: __metadata__ must map text to text")
    return value


def _entry(name: str, value: Any, where: object) -> Entry:
    def refuse(law: str) -> NoReturn:
        raise BadFile(f"{where}: tensor {shown(name)}: {law}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse("must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(f"dtype {shown(dtype)} is not known; {nearest(str(dtype)[:20], DTYPES)}")
    if not _sizes(shape) or len(shape) > MOST_DIMENSIONS:
        refuse(f"shape must be at most {MOST_DIMENSIONS} whole numbers, none negative, got {shown(shape)}")
    if not _sizes(offsets) or len(offsets) != 2:
        refuse(f"data_offsets must be two whole numbers, got {shown(offsets)}")
    need = math.prod(shape) * DTYPES[dtype].size
    if offsets[1] - offsets[0] != need:
        refuse(f"{dtype} {shown(shape)} needs {shown(need)} bytes, data_offsets give {shown(offsets[1] - offsets[0])}")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_tiling(entries: dict[str, Entry], size: int, where: object) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            kind = "overlaps the one before" if entry.begin < at else "leaves a hole before it"
            raise BadFile(f"{where}: tensor {shown(name)} {kind} (begins at {entry.begin:,}, must at {at:,}); damaged")
        at = entry.end
    if at != size:
        kind = "cut short" if at > size else "followed by bytes no tensor owns"
        raise BadFile(f"{where}: {kind}: the tensors need {at:,} bytes of data, the file has {size:,}; fetch it again")
