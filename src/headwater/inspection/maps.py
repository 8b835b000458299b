"""Attention weights of every layer and head, with the tokens they lie between; and the alignment of a translation.

The weights are worked out beside the model, from the queries and keys it makes, a few rows at a time: its own pass
stays as it is, and no more than a few million weights exist before they are stored.
H heads, Q queries, S keys.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.attention import AttentionLayer
from headwater.errors import BadInput, BadSetting, nearest
from headwater.inspection.grouping import grouped, groups, visible
from headwater.inspection.results import Result
from headwater.inspection.subjects import Reading, Token, read, still

BUDGET = 1 << 28  # bytes of weights that are kept
TOGETHER = 1 << 22  # weights worked out at a time


@dataclass(frozen=True)
class Spot:
    """One attention in one pass. kind: its stack and role, decoder.cross_attn. layer: the step at which it runs.

    nth: how often its module ran before in the same pass; more than 0 only where layers share their weights.
    """

    kind: str
    layer: int
    path: str
    heads: int
    nth: int = 0


def spots(model: nn.Module) -> list[Spot]:
    """Every attention of a model, in the order they run."""
    found = []
    for side in ("encoder", "decoder"):
        stack: Any = getattr(model, side)
        order = stack.order if stack is not None else ()
        for step, index in enumerate(order):
            for role, module in stack.layers[index].named_modules():
                if isinstance(module, AttentionLayer):
                    nth, path = order[:step].count(index), f"{side}.layers.{index}.{role}"
                    found.append(Spot(f"{side}.{role}", step, path, module.heads, nth))
    return found


def chosen(
    model: nn.Module, kinds: Sequence[str] | None, layers: Sequence[int] | None, heads: Sequence[int] | None = None
) -> list[Spot]:
    """The spots asked for; a kind, layer or head that does not exist is refused with what does."""
    every = spots(model)
    for kind in kinds or ():
        known = {spot.kind for spot in every}
        if kind not in known:
            raise BadSetting(f"attention: there is no kind {kind!r} in this model; {nearest(kind, known)}")
    some = [spot for spot in every if kinds is None or spot.kind in kinds]
    for what, asked, count in (
        ("layer", layers, 1 + max((spot.layer for spot in some), default=0)),
        ("head", heads, max((spot.heads for spot in some), default=1)),
    ):
        for n in asked or ():
            if not 0 <= n < count:
                raise BadSetting(f"attention: {what} must be from 0 to {count - 1}, got {n}; choose one of them")
    return [spot for spot in some if layers is None or spot.layer in layers]


# ----------------------------------------------------------------------------------------------------- hearing weights

Receiver = Callable[[Spot, int, Tensor], None]  # the spot, the first row, weights [H, rows, S]


def hear(reading: Reading, where: Sequence[Spot], receive: Receiver) -> None:
    """Run the model once and hand over the weights at these spots, rows after rows."""
    asked = {(spot.path, spot.nth): spot for spot in where}
    with still(reading.model), contextlib.ExitStack() as hooks:
        for path in dict.fromkeys(spot.path for spot in where):
            kernel = reading.model.get_submodule(f"{path}.kernel")
            handle = kernel.register_forward_hook(_listener(path, asked, receive))
            hooks.callback(handle.remove)
        reading.states()


def _listener(path: str, asked: dict[tuple[str, int], Spot], receive: Receiver) -> Callable[..., None]:
    runs = 0

    def hook(kernel: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal runs
        spot, runs = asked.get((path, runs)), runs + 1
        if spot is not None:
            for first, weights in in_parts(kernel, *inputs[:4]):
                receive(spot, first, weights)

    return hook


def in_parts(kernel: Any, q: Tensor, k: Tensor, v: Tensor, sight: Any) -> Iterator[tuple[int, Tensor]]:
    """The kernel's own formula for some queries at a time: [H, rows, S] of the first row of the batch."""
    heard: list[Tensor] = []
    size = max(1, TOGETHER // (q.shape[1] * k.shape[2]))
    handle = kernel.weights.register_forward_hook(lambda tap, inputs, output: heard.append(output))
    try:
        for first in range(0, q.shape[2], size):
            rows = slice(first, first + size)
            some = q[:, :, rows]
            kernel.spelled_out(some, k, v, kernel.dense(some, sight.part(rows, slice(None))))
            yield first, heard.pop()[0].float()
    finally:
        handle.remove()


# -------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, eq=False)
class Map:
    """The heads of one attention. weights [H, Q, S], float32; or uint8 in steps of 1/255 where the text is long, and
    then perhaps the greatest of `pooled` × `pooled` neighbours.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    weights: np.ndarray
    pooled: int = 1

    def of(self, head: int | None = None) -> np.ndarray:
        """[Q, S] in float32; the mean of all heads where none is named."""
        if head is None:
            return self._floats(self.weights).mean(0)
        if head not in self.heads:
            raise BadSetting(f"attention: head {head} was not kept, {list(self.heads)} were; ask for it with heads=")
        return self._floats(self.weights[self.heads.index(head)])

    @staticmethod
    def _floats(weights: np.ndarray) -> np.ndarray:
        return weights / np.float32(255) if weights.dtype == np.uint8 else weights

    def tile(
        self,
        head: int | None = None,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        size: int | None = None,
    ) -> np.ndarray:
        """uint8: tokens rows[0] up to rows[1] against columns[0] up to columns[1], 255 is a weight of 1.

        size: at most so many cells a side; each is then the greatest weight of those it stands for.
        """
        whole = self.of(head)
        (a, b), (c, d) = (_cut(span, self.pooled, n) for span, n in zip((rows, columns), whole.shape, strict=True))
        part = whole[a:b, c:d]
        if size is not None and max(part.shape) > size:
            part = pool(torch.from_numpy(part)[None], math.ceil(max(part.shape) / size))[0].numpy()
        return to_bytes(part)


def _cut(span: tuple[int, int] | None, pooled: int, most: int) -> tuple[int, int]:
    return (0, most) if span is None else (span[0] // pooled, min(most, -(-span[1] // pooled)))


def to_bytes(weights: np.ndarray) -> np.ndarray:
    return np.rint(np.nan_to_num(weights) * 255).astype(np.uint8)


def pool(weights: Tensor, size: int) -> Tensor:
    """[H, Q, S] -> [H, ⌈Q/size⌉, ⌈S/size⌉], the greatest of each square."""
    return nn.functional.max_pool2d(weights, size, ceil_mode=True) if size > 1 else weights


@dataclass(frozen=True, eq=False)
class Attention(Result):
    """maps: one for each layer and kind that was asked for. tokens, source: what the rows and columns stand for."""

    tokens: tuple[Token, ...]
    source: tuple[Token, ...]
    maps: tuple[Map, ...]
    kept: str
    reading: Reading = field(repr=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map.kind for map in self.maps))

    def map(self, kind: str, layer: int) -> Map:
        found = next((m for m in self.maps if (m.kind, m.layer) == (kind, layer)), None)
        if found is None:
            known = [f"{m.kind} {m.layer}" for m in self.maps]
            raise BadSetting(f"attention: {kind} {layer} was not kept; {nearest(f'{kind} {layer}', known)}")
        return found

    def between(self, kind: str) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
        """The tokens of the rows, which look, and of the columns, which are looked at."""
        return sides(self.reading, kind)

    def lines(self) -> list[str]:
        many = [f"{kind}: {sum(m.kind == kind for m in self.maps)} layers" for kind in self.kinds]
        return [", ".join(many) + f"; {len(self.tokens)} tokens; weights {self.kept}"]


def sides(reading: Reading, kind: str) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
    first = reading.source if kind.startswith("encoder.") and reading.source else reading.tokens
    return first, reading.source if kind == "decoder.cross_attn" else first


class _Store:
    """Keeps weights as exactly as the budget allows."""

    def __init__(self, reading: Reading, where: Sequence[Spot], heads: Sequence[int] | None, budget: int) -> None:
        self.heads = {spot: [h for h in range(spot.heads) if heads is None or h in heads] for spot in where}
        self.shapes = {spot: [len(side) for side in sides(reading, spot.kind)] for spot in where}
        cells = sum(len(self.heads[spot]) * math.prod(self.shapes[spot]) for spot in where)
        self.exact = 4 * cells <= budget
        self.pooled = max(1, math.ceil(math.sqrt(cells / budget)))
        self.dtype = torch.float32 if self.exact else torch.uint8
        self.told = "exact" if self.exact else f"in steps of 1/255{f', pooled by {self.pooled}' * (self.pooled > 1)}"
        self.full: dict[Spot, Tensor] = {}
        self.edge: Tensor | None = None  # rows that do not fill a square yet

    def receive(self, spot: Spot, first: int, weights: Tensor) -> None:
        q, s = (-(-n // self.pooled) for n in self.shapes[spot])
        kept = self.full.setdefault(spot, torch.zeros(len(self.heads[spot]), q, s, dtype=self.dtype))
        weights = weights[self.heads[spot]]
        if self.edge is not None:
            first, weights = first - self.edge.shape[1], torch.cat((self.edge, weights), 1)
        whole = weights.shape[1] if self._ends(spot, first, weights) else weights.shape[1] // self.pooled * self.pooled
        self.edge = weights[:, whole:] if whole < weights.shape[1] else None
        if whole:
            part = pool(weights[:, :whole], self.pooled)
            at = first // self.pooled
            kept[:, at : at + part.shape[1]] = part if self.exact else (part * 255).round().to(torch.uint8)

    def _ends(self, spot: Spot, first: int, weights: Tensor) -> bool:
        return first + weights.shape[1] >= self.shapes[spot][0]

    def maps(self) -> tuple[Map, ...]:
        return tuple(
            Map(spot.kind, spot.layer, tuple(self.heads[spot]), kept.numpy(), self.pooled)
            for spot, kept in self.full.items()
        )


def attention(
    model: Any,
    text: Any,
    target: Any = None,
    *,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    budget: int = BUDGET,
) -> Attention:
    """The weights of every layer and head, or of those asked for; see Map for how a long text is kept in `budget`."""
    reading = read(model, text, target)
    store = _Store(reading, chosen(reading.model, kinds, layers, heads), heads, budget)
    hear(reading, list(store.heads), store.receive)
    return Attention(reading.tokens, reading.source, store.maps(), store.told, reading)


# ----------------------------------------------------------------------------------------------------------- alignment


@dataclass(frozen=True, eq=False)
class Alignment(Result):
    """Where the decoder looked while it wrote each token: cross-attention, the mean of its heads and layers.

    weights [W, S]; a character of several tokens is one row or one column.
    """

    written: tuple[str, ...]
    source: tuple[str, ...]
    weights: np.ndarray
    generated: bool

    def lines(self) -> list[str]:
        best = self.weights.argmax(1)
        pairs = (f"{w} ← {self.source[at]}" for w, at in zip(self.written, best, strict=True))
        return ["written ← looked at most: " + "   ".join(pairs)]


def alignment(model: Any, text: Any, target: Any = None, *, layers: Sequence[int] | None = None) -> Alignment:
    """The mean cross-attention of a translation, with the token that each row wrote."""
    reading = read(model, text, target)
    if not reading.source:
        raise BadInput("alignment: only an encoder-decoder has one, this model has one stack; use attention")
    where = chosen(reading.model, ["decoder.cross_attn"], layers)
    total = torch.zeros(len(reading.tokens), len(reading.source))

    def add(spot: Spot, first: int, weights: Tensor) -> None:
        total[first : first + weights.shape[1]] += weights.mean(0) / len(where)

    hear(reading, where, add)
    rows, columns = groups(reading.follows), groups(reading.source)
    mean = grouped(total.numpy(), rows, columns)
    written = tuple(visible(reading.follows, group) for group in rows)
    source = tuple(visible(reading.source, group) for group in columns)
    return Alignment(written, source, mean, reading.generated)
