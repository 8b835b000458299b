"""Linear layers and tables whose weights stay packed: GGUF's blocks of 32, as they lie in the file.

    Q8_0   8 bits and a scale a block                int8, per group of 32
    Q4_0   4 bits and a scale                        int4
    Q4_1   4 bits, a scale and an offset             int4, the better one

A packed layer is the same function as a plain one with the widened weights. `pack` puts them into a model by path.
"""

from __future__ import annotations

import ctypes
import fnmatch
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.errors import BadInput, BadSetting, nearest
from headwater.fast.contract import MOST, matrix
from headwater.fast.library import library
from headwater.fast.structures import PANEL
from headwater.machine.pointers import Misfit, floats
from headwater.weights.gguf_blocks import KINDS, Kind, pack_q8_0, unpacked

PACKED: dict[str, Kind] = {kind.name: kind for kind in KINDS.values() if kind.name in ("Q8_0", "Q4_0", "Q4_1")}
BITS = {"int8": "Q8_0", "int4": "Q4_1"}
TOGETHER = 1 << 22  # weights widened at a time: 16 MB, whatever the size of the layer


class Packed(nn.Module):
    """rows × columns of weights in blocks: [rows, bytes of a row]."""

    blocks: Tensor

    def __init__(self, blocks: Tensor, kind: Kind) -> None:
        super().__init__()
        if blocks.dtype != torch.uint8 or blocks.dim() != 2 or not blocks.shape[1] or blocks.shape[1] % kind.size:
            want = f"uint8 [rows, a multiple of {kind.size} bytes]"
            raise Misfit(f"blocks of {kind.name} must be {want}, got {blocks.dtype} {list(blocks.shape)}")
        self.kind, self.rows, self.columns = kind, blocks.shape[0], blocks.shape[1] // kind.size * kind.weights
        self.register_buffer("blocks", blocks.contiguous())

    @property
    def weight(self) -> Tensor:
        """All of it in float32, made anew: for looking, not for running."""
        return self.widened(0, self.rows)

    @weight.setter
    def weight(self, weight: Tensor) -> None:
        """Tying a model's tables anew changes nothing here: those that are tied share their blocks."""

    def widened(self, first: int, last: int) -> Tensor:
        """Rows first to last in float32."""
        part, lib = self.blocks[first:last], library()
        if lib is None or part.device.type != "cpu":
            return unpacked(part, self.kind)
        out = torch.empty(len(part), self.columns)
        if len(part):
            given = matrix(part, self.kind.name, len(part), self.columns)
            to = ctypes.c_void_p(floats(out, len(part), self.columns))
            lib.widen(ctypes.byref(given), to, torch.get_num_threads())
        return out

    def extra_repr(self) -> str:
        return f"{self.rows} × {self.columns}, {self.kind.name}"


