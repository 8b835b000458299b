"""safetensors files: header validation, lazy memory-mapped reading, and writing.

    8 bytes        N, the length of the header, little endian
    N bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and "__metadata__": {str: str}
    the rest       the tensors' bytes, little endian, row-major, contiguous

The header is validated before anything is mapped or allocated, all in Python's unbounded integers:

    header          at most 16 MiB, and inside the file
    tensors         at most 100,000; entries of at most 16 commas each
    names           1 to 256 of A-Z a-z 0-9 _ . - : and never "..": a name is never used as a path
    dimensions      at most 8, none negative
    bytes           shape x item size = end - begin; the tensors tile the data exactly, to the last byte of the file

The map is copy-on-write: a tensor may be modified in place without touching the file; unread pages cost nothing.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from headwater.errors import BadFile, Unavailable, nearest
from headwater.i18n import _
from headwater.io.files import atomic_write, open_regular, quote
from headwater.io.strict_json import parse_json_object

# --------------------------------------------------------------------------------------------------------------- header

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 8
TENSOR_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.:-]{0,255}", re.ASCII)


@dataclass(frozen=True)
class DtypeInfo:
    """A dtype of the format: its name in torch and its bytes per element."""

    torch_name: str
    itemsize: int


DTYPES = {
    "F64": DtypeInfo("float64", 8),
    "F32": DtypeInfo("float32", 4),
    "F16": DtypeInfo("float16", 2),
    "BF16": DtypeInfo("bfloat16", 2),
    "F8_E4M3": DtypeInfo("float8_e4m3fn", 1),
    "F8_E5M2": DtypeInfo("float8_e5m2", 1),
    "C64": DtypeInfo("complex64", 8),
    "I64": DtypeInfo("int64", 8),
    "I32": DtypeInfo("int32", 4),
    "I16": DtypeInfo("int16", 2),
    "I8": DtypeInfo("int8", 1),
    "U64": DtypeInfo("uint64", 8),
    "U32": DtypeInfo("uint32", 4),
    "U16": DtypeInfo("uint16", 2),
    "U8": DtypeInfo("uint8", 1),
    "BOOL": DtypeInfo("bool", 1),
}


@dataclass(frozen=True)
class TensorInfo:
    """An entry of the header: dtype, shape, and the tensor's bytes [begin, end) within the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: BinaryIO, where: object) -> tuple[int, dict[str, TensorInfo], dict[str, str]]:
    """Read and validate the header: the offset of the data, the tensors' entries, and the metadata."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise BadFile(
            _(
                "{where}: not a safetensors file, or cut short: its header claims {length:,} bytes of "
                "{size:,} (at most {max_bytes:,}); fetch it again",
                where=where,
                length=length,
                size=size,
                max_bytes=MAX_HEADER_BYTES,
            )
        )
    raw = file.read(length)
    if raw.count(b"{") > MAX_TENSORS + 2 or raw.count(b",") > 16 * raw.count(b"{") + 50_000:
        raise BadFile(
            _(
                "{where}: the header must name at most {max_tensors:,} tensors, it holds more",
                where=where,
                max_tensors=MAX_TENSORS,
            )
        )
    header = parse_json_object(raw, where)
    metadata = _check_metadata(header.pop("__metadata__", {}), where)
    infos = {check_tensor_name(name, where): _parse_tensor_info(name, value, where) for name, value in header.items()}
    _check_contiguous(infos, size - 8 - length, where)
    return 8 + length, infos, metadata


def check_tensor_name(name: str, where: object) -> str:
    """The name itself, or a BadFile where it is not a valid tensor name."""
    if not TENSOR_NAME.fullmatch(name):
        raise BadFile(
            _(
                "{where}: {name} is not a valid tensor name; use letters, digits and _ . - : (at most 256)",
                where=where,
                name=quote(name),
            )
        )
    return name


def _check_metadata(value: Any, where: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadFile(_("{where}: __metadata__ must map text to text", where=where))
    return value


def _parse_tensor_info(name: str, value: Any, where: object) -> TensorInfo:
    """A checked entry of the header."""

    def refuse(problem: str) -> NoReturn:
        raise BadFile(_("{where}: tensor {name}: {requirement}", where=where, name=quote(name), requirement=problem))

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(_("must have exactly dtype, shape and data_offsets"))
    dtype = value["dtype"]
    shape = value["shape"]
    offsets = value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(_("dtype {dtype} is not known; {nearest}", dtype=quote(dtype), nearest=nearest(str(dtype)[:20], DTYPES)))
    if not _is_list_of_sizes(shape) or len(shape) > MAX_DIMS:
        refuse(
            _(
                "shape must be at most {max_dims} integers, none negative, got {shape}",
                max_dims=MAX_DIMS,
                shape=quote(shape),
            )
        )
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        refuse(_("data_offsets must be two integers, got {offsets}", offsets=quote(offsets)))

    # the size in bytes must follow from shape and dtype
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        refuse(
            _(
                "{dtype} {shape} needs {num_bytes} bytes, data_offsets give {offsets}",
                dtype=dtype,
                shape=quote(shape),
                num_bytes=quote(num_bytes),
                offsets=quote(offsets[1] - offsets[0]),
            )
        )
    return TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _check_contiguous(infos: dict[str, TensorInfo], data_size: int, where: object) -> None:
    """The tensors must tile the data: no overlap, no gap, no bytes left over."""
    position = 0
    for name, info in sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            problem = _("overlaps the one before") if info.begin < position else _("leaves a gap before it")
            raise BadFile(
                _(
                    "{where}: tensor {name} {problem} (begins at {begin:,}, must begin at {expected:,}); the "
                    "file is damaged",
                    where=where,
                    name=quote(name),
                    problem=problem,
                    begin=info.begin,
                    expected=position,
                )
            )
        position = info.end
    if position != data_size:
        problem = _("cut short") if position > data_size else _("followed by bytes that belong to no tensor")
        raise BadFile(
            _(
                "{where}: {problem}: the tensors need {end:,} bytes of data, the file has {size:,}; fetch it again",
                where=where,
                problem=problem,
                end=position,
                size=data_size,
            )
        )


# -------------------------------------------------------------------------------------------------------------- reading


class LazyStateDict(Mapping[str, Tensor]):
    """Named tensors, each created on access, so that a large file is never in memory twice.

    meta_tensor(name) is the tensor on the meta device: its shape and dtype, without its bytes.
    """

    where: object = "tensors"

    @abstractmethod
    def meta_tensor(self, name: str) -> Tensor: ...

    def release(self, name: str) -> None:
        """Free the memory behind a tensor that was copied; it can be accessed again."""


def meta_tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The tensor's shape and dtype, on the meta device, of any mapping."""
    return tensors.meta_tensor(name) if isinstance(tensors, LazyStateDict) else tensors[name].to("meta")


