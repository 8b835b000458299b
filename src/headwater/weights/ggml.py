"""ggml files of Whisper, as whisper.cpp reads them: a bounds-checked reader and a writer.

    magic  eleven sizes (SIZES)  mel filters: rows, columns, floats  token count, then each: length, bytes
    then each tensor to the end of the file: dimensions, length of its name, type, sizes (fastest first), name, data

Convolution biases are stored as [n, 1]; vectors and position tables are float32, other tensors float16 or quantized.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headwater.i18n import _
from headwater.io.files import atomic_write, quote
from headwater.quantization.blocks import GGML_TYPES, GGMLType, dequantize
from headwater.weights.cursor import ByteCursor, map_file, mapped_tensor
from headwater.weights.safetensors import LazyStateDict

MAGIC = 0x67676D6C
SIZES = (
    "vocab", "audio_positions", "audio_width", "audio_heads", "audio_layers", "text_positions", "text_width",
    "text_heads", "text_layers", "mels", "type",
)  # fmt: skip
MAX_SIZE = 2**24
MAX_TENSORS = 10_000
MAX_DIMS = 4
MAX_NAME_BYTES = 256
MAX_TOKEN_BYTES = 4096
F32_TYPE = 0
F16_TYPE = 1


@dataclass(frozen=True)
class GgmlTensor:
    """A stored tensor: its type, its shape (slowest dimension first), and the offset of its bytes."""

    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int


class GgmlFile(LazyStateDict):
    """One ggml file, memory-mapped: sizes, token pieces, and tensors by name, quantized ones in float32."""

    def __init__(self, path: str | Path) -> None:
        self.where = Path(path)
        self._map = map_file(path, 4 * len(SIZES), _("a ggml file"))
        reader = _GgmlReader(self._map, path)
        self.sizes = reader.read_sizes()
        reader.skip_filters(self.sizes["mels"])
        self.pieces = reader.read_pieces()
        self._tensors = reader.read_tensors()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.ggml_type.dtype is not None:
            return mapped_tensor(self._map, tensor.ggml_type.dtype, tensor.shape, tensor.offset)
        rows = math.prod(tensor.shape[:-1])
        width = tensor.shape[-1] // tensor.ggml_type.block_size * tensor.ggml_type.type_size
        blocks = mapped_tensor(self._map, torch.uint8, (rows, width), tensor.offset)
        return dequantize(blocks, tensor.ggml_type).view(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def meta_tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return torch.empty(tensor.shape, dtype=tensor.ggml_type.dtype or torch.float32, device="meta")


class _GgmlReader(ByteCursor):
    """Reads the parts of the file in their order."""

    def read_sizes(self) -> dict[str, int]:
        """The sizes of the model."""
        if self.read_int("<I") != MAGIC:
            self.refuse(_("not a ggml file of Whisper"))
        return {name: self.read_size("<i", MAX_SIZE, name) for name in SIZES}

    def skip_filters(self, mels: int) -> None:
        """Pass over the mel filters: they are always the same."""
        rows = self.read_size("<i", 1024, _("the number of mel filters"))
        columns = self.read_size("<i", 1024, _("the width of the mel filters"))
        if rows != mels:
            self.refuse(_("it must have {mels} mel filters, it has {rows}", mels=mels, rows=rows))
        self.skip_bytes(4 * rows * columns)

    def read_pieces(self) -> list[bytes]:
        """The bytes of each token."""
        count = self.read_size("<i", MAX_SIZE, _("the number of tokens"))
        self.require_bytes(4 * count)
        sizes = (self.read_size("<i", MAX_TOKEN_BYTES, _("the length of a token")) for _unused in range(count))
        return [self.read_bytes(size) for size in sizes]

    def read_tensors(self) -> dict[str, GgmlTensor]:
        """The tensors' entries, to the end of the file."""
        tensors: dict[str, GgmlTensor] = {}
        while self.position < len(self.buffer):
            dims = self.read_size("<i", MAX_DIMS, _("the number of dimensions"))
            name_bytes = self.read_size("<i", MAX_NAME_BYTES, _("the length of a name"))
            type_id = self.read_int("<i")
            shape = tuple(self.read_size("<i", MAX_SIZE, _("a dimension")) for _unused in range(dims))[::-1]
            name = self.read_bytes(name_bytes).decode("utf-8", "replace")
            if name in tensors or len(tensors) >= MAX_TENSORS:
                self.refuse(_("the tensor {name} occurs twice", name=quote(name)))
            tensors[name] = self.read_tensor(name, shape, type_id)
        return tensors

    def read_tensor(self, name: str, shape: tuple[int, ...], type_id: int) -> GgmlTensor:
        """The entry of a tensor whose data begins here."""
        ggml_type = GGML_TYPES.get(type_id)
        count = math.prod(shape)
        if ggml_type is None or not shape or not count or shape[-1] % ggml_type.block_size:
            self.refuse(
                _("the tensor {name} {shape} cannot be of type {type_id}", name=quote(name), shape=list(shape),
                  type_id=type_id)
            )  # fmt: skip
        return GgmlTensor(ggml_type, shape, self.skip_bytes(count // ggml_type.block_size * ggml_type.type_size))


def is_ggml(path: Path) -> bool:
    """Whether a file begins as a ggml file does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == struct.pack("<I", MAGIC)


def write_ggml(
    path: str | Path, sizes: Mapping[str, int], filters: Tensor, pieces: Sequence[bytes], tensors: Mapping[str, Tensor]
) -> None:
    """Write a ggml file; matrices in float16, vectors and position tables in float32."""
    with atomic_write(path) as file:
        file.write(struct.pack(f"<I{len(SIZES)}i", MAGIC, *(sizes[name] for name in SIZES)))
        file.write(struct.pack("<2i", *filters.shape) + filters.float().numpy().tobytes())
        file.write(struct.pack("<i", len(pieces)))
        for piece in pieces:
            file.write(struct.pack("<i", len(piece)) + piece)
        for name, tensor in tensors.items():
            is_bias = name in ("encoder.conv1.bias", "encoder.conv2.bias")
            stored = tensor.detach()[:, None] if is_bias else tensor.detach()
            keeps = tensor.dim() < 2 or name.endswith("positional_embedding")
            array = stored.float().numpy().astype(np.float32 if keeps else np.float16)
            raw_name = name.encode()
            header = (array.ndim, len(raw_name), F32_TYPE if keeps else F16_TYPE, *reversed(array.shape))
            file.write(struct.pack(f"<{len(header)}i", *header) + raw_name + array.tobytes())
