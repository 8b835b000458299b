"""GGUF files: metadata and tensors in one file, read by a bounded reader of our own.

    "GGUF"  version  tensor count  key count        then each key: name, type, value
    then each tensor: name, dimensions (fastest first), type, offset        then, aligned, the tensors' bytes

Every length is compared with the bytes that are left before anything is made of it; arrays do not nest. A tensor of
plain floats is a view of the file; a quantised one is unpacked to float32 when it is asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.weights.files import open_plain, shown
from headwater.weights.gguf_blocks import KINDS, Kind, unpacked
from headwater.weights.header import check_name
from headwater.weights.tensors import Tensors

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_KEYS, MOST_TENSORS, MOST_ITEMS, MOST_TEXT, MOST_DIMENSIONS = 10_000, 100_000, 1_000_000, 8 << 20, 4
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: its kind, its shape (slowest first), and its bytes within the file."""

    kind: Kind
    shape: tuple[int, ...]
    begin: int
    size: int


class GgufFile(Tensors):
    """One .gguf file, open for reading."""

    def __init__(self, path: str | Path):
        self.where = Path(path)
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise BadFile(f"{path}: not a GGUF file: it is too short to be one")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata, self.stored = _Reader(self._map, path).read()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, as float32 where it is quantised."""
        at = self.stored[name]
        if at.kind.dtype is not None:
            raw = self._bytes(at)
            aligned = raw.clone() if at.begin % at.kind.dtype.itemsize else raw
            return aligned.view(at.kind.dtype).view(at.shape)
        return unpacked(self.blocks(name), at.kind).view(at.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def outline(self, name: str) -> Tensor:
        at = self.stored[name]
        return torch.empty(at.shape, dtype=at.kind.dtype or torch.float32, device="meta")

    def blocks(self, name: str) -> Tensor:
        """The tensor as it is stored, [rows, bytes of a row], a view of the file: for kernels that read blocks."""
        at = self.stored[name]
        return self._bytes(at).view(math.prod(at.shape[:-1]), -1)

    def _bytes(self, at: Stored) -> Tensor:
        if not at.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=at.size, offset=at.begin)


class _Reader:
    """A place in the file that moves forward and never past the end."""

    def __init__(self, raw: mmap.mmap, where: object):
        self.raw, self.where, self.at = raw, where, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        if self.take(4) != MAGIC or (version := self.number("<I")) not in VERSIONS:
            big = self.raw[4:8] in (b"\0\0\0\x02", b"\0\0\0\x03")
            self.refuse("it is big-endian; convert it" if big else "not a GGUF file of version 2 or 3")
        del version
        tensors, keys = self.count(MOST_TENSORS, 24, "tensors"), self.count(MOST_KEYS, 12, "keys")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text(256)
            if key in metadata:
                self.refuse(f"the key {shown(key)} is written twice")
            metadata[key] = self.value(self.number("<I"))
        stored = self.table(tensors, metadata)
        return metadata, stored

    def table(self, count: int, metadata: dict[str, Any]) -> dict[str, Stored]:
        align = metadata.get("general.alignment", 32)
        if type(align) is not int or not 1 <= align <= 65_536 or align & (align - 1):
            self.refuse(f"general.alignment must be a power of two up to 65536, got {shown(align)}")
        rows = []
        for _ in range(count):
            rows.append((self.text(256), self.shape(), self.number("<I"), self.number("<Q")))
        data = -(-self.at // align) * align
        stored: dict[str, Stored] = {}
        for name, shape, code, offset in rows:
            if check_name(name, self.where) in stored:
                self.refuse(f"the tensor {shown(name)} is there twice")
            stored[name] = self.placed(name, shape, code, offset, data, align)
        self.check_apart(stored)
        return stored

    def shape(self) -> tuple[int, ...]:
        dimensions = self.number("<I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            self.refuse(f"a tensor must have 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}")
        return tuple(self.number("<Q") for _ in range(dimensions))[::-1]

    def placed(self, name: str, shape: tuple[int, ...], code: int, offset: int, data: int, align: int) -> Stored:
        kind = KINDS.get(code)
        if kind is None:
            known = ", ".join(kind.name for kind in KINDS.values())
            self.refuse(f"the tensor {shown(name)} is of type {code}, which is not read here; known: {known}")
        weights = math.prod(shape)
        if not 0 < weights < 1 << 48 or shape[-1] % kind.weights or offset % align:
            self.refuse(f"the tensor {shown(name)} {list(shape)} can not be {kind.name} at offset {offset}")
        size = weights // kind.weights * kind.size
        if data + offset + size > len(self.raw):
            self.refuse(f"cut short: {shown(name)} ends at byte {data + offset + size:,} of {len(self.raw):,}")
        return Stored(kind, shape, data + offset, size)

    def check_apart(self, stored: dict[str, Stored]) -> None:
        end = 0
        for name, at in sorted(stored.items(), key=lambda item: item[1].begin):
            if at.begin < end:
                self.refuse(f"the tensor {shown(name)} overlaps the one before it")
            end = at.begin + at.size

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text(MOST_TEXT)
        if kind != ARRAY:
            return self.items(kind, 1)[0].item()
        inner, count = self.number("<I"), self.number("<Q")
        if count > MOST_ITEMS:
            self.refuse(f"an array must have at most {MOST_ITEMS:,} items, this one claims {count:,}")
        if inner == STRING:
            return self.texts(count)
        return self.items(inner, count).tolist()

    def items(self, kind: int, count: int) -> np.ndarray:
        if kind not in NUMBERS:
            self.refuse(f"a value of type {kind} is not known (arrays of arrays are not read)")
        dtype = np.dtype(NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def count(self, most: int, least: int, what: str) -> int:
        found: int = self.number("<Q")
        if found > most or found * least > len(self.raw):
            self.refuse(f"must have at most {most:,} {what}, and room for them; it claims {found:,}")
        return found

    def text(self, most: int) -> str:
        length = self.number("<Q")
        if length > most:
            self.refuse(f"a text must have at most {most:,} bytes, this one claims {length:,}")
        return self.take(length).decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """Many texts: `text` in a plain loop, for a vocabulary has a hundred thousand of them."""
        self.need(8 * count)
        raw, at, end, found = self.raw, self.at, len(self.raw), []
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(raw[at:begin], "little")
            if at > end:
                self.refuse(f"cut short: a text is wanted up to byte {at:,} of {end:,}")
            found.append(raw[begin:at])
        self.at = at
        return [text.decode("utf-8", "replace") for text in found]

    def number(self, form: str) -> int:
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(found)

    def take(self, size: int) -> bytes:
        self.need(size)
        self.at += size
        return self.raw[self.at - size : self.at]

    def need(self, size: int) -> None:
        if size > len(self.raw) - self.at:
            self.refuse(f"cut short: {size:,} bytes are wanted at byte {self.at:,} of {len(self.raw):,}")

    def refuse(self, law: str) -> NoReturn:
        raise BadFile(f"{self.where}: {law}")