class SafetensorsFile(LazyStateDict):
    """One .safetensors file, memory-mapped. All validation is in the constructor; reading a tensor cannot fail."""

    def __init__(self, path: str | Path):
        if sys.byteorder != "little":
            raise Unavailable(_("weight files are little endian, this machine is not; convert them on another one"))
        self.where = Path(path)
        with open_regular(path) as file:
            self.data_start, self.infos, self.metadata = read_header(file, path)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        return tensor_from_buffer(self._map, info, self.data_start + info.begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def meta_tensor(self, name: str) -> Tensor:
        info = self.infos[name]
        return torch.empty(info.shape, dtype=_torch_dtype(info.dtype), device="meta")

    def release(self, name: str) -> None:
        """Free the pages that are entirely within the tensor. A tensor that is still used must not be released."""
        info = self.infos[name]
        first_page = -(-(self.data_start + info.begin) // mmap.PAGESIZE)
        end_page = (self.data_start + info.end) // mmap.PAGESIZE
        if end_page > first_page and hasattr(mmap, "MADV_DONTNEED"):
            num_bytes = (end_page - first_page) * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, first_page * mmap.PAGESIZE, num_bytes)


def tensor_from_buffer(buffer: mmap.mmap, info: TensorInfo, offset: int) -> Tensor:
    """The tensor at `offset` of a memory map: a view of the map, or a copy where it is not aligned."""
    dtype = _torch_dtype(info.dtype)
    if info.end == info.begin:
        return torch.empty(info.shape, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=info.end - info.begin, offset=offset)
    if dtype is torch.bool:  # any byte but 0 is true; a view could hold booleans that are neither 0 nor 1
        return (raw != 0).view(info.shape)
    if offset % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(info.shape)


# -------------------------------------------------------------------------------------------------------------- writing


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors as one file, atomically."""
    with atomic_write(path) as file:
        for chunk in serialize_safetensors(path, tensors, metadata):
            file.write(chunk)


def serialize_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, one tensor at a time. Largest item size first, so that every tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-meta_tensor(tensors, name).dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        check_tensor_name(name, path)
        meta = meta_tensor(tensors, name)
        begin = end
        end = begin + meta.numel() * meta.dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[meta.dtype], "shape": list(meta.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor in row-major order, as bytes."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return dtype


_DTYPE_NAMES = {_torch_dtype(name): name for name in DTYPES}
