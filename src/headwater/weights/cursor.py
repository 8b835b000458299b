"""ByteCursor: reads a binary file forward and never past its end; every problem is a BadFile that names the file."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import open_regular


def map_file(path: str | Path, min_bytes: int, kind: str) -> mmap.mmap:
    """A file of at least `min_bytes`, mapped copy-on-write: its tensors may change, the file does not."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size < min_bytes:
            raise BadFile(_("{path}: not {kind}: it is too short to be one", path=path, kind=kind))
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


class ByteCursor:
    """A position in a buffer. where: the file, for errors."""

    def __init__(self, buffer: mmap.mmap, where: object) -> None:
        self.buffer = buffer
        self.where = where
        self.position = 0

    def read_int(self, struct_format: str) -> int:
        """One number, by its code in the module struct."""
        (value,) = struct.unpack(struct_format, self.read_bytes(struct.calcsize(struct_format)))
        return int(value)

    def read_size(self, struct_format: str, maximum: int, what: str) -> int:
        """A count or a size from 0 to `maximum`."""
        value = self.read_int(struct_format)
        if not 0 <= value <= maximum:
            self.refuse(
                _("{what} must be from 0 to {maximum:,}, it is {value:,}", what=what, maximum=maximum, value=value)
            )
        return value

    def read_bytes(self, size: int) -> bytes:
        """The next bytes."""
        self.require_bytes(size)
        self.position += size
        return self.buffer[self.position - size : self.position]

    def skip_bytes(self, size: int) -> int:
        """The offset of the next `size` bytes, which are passed over."""
        self.require_bytes(size)
        self.position += size
        return self.position - size

    def require_bytes(self, size: int) -> None:
        """Refuse a file that has fewer bytes left."""
        if size > len(self.buffer) - self.position:
            self.refuse(
                _(
                    "cut short: {size:,} bytes are needed at byte {offset:,} of {file_size:,}",
                    size=size,
                    offset=self.position,
                    file_size=len(self.buffer),
                )
            )

    def refuse(self, problem: str) -> NoReturn:
        """Raise BadFile."""
        raise BadFile(_("{where}: {requirement}", where=self.where, requirement=problem))


def mapped_tensor(buffer: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
    """A tensor whose bytes are in the map; copied where they are not aligned."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
    aligned = raw.clone() if offset % dtype.itemsize else raw
    return aligned.view(dtype).view(shape)
