"""10. Weight files: safetensors, read and written with NumPy only.

    8 bytes     length of the header, little-endian
    header      JSON: {path: {"dtype": "F32", "shape": [...], "data_offsets": [begin, end]}, ...}
    data        the arrays one after another, without gaps

The header is not trusted: every entry is checked against the size of the file first.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.reference.gradients import Array

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
MAX_HEADER_BYTES = 100_000_000


def read(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Read all arrays of a file by path. bfloat16, which NumPy lacks, is the upper half of a float32 and read so."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            _must(
                size >= 8 and length <= min(size - 8, MAX_HEADER_BYTES),
                path,
                _("a header of {length} bytes in {size}", length=length, size=size),
            )
            entries = _entries(file.read(length), path)
            _check(entries, size - 8 - length, path)
            arrays = {}
            for name, entry in entries.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                arrays[name] = _array(file.read(end - begin), entry)
            return arrays
    except OSError as error:
        raise BadFile(
            _(
                "{path} must be a readable file, got: {strerror}; give a .safetensors file",
                path=path,
                strerror=error.strerror,
            )
        ) from None


def write(path: str | os.PathLike[str], arrays: dict[str, Array]) -> None:
    """Write arrays as safetensors, atomically: into a temporary file in the same folder, which is then renamed."""
    # the header
    codes = {dtype: code for code, dtype in DTYPES.items() if code != "BF16"}
    entries = {}
    end = 0
    for name, array in arrays.items():
        code = codes.get(array.dtype)
        if code is None:
            raise BadFile(
                _(
                    "{name} must be float16, float32 or float64 to be written, got {dtype}; convert it",
                    name=name,
                    dtype=array.dtype,
                )
            )
        entries[name] = {"dtype": code, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the data begins at a multiple of 8

    # header and data
    temporary = Path(f"{os.fspath(path)}.part")
    try:
        with open(temporary, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                file.write(array.tobytes())
        os.replace(temporary, path)
    except OSError as error:
        raise BadFile(
            _(
                "{path} must be a path that can be written, got: {strerror}; choose another",
                path=path,
                strerror=error.strerror,
            )
        ) from None


def _must(condition: bool, path: Any, got: str) -> None:
    if not condition:
        raise BadFile(
            _("{path} must be a complete safetensors file, got {got}; fetch or save it again", path=path, got=got)
        )


def _entries(header: bytes, path: Any) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _must(len({name for name, _ in pairs}) == len(pairs), path, _("a name that occurs twice"))
        return dict(pairs)

    try:
        entries = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        raise BadFile(
            _("{path} must begin with a JSON header, got something else; give a .safetensors file", path=path)
        ) from None
    _must(isinstance(entries, dict), path, _("a header that is not a JSON object"))
    entries.pop("__metadata__", None)
    return entries


def _check(entries: dict[str, Any], data_bytes: int, path: Any) -> None:
    """Check the header: every array is in the file, has the bytes of its shape, and begins where the last one ends."""
    # each entry by itself
    for name, entry in entries.items():
        is_entry = isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}
        _must(is_entry, path, _("an entry for {name} without dtype, shape and data_offsets", name=name))
        dtype = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        _must(
            isinstance(dtype, str) and dtype in DTYPES,
            path,
            _("{name} of type {dtype!r}, not one of {known}", name=name, dtype=dtype, known=", ".join(DTYPES)),
        )
        _must(
            _are_sizes(shape) and len(shape) <= 16, path, _("{name} of shape {shape}", name=name, shape=str(shape)[:60])
        )
        _must(
            _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1] <= data_bytes,
            path,
            _("{name} at {offsets} of {data_bytes}", name=name, offsets=str(offsets)[:60], data_bytes=data_bytes),
        )
        bytes_ = math.prod(shape) * DTYPES[dtype].itemsize
        _must(
            offsets[1] - offsets[0] == bytes_,
            path,
            _(
                "{name} of shape {shape} in {offsets} bytes, not {bytes}",
                name=name,
                shape=shape,
                offsets=offsets[1] - offsets[0],
                bytes=bytes_,
            ),
        )

    # no gap and no overlap
    end = 0
    for begin, array_end in sorted(entry["data_offsets"] for entry in entries.values()):
        _must(begin == end, path, _("a gap or an overlap at byte {begin} of the data", begin=begin))
        end = array_end
    _must(
        end == data_bytes,
        path,
        _("{data_bytes} bytes of data of which {end} are named", data_bytes=data_bytes, end=end),
    )


def _are_sizes(value: object) -> bool:
    """Whether a value is a list of non-negative integers below 2⁴⁰ (True and 1.0 are not integers)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**40 for n in value)


def _array(data: bytes, entry: dict[str, Any]) -> Array:
    array = np.frombuffer(data, DTYPES[entry["dtype"]]).copy()
    if entry["dtype"] == "BF16":
        array = (array.astype("<u4") << 16).view("<f4")
    return array.reshape(entry["shape"]) if array.size else np.zeros(0, array.dtype).reshape(entry["shape"])
