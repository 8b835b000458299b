"""What step.c takes on trust, checked before it is called: shape, dtype, strides and bytes of all it will touch.

Structures with addresses in them are made here and nowhere else. The sizes come from whoever knows what C will read,
never from the tensor itself; a tensor that differs is a Misfit, and the modules do the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.fast.structures import CODES, FEW, PANEL, TILE, Matrix, Norm, Scratch, Whole
from headwater.machine.pointers import Misfit, floats, pointer

BLOCK = 32  # weights: columns come in whole blocks
BYTES = {"F32": 128, "F16": 64, "BF16": 64, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}  # of a block, as in formats.h
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # others are bytes
MOST = 2**31  # sizes are 32 bits wide


def matrix(data: Tensor, kind: str, rows: int, cols: int, bias: Tensor | None = None) -> Matrix:
    """rows × cols weights stored as `kind`, and a bias of `rows` floats."""
    if cols % BLOCK or not (0 < rows < MOST and 0 < cols < MOST):
        raise Misfit(f"C needs whole blocks of {BLOCK} columns, got {rows} × {cols}")
    width = cols if kind in DTYPES else cols // BLOCK * BYTES[kind]
    at = pointer(data, DTYPES.get(kind, torch.uint8), rows, width)
    return Matrix(CODES[kind], rows, cols, at, floats(bias, rows))


class Weights:
    """Weights of a model as step.c reads them. Holds on to the memory of every tensor whose address it has given."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def matrix(self, data: Tensor, kind: str, rows: int, cols: int, bias: Tensor | None = None) -> Matrix:
        bias = None if bias is None else self._hold(bias.float())
        return matrix(self._hold(data), kind, rows, cols, bias)

    def norm(self, norm: nn.LayerNorm | nn.RMSNorm, gain: Tensor, bias: Tensor | None, width: int) -> Norm:
        """A norm over `width` numbers; vectors that are stored in fewer bits are copied to float32."""
        gain = self._hold(gain.float())
        bias = None if bias is None else self._hold(bias.float())
        eps = float(norm.eps or 0.0)
        return Norm(int(isinstance(norm, nn.LayerNorm)), eps, floats(gain, width), floats(bias, width))

    def _hold(self, tensor: Tensor) -> Tensor:
        """A parameter may be given other memory while C runs (model.half()): what is held is the memory it has now."""
        self.held.append(tensor.detach())
        return self.held[-1]


class Room:
    """Scratch memory for a step: for so many rows and threads, at most `most` columns wide."""

    def __init__(self, whole: Whole, wide: int, most: int, rows: int, threads: int) -> None:
        self.rows = -(-max(rows, FEW * threads) // TILE) * TILE  # rounded rows lie by whole tiles
        self.threads, seen = threads, whole.length + whole.heard
        of_rows = {"x": whole.d_model, "y": most, "qkv": wide, "mixed": most, "hidden": 2 * whole.d_ff}
        sizes = {name: self.rows * width for name, width in of_rows.items()}
        sizes |= {"scores": threads * seen, "panels": threads * PANEL * most}
        sizes |= {"q": self.rows * most, "ds": self.rows * most // 16}
        self.held = {name: torch.zeros(n, dtype=torch.int8 if name == "q" else None) for name, n in sizes.items()}
        self.scratch = Scratch(
            **{name: pointer(t, t.dtype, sizes[name]) for name, t in self.held.items()}, threads=threads
        )

    def serves(self, rows: int, threads: int) -> bool:
        """C starts as many threads as the room was made for, so another number needs another room."""
        return rows <= self.rows and threads == self.threads


def check_sizes(whole: Whole) -> None:
    """What the step computes with besides its matrices."""
    if min(whole.heads, whole.kv_heads, whole.head_dim) < 1 or whole.heads % whole.kv_heads:
        raise Misfit(f"kv_heads must divide heads, got {whole.kv_heads} of {whole.heads}")
    if whole.turned % 2 or not 0 <= whole.turned <= whole.head_dim:
        raise Misfit(f"rotary must turn an even part of a head of {whole.head_dim}, got {whole.turned}")


class Bounds(NamedTuple):
    """How far the fields of a token may go."""

    tokens: int
    positions: int
    slots: int
    sources: int
    length: int


def check_tokens(given: Sequence[tuple[int, ...]], bounds: Bounds, crosses: bool) -> None:
    """Every token (id, position, slot, source, sees) lies within the table, the cache and the sources."""
    tokens, positions, slots, sources, length = bounds
    for token, position, slot, source, sees in given:
        inside = 0 <= token < tokens and 0 <= position < positions and 0 <= slot < slots and 0 <= sees <= length
        if not inside or (crosses and not 0 <= source < sources):
            raise Misfit(f"a token must lie within {bounds}, got {(token, position, slot, source, sees)}")


def check_asked(asked: Sequence[int], rows: int) -> None:
    """Rows whose scores are wanted: ascending, each once."""
    if asked and not (asked[0] >= 0 and asked[-1] < rows and all(a < b for a, b in pairwise(asked))):
        raise Misfit(f"the rows asked for must be ascending and below {rows}, got {list(asked[:8])}")


def check_within(values: Tensor, most: int) -> None:
    """Whole numbers from 0 to `most`."""
    if values.numel() and not 0 <= int(values.min()) <= int(values.max()) <= most:
        raise Misfit(f"C needs numbers from 0 to {most}, got {int(values.min())} to {int(values.max())}")