class PackedLinear(Packed):
    def __init__(self, blocks: Tensor, kind: Kind, bias: Tensor | None = None) -> None:
        super().__init__(blocks, kind)
        if bias is not None and bias.shape != (self.rows,):
            raise Misfit(f"a bias must have {self.rows} numbers, got {list(bias.shape)}")
        self.in_features, self.out_features = self.columns, self.rows
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        """x Wᵀ + b, W widened a few rows at a time."""
        if x.shape[-1:] != (self.columns,):
            raise BadInput(f"linear: the last dimension of x must be {self.columns}, got {list(x.shape)}; reshape x")
        if (y := self._product(x)) is not None:
            return y
        size = max(1, TOGETHER // self.columns)
        starts = range(0, self.rows, size)
        parts = [F.linear(x, self.widened(i, min(i + size, self.rows)).to(x.dtype)) for i in starts]
        y = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor | None:
        """The same in C, W widened into the nearest cache only; None where that cannot be done."""
        lib, bias = library(), None if self.bias is None else self.bias.contiguous()
        tensors = [x] if bias is None else [x, bias]
        plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
        learns = x.requires_grad or (bias is not None and bias.requires_grad and torch.is_grad_enabled())
        rows = x.numel() // self.columns
        if lib is None or not plain or learns or not 0 < rows < MOST or not self.rows:
            return None
        x, y, threads = x.contiguous(), torch.empty(*x.shape[:-1], self.rows), torch.get_num_threads()
        panels = torch.empty(threads, PANEL, self.columns)
        given = matrix(self.blocks, self.kind.name, self.rows, self.columns, bias)
        read = ctypes.byref(given), ctypes.c_void_p(floats(x, *x.shape)), rows
        written = ctypes.c_void_p(floats(y, *y.shape)), ctypes.c_void_p(floats(panels, *panels.shape))
        lib.product(*read, *written, threads)
        return y


class PackedTable(Packed):
    """An embedding: only the rows that are looked up are widened."""

    def __init__(self, blocks: Tensor, kind: Kind) -> None:
        super().__init__(blocks, kind)
        self.num_embeddings, self.embedding_dim = self.rows, self.columns

    def forward(self, ids: Tensor) -> Tensor:
        found = F.embedding(ids.flatten(), self.blocks)  # refuses ids as nn.Embedding does
        return unpacked(found, self.kind).view(*ids.shape, self.columns)


def pack(model: nn.Module, bits: str = "int8", where: Sequence[str] = ("*",)) -> list[str]:
    """Pack every linear layer and table whose path matches a pattern, in place; gives the paths. Ties stay.

    A layer is left alone where its width is no multiple of 32, and a table that no linear layer shares. A shared table
    has 8 bits at least: in four, every token would come in rounded (SmolLM2's perplexity: +6 % in place of none).
    """
    if bits not in BITS:
        raise BadSetting(f"bits must be int8 or int4, got {bits!r}; {nearest(bits, BITS)}")
    kind = PACKED[BITS[bits]]
    linears = {path: m for path, m in model.named_modules() if isinstance(m, nn.Linear)}
    chosen = [path for path in linears if any(fnmatch.fnmatchcase(path, pattern) for pattern in where)]
    if not chosen:
        known = ", ".join(list(linears)[:4])
        raise BadSetting(f"no linear layer matches {list(where)}; there are {len(linears)}, such as {known}")
    return [path for name in chosen if linears[name].in_features % 32 == 0 for path in _pack(model, name, kind)]


def _pack(model: nn.Module, name: str, kind: Kind) -> list[str]:
    """Pack one linear layer and the tables that share its weight."""
    linear: Any = model.get_submodule(name)
    weight, bias = linear.weight, linear.bias
    tables = [p for p, m in model.named_modules() if isinstance(m, nn.Embedding) and m.weight is weight]
    kind = PACKED[BITS["int8"]] if tables else kind
    blocks = PACKERS[kind.name](weight.detach())
    made: dict[str, nn.Module] = {name: PackedLinear(blocks, kind, None if bias is None else bias.detach())}
    made |= {path: PackedTable(blocks, kind) for path in tables}
    for path, module in made.items():
        put(model, path, module)
    return list(made)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def pack_q4_1(weights: Tensor) -> Tensor:
    """[..., n] -> [..., 20 n / 32] bytes: m = least, d = (most - least) / 15, q = (w - m) / d rounded."""
    blocks = weights.float().reshape(-1, 32)
    least, most = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    d = ((most - least) / 15).half()
    m = least.half()
    inverse = torch.where(d == 0, 0, 1 / d.float())
    q = ((blocks - m.float()) * inverse).round().clamp(0, 15).to(torch.uint8)
    nibbles = q[:, :16] | q[:, 16:] << 4
    packed = torch.cat((d.view(torch.uint8), m.view(torch.uint8), nibbles), 1)
    return packed.view(*weights.shape[:-1], -1)


PACKERS = {"Q8_0": pack_q8_0, "Q4_1": pack_q4_1}
