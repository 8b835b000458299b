"""Attention as the page asks for it: one pass over a text, then thumbnails, tiles and blocks of numbers on demand.

A pass over 1,000 tokens makes a gigabyte of weights in a small model, so no more than KEPT bytes of them are held. A
layer that was let go is worked out again when somebody looks at it. B bytes: 0 is no weight at all, 255 the largest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.errors import BadInput, Unavailable, nearest
from headwater.inspection.maps import Spot, hear, sides, spots
from headwater.inspection.patterns import MEASURES, SAYS, Head, Sums
from headwater.inspection.results import plain
from headwater.inspection.subjects import Reading
from headwater.inspection.words import Both
from headwater.serving.faults import Forgotten

KEPT, MOST_TRACES = 256 << 20, 8
THUMB, TILE, BLOCK = 28, 256, 1 << 16


@dataclass(frozen=True, eq=False)
class Headless(Reading):
    """A reading of which only the states are worked out: scores over a vocabulary would cost more than all the rest."""

    def answer(self) -> Any:
        with torch.inference_mode():
            return self.states()


@dataclass
class Kind:
    """All attentions of one kind: for each layer and head its largest weight, what it does, and a thumbnail."""

    shape: tuple[int, int, int]  # heads, queries, keys
    spots: list[Spot]
    most: list[list[float]]
    does: list[list[dict[str, Any]]]
    thumbs: list[Tensor]

    def plain(self) -> dict[str, Any]:
        heads, queries, keys = self.shape
        size = [min(queries, THUMB), min(keys, THUMB)]
        sizes = {"layers": len(self.spots), "heads": heads, "queries": queries, "keys": keys, "thumb": size}
        return {**sizes, "most": self.most, "patterns": self.does}


class Trace:
    def __init__(self, name: str, reading: Reading) -> None:
        self.name, self.reading = name, Headless(**vars(reading))
        self.kinds: dict[str, Kind] = {}
        self.held: OrderedDict[Spot, Tensor] = OrderedDict()
        self._run(spots(reading.model), first=True)
        if not self.kinds:
            raise Unavailable(
                Both(
                    "this model's attention has no weights to show: it never makes the matrix",
                    "这个模型的注意力没有权重可看：它从不算出那个矩阵",
                )
            )

    def _run(self, where: list[Spot], first: bool = False) -> None:
        """One pass. A layer is taken up when its last rows have come."""
        sums: dict[Spot, Sums] = {}
        parts: dict[Spot, list[Tensor]] = {}

        def receive(spot: Spot, row: int, weights: Tensor) -> None:
            sums.setdefault(spot, Sums(self.reading, spot)).add(row, weights)
            parts.setdefault(spot, []).append(weights.clone())
            queries = len(sides(self.reading, spot.kind)[0])
            if row + weights.shape[1] == queries:
                whole = torch.cat(parts.pop(spot), 1)
                if first:
                    self._describe(spot, whole, sums[spot])
                self._hold(spot, whole)

        hear(self.reading, where, receive)

    def _describe(self, spot: Spot, weights: Tensor, sums: Sums) -> None:
        heads, queries, keys = weights.shape
        known = self.kinds.setdefault(spot.kind, Kind((heads, queries, keys), [], [], [], []))
        known.spots.append(spot)
        known.most.append(weights.amax((1, 2)).tolist())
        known.does.append([_told(head) for head in sums.heads()])
        small = F.adaptive_max_pool2d(weights[None], (min(queries, THUMB), min(keys, THUMB)))[0]
        known.thumbs.append(torch.stack([as_bytes(one, float(one.max()), 0.5) for one in small]))

    def _hold(self, spot: Spot, weights: Tensor) -> None:
        self.held[spot] = weights
        while sum(w.numel() * 4 for w in self.held.values()) > KEPT and len(self.held) > 1:
            self.held.popitem(last=False)

    def layer(self, kind: str, layer: int) -> Tensor:
        """[H, Q, S], worked out again where it was let go."""
        if kind not in self.kinds:
            en = f"this model has no attention {kind[:40]!r}; {nearest(kind, self.kinds)}"
            raise BadInput(Both(en, f"这个模型没有 {kind[:40]!r} 这种注意力；有：{'、'.join(self.kinds)}"))
        where = self.kinds[kind].spots
        if not 0 <= layer < len(where):
            raise BadInput(
                Both(f"{kind} has {len(where)} layers, got {layer}", f"{kind} 有 {len(where)} 层，得到 {layer}")
            )
        if where[layer] not in self.held:
            self._run([where[layer]])
        self.held.move_to_end(where[layer])
        return self.held[where[layer]]

    def matrix(self, kind: str, layer: int, head: int) -> Tensor:
        """[Q, S] of one head; head -1 is the mean of all, -2 the largest of all."""
        weights = self.layer(kind, layer)
        if not -2 <= head < len(weights):
            raise BadInput(
                Both(f"{kind} has {len(weights)} heads, got {head}", f"{kind} 有 {len(weights)} 个头，得到 {head}")
            )
        return weights.mean(0) if head == -1 else weights.amax(0) if head == -2 else weights[head]

    def block(self, kind: str, layer: int, head: int, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """The numbers themselves, float32: rows and columns are [first, end)."""
        if (rows[1] - rows[0]) * (columns[1] - columns[0]) > BLOCK:
            raise BadInput(
                Both(f"a block may have {BLOCK} numbers; ask for fewer rows or columns", f"一块最多 {BLOCK} 个数")
            )
        return self.matrix(kind, layer, head)[slice(*rows), slice(*columns)]

    def tile(self, kind: str, layer: int, head: int, level: int, row: int, column: int, power: float) -> Tensor:
        """[≤ TILE, ≤ TILE] bytes; at level n a cell is the largest of 2ⁿ × 2ⁿ weights."""
        whole, size = self.matrix(kind, layer, head), TILE << level
        part = whole[row * size : (row + 1) * size, column * size : (column + 1) * size]
        if not part.numel():
            raise BadInput(
                Both(f"there is no tile {row}, {column} at level {level}", f"第 {level} 级没有 {row}, {column} 这一块")
            )
        if level:
            part = F.max_pool2d(part[None, None], 1 << level, ceil_mode=True)[0, 0]
        return as_bytes(part, float(whole.max()), power)

    def plain(self) -> dict[str, Any]:
        reading = self.reading
        tokens = {
            "tokens": labels(reading.tokens),
            "source": labels(reading.source),
            "follows": labels(reading.follows),
        }
        kinds = {name: kind.plain() for name, kind in self.kinds.items()}
        return {"trace": self.name, **tokens, "generated": reading.generated, "kinds": kinds}


def _told(head: Head) -> dict[str, Any]:
    """Its measures, and the name of the one that says what it does (near or mix where none does)."""
    measures = {name: plain(getattr(head, name)) for name in MEASURES}
    near = "near" if head.distance < 4 else "mix"  # cross-attention has no distance: NaN
    return {**measures, "does": next((name for name, (_, says) in SAYS.items() if says == head.does), near)}


def as_bytes(weights: Tensor, most: float, power: float) -> Tensor:
    """round(255 · (w / most) ^ power), but 0 only for what is 0: the least weight is told apart from none.

    >>> as_bytes(torch.tensor([0.0, 1e-9, 0.5, 1.0]), 1.0, 1.0).tolist()
    [0, 1, 128, 255]
    """
    share = (weights / most if most > 0 else weights).clamp(0, 1) ** power
    return torch.where(weights > 0, (255 * share).round().clamp(1, 255), 0).to(torch.uint8)


def labels(tokens: Any) -> list[dict[str, Any]]:
    """Tokens for the page: id, text as it is, a label for an axis, and how many tokens share the character."""
    return [{"id": t.id, "text": t.text, "label": t.label, "parts": t.parts} for t in tokens]


class Traces:
    """The last few, by a name that says all they were made of: the same text on the same model is traced once."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, Trace] = OrderedDict()

    def make(self, key: tuple[Any, ...], reading: Reading) -> Trace:
        ids = ([t.id for t in reading.tokens], [t.id for t in reading.source])
        name = hashlib.sha256(repr((key, ids)).encode()).hexdigest()[:20]
        if name not in self.held:
            self.held[name] = Trace(name, reading)
            while len(self.held) > MOST_TRACES:
                self.held.popitem(last=False)
        self.held.move_to_end(name)
        self._thin()
        return self.held[name]

    def _thin(self) -> None:
        """Only the last trace keeps its matrices; thumbnails of the others stay."""
        for trace in list(self.held.values())[:-1]:
            trace.held.clear()

    def get(self, name: str) -> Trace:
        if name not in self.held:
            raise Forgotten(Both("this picture is no longer kept; it is made anew", "这幅图已不再保留；正在重做"))
        return self.held[name]
