"""10. Weights in files: safetensors, read and written with NumPy alone.

    8 bytes     length of the header, little-endian
    header      JSON: {path: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}
    data        the arrays one after another, without gaps

Nothing in the header is believed before it is checked against the size of the file.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile
from headwater.reference.gradients import Array

KINDS: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
LONGEST_HEADER = 100_000_000


def read(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Every array of the file by its path. bfloat16, which NumPy lacks, becomes float32, whose upper half it is."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            _must(size >= 8 and length <= min(size - 8, LONGEST_HEADER), path, f"a header of {length} bytes in {size}")
            entries = _entries(file.read(length), path)
            _check(entries, size - 8 - length, path)
            arrays = {}
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                arrays[name] = _array(file.read(end - begin), entry)
            return arrays
    except OSError as error:
        raise BadFile(f"{path} must be a readable file, got: {error.strerror}; give a .safetensors file") from None


def write(path: str | os.PathLike[str], arrays: dict[str, Array]) -> None:
    """The file appears whole or not at all: it is written beside its place and then moved there."""
    codes = {kind: code for code, kind in KINDS.items() if code != "BF16"}
    entries, end = {}, 0
    for name, array in arrays.items():
        code = codes.get(array.dtype)
        if code is None:
            raise BadFile(f"{name} must be float16, float32 or float64 to be written, got {array.dtype}; convert it")
        entries[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the data begins at a multiple of 8
    beside = Path(f"{os.fspath(path)}.part")
    try:
        with open(beside, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                file.write(array.tobytes())
        os.replace(beside, path)
    except OSError as error:
        raise BadFile(f"{path} must be a place that can be written, got: {error.strerror}; choose another") from None


def _must(holds: bool, path: Any, came: str) -> None:
    if not holds:
        raise BadFile(f"{path} must be a whole safetensors file, got {came}; fetch or save it again")


def _entries(header: bytes, path: Any) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _must(len({name for name, _ in pairs}) == len(pairs), path, "a name that is given twice")
        return dict(pairs)

    try:
        entries = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise BadFile(f"{path} must begin with a JSON header, got something else; give a .safetensors file") from None
    _must(isinstance(entries, dict), path, "a header that is no table of names")
    entries.pop("__metadata__", None)
    return entries


def _check(entries: dict[str, Any], room: int, path: Any) -> None:
    """Every array lies in the file, takes as many bytes as its shape says, and begins where the one before it ends."""
    for name, entry in entries.items():
        whole = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        _must(whole, path, f"an entry for {name} without dtype, shape and data_offsets")
        kind, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
        _must(isinstance(kind, str) and kind in KINDS, path, f"{name} of type {kind!r}, not one of {', '.join(KINDS)}")
        _must(_counts(shape) and len(shape) <= 16, path, f"{name} of shape {str(shape)[:60]}")
        _must(
            _counts(span) and len(span) == 2 and span[0] <= span[1] <= room,
            path,
            f"{name} at {str(span)[:60]} of {room}",
        )
        bytes_ = math.prod(shape) * KINDS[kind].itemsize
        _must(span[1] - span[0] == bytes_, path, f"{name} of shape {shape} in {span[1] - span[0]} bytes, not {bytes_}")
    end = 0
    for begin, after in sorted(entry["data_offsets"] for entry in entries.values()):
        _must(begin == end, path, f"a gap or an overlap at byte {begin} of the data")
        end = after
    _must(end == room, path, f"{room} bytes of data of which {end} are named")


def _counts(value: object) -> bool:
    """A list of whole numbers from 0, none beyond what any array can have (True and 1.0 are none)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**40 for n in value)


def _array(data: bytes, entry: dict[str, Any]) -> Array:
    array = np.frombuffer(data, KINDS[entry["dtype"]]).copy()
    if entry["dtype"] == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(entry["shape"]) if array.size else np.zeros(0, array.dtype).reshape(entry["shape"])
