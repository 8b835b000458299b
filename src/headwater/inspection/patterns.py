"""What each head does: where it looks, in numbers, and in a few words.

P [Q, S] are the weights of one head, rows that look, columns that are looked at. Row 0 of a causal model has no choice,
so means go over the rows from 1 on.

    self      mean P[i, i]            previous  mean P[i, i-1]         next   mean P[i, i+1], rows from 0
    first     mean P[i, 0]            last      mean P[i, S-1]
    same      mean weight on equal tokens elsewhere, beyond what those columns get from every row
    repeat    the same for what came after an earlier equal token      column  the most any column gets, in the mean
    entropy   mean -Σ P ln P          spread    mean entropy / ln(how many it sees)
    distance  mean Σ P |i - j|        peak      mean of the greatest weight          order   how far it walks along S
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from headwater.inspection.maps import Spot, chosen, hear, sides
from headwater.inspection.results import Result
from headwater.inspection.subjects import Reading, read

NOTHING = math.nan  # a mean over nothing: a text without repeated tokens, places in another text


@dataclass(frozen=True)
class Head:
    """One head in numbers; does: the same in words. See the top of the file for each."""

    kind: str
    layer: int
    head: int
    self: float
    previous: float
    next: float
    first: float
    last: float
    same: float
    repeat: float
    column: float
    entropy: float
    spread: float
    distance: float
    peak: float
    order: float
    does: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer}.{self.head}"


MEASURES = tuple(f.name for f in fields(Head) if f.type == "float")
SAYS = {  # a measure, the least it must be, and what it then means; the first that fits
    "previous": (0.4, "looks at the token before"),
    "next": (0.4, "looks at the token after"),
    "self": (0.5, "looks at itself"),
    "repeat": (0.3, "looks at what came after the same token earlier (induction)"),
    "same": (0.4, "looks at the same token elsewhere"),
    "first": (0.5, "rests on the first token"),
    "last": (0.5, "rests on the last token"),
    "column": (0.5, "rests on one token"),
    "order": (0.9, "walks along the source in order"),
    "spread": (0.9, "spreads over all it sees"),
    "peak": (0.6, "picks single tokens"),
}
RESTING = ("rests on the first token", "rests on the last token", "rests on one token", "spreads over all it sees")


def words(measures: dict[str, float]) -> str:
    for name, (least, says) in SAYS.items():
        if measures[name] >= least:
            return says
    near = measures["distance"]
    return f"looks nearby, {near:.1f} tokens away" if near < 4 else "mixes several tokens"


@dataclass(frozen=True, eq=False)
class Heads(Result):
    heads: tuple[Head, ...]

    def of(self, kind: str, layer: int, head: int) -> Head:
        return next(h for h in self.heads if (h.kind, h.layer, h.head) == (kind, layer, head))

    def worth(self, most: int = 6) -> list[Head]:
        """Heads worth a look: of each thing that heads do, the one that does it most, resting ones last."""
        best: dict[str, Head] = {}
        for head in sorted(self.heads, key=strength, reverse=True):
            best.setdefault(head.does.partition(",")[0], head)
        known = [says for _, says in SAYS.values() if says not in RESTING]
        order = {does: n for n, does in enumerate([*known, "looks nearby", "mixes several tokens", *RESTING])}
        return sorted(best.values(), key=lambda head: order[head.does.partition(",")[0]])[:most]

    def counts(self) -> dict[str, int]:
        """How many heads do each thing, the most frequent first."""
        said = [head.does.partition(",")[0] for head in self.heads]
        return dict(sorted(((does, said.count(does)) for does in set(said)), key=lambda item: (-item[1], item[0])))

    def lines(self) -> list[str]:
        made = [f"{head.name:<23}  {head.does} ({strength(head):.0%})" for head in self.worth()]
        return ["heads worth a look", *(f"  {line}" for line in made)]


def strength(head: Head) -> float:
    """The measure that decided what the head does."""
    return next((getattr(head, name) for name, (_, says) in SAYS.items() if says == head.does), head.peak)


def heads(
    model: Any,
    text: Any,
    target: Any = None,
    *,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
) -> Heads:
    """Every head in numbers and words; no weights are kept, so the text may be long."""
    reading = read(model, text, target)
    sums: dict[Spot, Sums] = {}

    def receive(spot: Spot, first: int, weights: Tensor) -> None:
        sums.setdefault(spot, Sums(reading, spot)).add(first, weights)

    hear(reading, chosen(reading.model, kinds, layers), receive)
    return Heads(tuple(head for total in sums.values() for head in total.heads()))


class Sums:
    """Sums over rows that come in parts; `heads` divides them."""

    def __init__(self, reading: Reading, spot: Spot) -> None:
        rows, columns = sides(reading, spot.kind)
        self.spot, self.square = spot, rows is columns
        self.q, self.k = (torch.tensor([token.id for token in side]) for side in (rows, columns))
        self.total: dict[str, Tensor] = {}
        self.count: dict[str, float] = {}
        self.walk: list[Tensor] = []
        self.got = torch.zeros(spot.heads, len(columns))  # what each column gets, of the rows that see it
        self.seen = torch.zeros(len(columns))
        self.wanted = {name: torch.zeros(len(columns)) for name in ("same", "repeat")}

    def add(self, first: int, weights: Tensor) -> None:
        """weights [H, rows, S] from row `first` on."""
        i, j = torch.arange(first, first + weights.shape[1])[:, None], torch.arange(weights.shape[2])[None]
        free = (i > 0) if len(self.q) > 1 else (i >= 0)
        entropy = -torch.special.xlogy(weights, weights).sum(2)
        seen = (weights > 0).sum(2)
        self.got += (weights * free).sum(1)
        seeable = (i >= j) | (self.spot.kind != "decoder.self_attn")
        self.seen += (seeable & free).sum(0)
        self._rows("entropy", entropy, free[:, 0])
        self._rows("spread", entropy / seen.clamp(min=2).log(), free[:, 0] & (seen > 1).any(0))
        self._rows("peak", weights.amax(2), free[:, 0])
        self._cells("first", weights, (j == 0) & free)
        self._cells("last", weights, (j == weights.shape[2] - 1) & free)
        self.walk.append((weights * j).sum(2))
        if self.square:
            self._cells("self", weights, (i == j) & free)
            self._cells("previous", weights, i - 1 == j)
            self._cells("next", weights, i + 1 == j)
            self._rows("distance", (weights * (i - j).abs()).sum(2), free[:, 0])
            same = (self.q[i] == self.k[j]) & (i != j) & seeable
            after = torch.zeros_like(same)
            after[:, 1:] = same[:, :-1] & (j < i)[:, :-1] & (i != j)[:, 1:]  # what came after an earlier equal token
            for name, cells in (("same", same), ("repeat", after)):
                self._rows(name, (weights * cells).sum(2), cells.any(1) & free[:, 0])
                self.wanted[name] += (cells & free).sum(0)

    def _rows(self, name: str, values: Tensor, rows: Tensor) -> None:
        """Add the values [H, rows] of the rows that count."""
        self.total[name] = self.total.get(name, 0) + values[:, rows].sum(1)
        self.count[name] = self.count.get(name, 0) + int(rows.sum())

    def _cells(self, name: str, weights: Tensor, cells: Tensor) -> None:
        self.total[name] = self.total.get(name, 0) + (weights * cells).sum((1, 2))
        self.count[name] = self.count.get(name, 0) + int(cells.sum())

    def heads(self) -> list[Head]:
        made = []
        order, mean = self._order(), self.got / self.seen.clamp(min=1)  # [H], [H, S]
        often = self.seen >= max(2.0, len(self.q) / 4)
        for head in range(self.spot.heads):
            found = {name: self._mean(name, head) for name in MEASURES} | {"order": float(order[head])}
            for name, cells in self.wanted.items():
                found[name] -= float(cells @ mean[head]) / max(self.count.get(name, 0), 1)
            found["column"] = float(mean[head][often].max()) if often.any() else NOTHING
            does = words({name: 0.0 if math.isnan(value) else value for name, value in found.items()})
            made.append(Head(self.spot.kind, self.spot.layer, head, **found, does=does))
        return made

    def _mean(self, name: str, head: int) -> float:
        return float(self.total[name][head]) / self.count[name] if self.count.get(name) else NOTHING

    def _order(self) -> Tensor:
        """The correlation of the row with the mean column it looks at; of cross-attention, where order means more."""
        walk = torch.cat(self.walk, 1)
        if self.square or walk.shape[1] < 3:
            return torch.full((walk.shape[0],), NOTHING)
        rows = torch.arange(walk.shape[1], dtype=torch.float32).expand_as(walk)
        a, b = (x - x.mean(1, keepdim=True) for x in (walk, rows))
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-9)
