"""Which tokens made the model say that: an output's log p, shared out among the tokens that were read.

integrated   x · ∫₀¹ ∇f(a x) da: the parts add up to f(x) - f(0) (Sundararajan and others, 2017)
gradient     x · ∇f(x): one pass, a first look
blanked      f(x) - f(x with one token's vector zero): a pass a token, and no gradient that could mislead

x are the token vectors as they leave the table, before positions. A score says what the model's answer hangs on, not
that it is right. Deep models may be so rugged between 0 and x that integration does not come to rest: `gap` tells, and
`blanked` is then the better way. Attention weights are no such explanation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core.heads import ClassScores
from headwater.errors import BadInput, BadSetting, nearest
from headwater.inspection.results import Result
from headwater.inspection.scores import language, vocabulary
from headwater.inspection.subjects import Reading, Token, read, still
from headwater.inspection.surprise import last_place

WAYS = ("integrated", "gradient", "blanked")
ENOUGH, MOST_STEPS, TOGETHER = 0.05, 64, 1 << 11  # the gap allowed, the most steps, tokens read at a time


@dataclass(frozen=True, eq=False)
class Attribution(Result):
    """scores: what each token of `tokens` adds to log p of the output; source_scores: of `source`.

    value, baseline: log p as it is, and without any token. gap: |Σ scores - (value - baseline)| over their distance;
    NaN where the way promises no sum.
    """

    tokens: tuple[Token, ...]
    scores: np.ndarray
    source: tuple[Token, ...]
    source_scores: np.ndarray
    place: int
    output: str
    by: str
    value: float
    baseline: float
    gap: float
    steps: int

    def lines(self) -> list[str]:
        every = [*zip(self.source, self.source_scores, strict=True), *zip(self.tokens, self.scores, strict=True)]
        most = sorted(every, key=lambda pair: -abs(pair[1]))[:6]
        said = "   ".join(f"{token.text!r} {score:+.2f}" for token, score in most)
        share = f"{math.exp(self.value):.1%}"
        if math.isnan(self.gap):
            return [f"what made it say {self.output!r} (p = {share}): {said}"]
        return [f"what made it say {self.output!r} (p = {share}; adds up to {1 - self.gap:.0%}): {said}"]


def attribution(
    model: Any, text: Any, target: Any = None, *, place: int | None = None, token: Any = None, by: str = "integrated"
) -> Attribution:
    """Why the model says `token` (an id; where none is given, what it holds most probable) at `place` (the last)."""
    if by not in WAYS:
        raise BadSetting(f"attribution: by must be one of {', '.join(WAYS)}, got {by!r}; {nearest(by, WAYS)}")
    reading = read(model, text, target)
    place = _place(reading, place)
    with still(reading.model):
        target_id = _output(reading, place, token)
    asked = _Asked(reading, place, target_id)
    with still(reading.model, learning=True):
        scores, value, baseline, steps = getattr(asked, by)()
    apart = value - baseline
    gap = abs(sum(float(s.sum()) for s in scores) - apart) / max(abs(apart), 1e-6) if by == "integrated" else math.nan
    source_scores, own = (
        (scores[0].numpy(), scores[1].numpy()) if reading.source else (np.zeros(0, np.float32), scores[0].numpy())
    )
    output = asked.said()
    return Attribution(
        reading.tokens, own, reading.source, source_scores, place, output, by, value, baseline, gap, steps
    )  # fmt: skip


def _place(reading: Reading, place: int | None) -> int:
    if isinstance(reading.model.head, ClassScores):
        return 0
    if place is None:
        place = len(reading.tokens) - 1 if reading.causal else last_place(reading)
    if not -len(reading.tokens) <= place < len(reading.tokens):
        raise BadSetting(f"attribution: place must be below {len(reading.tokens)}, got {place}; count from 0")
    return place % len(reading.tokens)


def _output(reading: Reading, place: int, token: Any) -> int:
    if not isinstance(reading.model.head, ClassScores):
        size = vocabulary(language(reading.model))
    else:
        size = reading.model.head.out.out_features
    if token is not None and not (type(token) is int and 0 <= token < size):
        raise BadSetting(f"attribution: token must be an id from 0 to {size - 1}, got {token!r}; see reading.tokens")
    return token if token is not None else int(_scores(reading, reading.ids, place).argmax())


def _scores(reading: Reading, ids: Tensor, place: int) -> Tensor:
    """log p [B, V] at a place, or of the classes."""
    model = reading.model
    many = {name: value.expand(len(ids), -1) for name, value in reading.extras.items()}
    memory = model.encode(many["source"]) if many else None
    rows = model.rows(ids, None, None, None, None)
    states = model.states(rows, memory=memory)
    if isinstance(model.head, ClassScores):
        return model.head(states, rows).float().log_softmax(-1)
    return language(model)(states[:, place : place + 1], rows)[:, 0].float().log_softmax(-1)


Found = tuple[list[Tensor], float, float, int]  # scores of each stack's tokens, value, value of nothing, steps


class _Asked:
    """One output, as a function of the token vectors of each stack that reads."""

    def __init__(self, reading: Reading, place: int, token: int) -> None:
        self.reading, self.place, self.token = reading, place, token
        sides = [side for side in ("encoder", "decoder") if getattr(reading.model, side) is not None]
        self.tables: list[nn.Module] = []
        for side in sides:
            table = getattr(getattr(reading.model, side).embed, "tokens", None)
            if not isinstance(table, nn.Module):
                raise BadInput("attribution: the model must read tokens, its embedding has no table of them")
            self.tables.append(table)
        ids = [*reading.extras.values(), reading.ids]
        with torch.no_grad():
            self.x = [table(one)[0].detach().clone() for table, one in zip(self.tables, ids, strict=True)]

    def said(self) -> str:
        reading = self.reading
        if isinstance(reading.model.head, ClassScores):
            return reading.labels[self.token] if self.token < len(reading.labels) else str(self.token)
        return reading.name(self.token).text

    def values(self, vectors: list[Tensor]) -> Tensor:
        """log p [B] of the output, where the tables give these vectors [B, Q, D]."""
        with _instead(self.tables, vectors):
            ids = self.reading.ids.expand(len(vectors[0]), -1)
            return _scores(self.reading, ids, self.place)[:, self.token]

    def slopes(self, vectors: list[Tensor]) -> list[Tensor]:
        """The gradients to the vectors [B, Q, D], each row for itself."""
        vectors = [v.detach().requires_grad_() for v in vectors]
        return list(torch.autograd.grad(self.values(vectors).sum(), vectors))

    def ends(self) -> tuple[float, float]:
        """The value as it is, and without any token."""
        with torch.no_grad():
            value, nothing = self.values([torch.stack((x, torch.zeros_like(x))) for x in self.x]).tolist()
        return value, nothing

    def gradient(self) -> Found:
        slopes = self.slopes([x[None] for x in self.x])
        return [(x * slope[0]).sum(-1) for x, slope in zip(self.x, slopes, strict=True)], *self.ends(), 1

    def integrated(self) -> Found:
        """By Gauss and Legendre's rule, with twice the steps until the parts add up; the best that was had."""
        value, nothing = self.ends()
        tried: list[tuple[float, int, list[Tensor]]] = []
        for steps in (16, 32, MOST_STEPS):
            parts = self._sum(steps)
            gap = abs(sum(float(p.sum()) for p in parts) - (value - nothing)) / max(abs(value - nothing), 1e-6)
            tried.append((gap, steps, parts))
            if gap <= ENOUGH or gap > 1:  # farther off than the whole: single steps drown the rest, more do not help
                break
        _, steps, parts = min(tried, key=lambda one: one[0])
        return parts, value, nothing, steps

    def _sum(self, steps: int) -> list[Tensor]:
        nodes, weights = (torch.tensor(a, dtype=torch.float32) for a in np.polynomial.legendre.leggauss(steps))
        total = [torch.zeros_like(x) for x in self.x]
        size = max(1, TOGETHER // sum(len(x) for x in self.x))
        for a, w in zip(((nodes + 1) / 2).split(size), (weights / 2).split(size), strict=True):
            for n, slope in enumerate(self.slopes([a[:, None, None] * x for x in self.x])):
                total[n] += (w[:, None, None] * slope).sum(0) * self.x[n]
        return [part.sum(-1) for part in total]

    def blanked(self) -> Found:
        value, nothing = self.ends()
        lengths = [len(x) for x in self.x]
        size = max(1, TOGETHER // sum(lengths))
        found = []
        with torch.no_grad():
            for some in torch.arange(sum(lengths)).split(size):
                flat = torch.cat(self.x).repeat(len(some), 1, 1)
                flat[torch.arange(len(some)), some] = 0
                found.append(value - self.values(list(flat.split(lengths, 1))))
        return list(torch.cat(found).split(lengths)), value, nothing, sum(lengths)


@contextlib.contextmanager
def _instead(tables: list[nn.Module], vectors: list[Tensor]) -> Iterator[None]:
    """Let each table answer with these vectors."""
    handles = [
        table.register_forward_hook(lambda module, inputs, output, given=given: given)
        for table, given in zip(tables, vectors, strict=True)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
