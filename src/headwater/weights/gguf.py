"""GGUF files: a bounds-checked reader (metadata and memory-mapped tensors) and a writer (F32, F16, Q8_0).

    "GGUF"  version  tensor count  key count        then each key: name, type, value
    then each tensor: name, dimensions (fastest first), type, offset        then, aligned, the tensors' bytes

Every length is compared with the bytes that are left before anything is allocated; arrays do not nest. A tensor of
floats is a view of the file; a quantized one is dequantized to float32 on access.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.io.files import atomic_write, quote
from headwater.quantization.blocks import GGML_TYPES, GGML_TYPES_BY_NAME, GGMLType, dequantize, quantize_q8_0
from headwater.weights.cursor import ByteCursor, map_file, mapped_tensor
from headwater.weights.safetensors import LazyStateDict, check_tensor_name, meta_tensor, tensor_bytes

# -------------------------------------------------------------------------------------------------------------- reading

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_ARRAY_ITEMS = 1_000_000
MAX_STRING_BYTES = 8 << 20
MAX_DIMS = 4

# Types of metadata values.
STRING_TYPE = 8
ARRAY_TYPE = 9
SCALAR_DTYPES = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class GgufTensorInfo:
    """A stored tensor: its type, its shape (slowest dimension first), and its bytes within the file."""

    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile(LazyStateDict):
    """One .gguf file, memory-mapped: metadata, and tensors by name."""

    def __init__(self, path: str | Path):
        self.where = Path(path)
        self._map = map_file(path, 24, _("a GGUF file"))
        self.metadata, self.infos = _GgufReader(self._map, path).read()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor; a quantized one is dequantized to float32."""
        info = self.infos[name]
        dtype = info.ggml_type.dtype
        if dtype is None:
            return dequantize(self.quantized_blocks(name), info.ggml_type).view(info.shape)
        return mapped_tensor(self._map, dtype, info.shape, info.offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def meta_tensor(self, name: str) -> Tensor:
        info = self.infos[name]
        return torch.empty(info.shape, dtype=info.ggml_type.dtype or torch.float32, device="meta")

    def quantized_blocks(self, name: str) -> Tensor:
        """The stored bytes of a tensor, [rows, bytes per row], a view of the file: for kernels that read blocks."""
        info = self.infos[name]
        return self._raw_bytes(info).view(math.prod(info.shape[:-1]), -1)

    def _raw_bytes(self, info: GgufTensorInfo) -> Tensor:
        if not info.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=info.num_bytes, offset=info.offset)


