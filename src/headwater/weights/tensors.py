"""safetensors files: checked by our own eyes, then mapped; each tensor is a view of the file until it is changed.

    8 bytes        N, the length of the header, little endian
    N bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, and "__metadata__": {str: str}
    the rest       the tensors' bytes, little endian, row by row, without holes

The map is copy-on-write: a tensor may be changed in place without touching the file; pages nobody reads cost nothing.
"""

from __future__ import annotations

import json
import mmap
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headwater.errors import Unavailable
from headwater.weights.files import atomic, open_plain
from headwater.weights.finite import is_finite
from headwater.weights.header import DTYPES, Entry, check_name, read_header


class Tensors(Mapping[str, Tensor]):
    """Named tensors, each made when it is asked for, so that a large file never needs a second copy of itself.

    `outline(name)` is the tensor on the meta device: its shape and dtype, without its bytes.
    """

    where: object = "tensors"

    @abstractmethod
    def outline(self, name: str) -> Tensor: ...

    def release(self, name: str) -> None:
        """The tensor was copied, so whatever memory holds it may be given back; it can be asked for again."""


def outline(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    return tensors.outline(name) if isinstance(tensors, Tensors) else tensors[name].to("meta")


class TensorFile(Tensors):
    """One .safetensors file, open for reading. Every refusal comes from the constructor; its tensors can not fail."""

    def __init__(self, path: str | Path):
        if sys.byteorder != "little":
            raise Unavailable("weight files are little endian, this machine is not; convert them on another one")
        self.where = Path(path)
        with open_plain(path) as file:
            self.start, self.entries, self.metadata = read_header(file, path)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        return from_bytes(self._map, entry, self.start + entry.begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def outline(self, name: str) -> Tensor:
        entry = self.entries[name]
        return torch.empty(entry.shape, dtype=_torch_dtype(entry.dtype), device="meta")

    def release(self, name: str) -> None:
        """Give back the pages that lie wholly within the tensor. A tensor that is still used must not be released."""
        entry = self.entries[name]
        first = -(-(self.start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        count = (self.start + entry.end) // mmap.PAGESIZE * mmap.PAGESIZE - first
        if count > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, count)


def from_bytes(buffer: mmap.mmap, entry: Entry, offset: int) -> Tensor:
    """The tensor that lies at `offset`: a view of the map wherever the processor can read it in place."""
    dtype = _torch_dtype(entry.dtype)
    if entry.end == entry.begin:
        return torch.empty(entry.shape, dtype=dtype)
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=entry.end - entry.begin, offset=offset)
    if dtype is torch.bool:  # any byte but 0 is true; a view would let a stranger make booleans that are neither
        return (raw != 0).view(entry.shape)
    if offset % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(entry.shape)


def write(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors as one file."""
    with atomic(path) as file:
        for piece in pieces(path, tensors, metadata):
            file.write(piece)


def pieces(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file, a tensor at a time. The largest items come first: each lies where its dtype wants it."""
    names = sorted(tensors, key=lambda name: (-outline(tensors, name).dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name in names:
        check_name(name, path)
        flat = outline(tensors, name)
        begin, end = end, end + flat.numel() * flat.dtype.itemsize
        header[name] = {"dtype": _NAMES[flat.dtype], "shape": list(flat.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield as_bytes(tensors[name])


def as_bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in row order, as bytes."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def nonfinite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that hold a NaN or an infinity. Reads everything once."""
    return [name for name in tensors if not is_finite(tensors[name])]


def same(tensors: Mapping[str, Tensor], first: str, second: str) -> bool:
    """Are two stored tensors equal, bit for bit? This decides tying: the file knows, the flag only claims."""
    a, b = outline(tensors, first), outline(tensors, second)
    return a.shape == b.shape and a.dtype == b.dtype and as_bytes(tensors[first]) == as_bytes(tensors[second])


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch)
    return dtype


_NAMES = {_torch_dtype(name): name for name in DTYPES}