class _GgufReader(ByteCursor):
    """Reads the metadata and the tensors' entries."""

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensorInfo]]:
        """The metadata and the tensors' entries."""
        if self.read_bytes(4) != MAGIC or self.read_int("<I") not in VERSIONS:
            big_endian = self.buffer[4:8] in (b"\0\0\0\x02", b"\0\0\0\x03")
            self.refuse(_("it is big-endian; convert it") if big_endian else _("not a GGUF file of version 2 or 3"))
        num_tensors = self.read_count(MAX_TENSORS, 24, "tensors")
        num_keys = self.read_count(MAX_KEYS, 12, "keys")

        metadata: dict[str, Any] = {}
        for _unused in range(num_keys):
            key = self.read_string(256)
            if key in metadata:
                self.refuse(_("the key {key} is written twice", key=quote(key)))
            metadata[key] = self.read_value(self.read_int("<I"))
        return metadata, self.read_tensor_infos(num_tensors, metadata)

    def read_tensor_infos(self, count: int, metadata: dict[str, Any]) -> dict[str, GgufTensorInfo]:
        """The tensors' entries; the data follows them, aligned."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 65_536 or alignment & (alignment - 1):
            self.refuse(_("general.alignment must be a power of two up to 65536, got {value}", value=quote(alignment)))
        entries = []
        for _unused in range(count):
            entries.append((self.read_string(256), self.read_shape(), self.read_int("<I"), self.read_int("<Q")))
        data_start = -(-self.position // alignment) * alignment

        infos: dict[str, GgufTensorInfo] = {}
        for name, shape, type_id, offset in entries:
            if check_tensor_name(name, self.where) in infos:
                self.refuse(_("the tensor {name} occurs twice", name=quote(name)))
            infos[name] = self.locate_tensor(name, shape, type_id, offset, data_start, alignment)
        self.check_no_overlap(infos)
        return infos

    def read_shape(self) -> tuple[int, ...]:
        """The dimensions of a tensor, slowest first."""
        num_dims = self.read_int("<I")
        if not 1 <= num_dims <= MAX_DIMS:
            self.refuse(
                _("a tensor must have 1 to {max_dims} dimensions, got {num_dims}", max_dims=MAX_DIMS, num_dims=num_dims)
            )
        return tuple(self.read_int("<Q") for _ in range(num_dims))[::-1]

    def locate_tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, data_start: int, alignment: int
    ) -> GgufTensorInfo:
        """Check a tensor's type, shape, offset and size against the file."""
        # type
        ggml_type = GGML_TYPES.get(type_id)
        if ggml_type is None:
            known = ", ".join(known_type.name for known_type in GGML_TYPES.values())
            self.refuse(
                _(
                    "the tensor {name} is of type {type_id}, which is not supported; known: {known}",
                    name=quote(name),
                    type_id=type_id,
                    known=known,
                )
            )

        # shape and alignment
        num_weights = math.prod(shape)
        if not 0 < num_weights < 1 << 48 or shape[-1] % ggml_type.block_size or offset % alignment:
            self.refuse(
                _(
                    "the tensor {name} {shape} cannot be {type_name} at offset {offset}",
                    name=quote(name),
                    shape=list(shape),
                    type_name=ggml_type.name,
                    offset=offset,
                )
            )

        num_bytes = num_weights // ggml_type.block_size * ggml_type.type_size
        begin = data_start + offset
        if begin + num_bytes > len(self.buffer):
            self.refuse(
                _(
                    "cut short: {name} ends at byte {end:,} of {file_size:,}",
                    name=quote(name),
                    end=begin + num_bytes,
                    file_size=len(self.buffer),
                )
            )
        return GgufTensorInfo(ggml_type, shape, begin, num_bytes)

    def check_no_overlap(self, infos: dict[str, GgufTensorInfo]) -> None:
        """No two tensors share a byte."""
        end = 0
        for name, info in sorted(infos.items(), key=lambda item: item[1].offset):
            if info.offset < end:
                self.refuse(_("the tensor {name} overlaps the one before it", name=quote(name)))
            end = info.offset + info.num_bytes

    def read_value(self, value_type: int) -> Any:
        """A metadata value: a scalar, a string, or an array of one of them."""
        if value_type == STRING_TYPE:
            return self.read_string(MAX_STRING_BYTES)
        if value_type != ARRAY_TYPE:
            return self.read_scalars(value_type, 1)[0].item()
        item_type = self.read_int("<I")
        count = self.read_int("<Q")
        if count > MAX_ARRAY_ITEMS:
            self.refuse(
                _(
                    "an array must have at most {max_items:,} items, this one claims {count:,}",
                    max_items=MAX_ARRAY_ITEMS,
                    count=count,
                )
            )
        if item_type == STRING_TYPE:
            return self.read_strings(count)
        return self.read_scalars(item_type, count).tolist()

    def read_scalars(self, value_type: int, count: int) -> np.ndarray:
        """Numbers of one type."""
        if value_type not in SCALAR_DTYPES:
            self.refuse(
                _("a value of type {value_type} is not supported (nor arrays of arrays)", value_type=value_type)
            )
        dtype = np.dtype(SCALAR_DTYPES[value_type])
        return np.frombuffer(self.read_bytes(count * dtype.itemsize), dtype)

    def read_count(self, maximum: int, min_bytes_each: int, noun: str) -> int:
        """A count that is at most `maximum`, and for which the file is large enough."""
        count = self.read_int("<Q")
        if count > maximum or count * min_bytes_each > len(self.buffer):
            self.refuse(
                _(
                    "must have at most {maximum:,} {what}, and be large enough for them; it claims {count:,}",
                    maximum=maximum,
                    what=noun,
                    count=count,
                )
            )
        return count

    def read_string(self, max_bytes: int) -> str:
        """A length and that many bytes of UTF-8."""
        length = self.read_int("<Q")
        if length > max_bytes:
            self.refuse(
                _(
                    "a text must have at most {maximum:,} bytes, this one claims {length:,}",
                    maximum=max_bytes,
                    length=length,
                )
            )
        return self.read_bytes(length).decode("utf-8", "replace")

    def read_strings(self, count: int) -> list[str]:
        """Many strings, in a loop without calls: a vocabulary has a hundred thousand of them."""
        self.require_bytes(8 * count)
        buffer = self.buffer
        position = self.position
        file_size = len(buffer)
        strings = []
        for _unused in range(count):
            begin = position + 8
            position = begin + int.from_bytes(buffer[position:begin], "little")
            if position > file_size:
                self.refuse(
                    _("cut short: a string ends at byte {end:,} of {file_size:,}", end=position, file_size=file_size)
                )
            strings.append(buffer[begin:position])
        self.position = position
        return [string.decode("utf-8", "replace") for string in strings]


# -------------------------------------------------------------------------------------------------------------- writing

ALIGNMENT = 32
WRITABLE_TYPES = ("F32", "F16", "Q8_0")
_UINT32 = 4
_INT32 = 5
_FLOAT32 = 6
_BOOL = 7


def write_gguf(
    path: str | Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], outtype: str = "F16"
) -> None:
    """Write a GGUF file. Vectors (norms, biases) are F32, as every reader expects; rows that do not fill blocks F16.

    Metadata types follow Python's: bool, int (32 bits, signed in lists), float (32 bits), str, lists of one type.
    """
    if outtype not in WRITABLE_TYPES:
        raise BadSetting(
            _(
                "a GGUF file is written as {writable}, got {kind!r}; {nearest}",
                writable=", ".join(WRITABLE_TYPES),
                kind=outtype,
                nearest=nearest(outtype, WRITABLE_TYPES),
            )
        )
    types = {check_tensor_name(name, path): _choose_ggml_type(meta_tensor(tensors, name), outtype) for name in tensors}
    with atomic_write(path) as file:
        # Header and metadata.
        file.write(MAGIC + struct.pack("<IQQ", 3, len(types), len(metadata)))
        for key, value in metadata.items():
            file.write(_encode_string(key) + _encode_value(value))

        # The tensors' entries.
        offset = 0
        for name, ggml_type in types.items():
            shape = meta_tensor(tensors, name).shape
            entry = struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), ggml_type.type_id, offset)
            file.write(_encode_string(name) + entry)
            num_bytes = shape.numel() // ggml_type.block_size * ggml_type.type_size
            offset += num_bytes + -num_bytes % ALIGNMENT

        # The tensors' data, aligned.
        _write_padding(file)
        for name, ggml_type in types.items():
            file.write(tensor_bytes(_convert_tensor(tensors[name], ggml_type)))
            _write_padding(file)


def _choose_ggml_type(meta: Tensor, outtype: str) -> GGMLType:
    if meta.dim() < 2:
        return GGML_TYPES_BY_NAME["F32"]
    if outtype == "Q8_0" and meta.shape[-1] % 32:
        return GGML_TYPES_BY_NAME["F16"]
    return GGML_TYPES_BY_NAME[outtype]


def _convert_tensor(tensor: Tensor, ggml_type: GGMLType) -> Tensor:
    if ggml_type.name == "Q8_0":
        return quantize_q8_0(tensor.detach().cpu())
    return tensor.to(ggml_type.dtype or torch.float32)


def _write_padding(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))


def _encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encode_value(value: Any) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING_TYPE) + _encode_string(value)
    item_types = {type(item) for item in value}
    if item_types == {str}:
        return struct.pack("<IIQ", ARRAY_TYPE, STRING_TYPE, len(value)) + b"".join(map(_encode_string, value))
    if item_types == {float}:
        return struct.pack(f"<IIQ{len(value)}f", ARRAY_TYPE, _FLOAT32, len(value), *value)
    if item_types <= {int}:
        return struct.pack(f"<IIQ{len(value)}i", ARRAY_TYPE, _INT32, len(value), *value)
    raise BadSetting(
        _("GGUF metadata must be bool, int, float, str or a list of one of them, got {value!r}", value=value)
    )
