"""From scores to tokens: rows with equal choosers are worked off together, and a bad row is told apart from the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadSetting, CheckFailed, Fault
from headwater.generation.chance import draw, left
from headwater.generation.choosers import Chooser, Said
from headwater.generation.requests import Row


class Stage(NamedTuple):
    """The distribution [V] after one chooser ("the model" before any)."""

    by: str
    shares: Tensor

    def top(self, count: int = 5) -> list[tuple[int, float]]:
        """The most probable tokens that may still be chosen."""
        shares, ids = self.shares.topk(min(count, len(self.shares)))
        return [(int(i), float(p)) for i, p in zip(ids, shares, strict=True) if p > 0]


class Choice(NamedTuple):
    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    stages: tuple[Stage, ...] = ()


def choose(scores: Tensor, rows: Sequence[Row]) -> list[Choice | Fault]:
    """scores [B, V] -> one token a row; a row whose scores are no numbers, or that has nothing left, gives a fault
    instead.
    """
    choices: list[Choice | Fault | None] = [None] * len(rows)
    groups: dict[tuple[Chooser, ...], list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.request.choosers, []).append(number)
    for choosers, numbers in groups.items():
        some = scores if len(numbers) == len(rows) else scores[numbers]
        for number, choice in zip(numbers, _together(some.float(), [rows[n] for n in numbers], choosers), strict=True):
            choices[number] = choice
    assert all(choice is not None for choice in choices)
    return choices  # type: ignore[return-value]


def _together(scores: Tensor, rows: list[Row], choosers: tuple[Chooser, ...]) -> list[Choice | Fault]:
    said = [row.said for row in rows]
    broken = ~scores.amax(-1).isfinite()  # a NaN, an inf, or nothing but -inf
    after = [scores]
    for chooser in choosers:
        after.append(chooser(after[-1], said))
    last, masses = after[-1], scores.logsumexp(-1)
    bad = (broken | (last.amax(-1) == -torch.inf)).tolist()
    certain = last.argmax(-1).tolist() if any(chooser.certain for chooser in choosers) else None
    tokens = left(last) if certain is None else []
    choices: list[Choice | Fault] = []
    for i, row in enumerate(rows):
        if bad[i]:
            choices.append(_fault(scores[i : i + 1], said[i], choosers))
            continue
        token = certain[i] if certain else draw(last[i], tokens[i], row.request.seed, len(said[i].new))
        stages = _stages([s[i] for s in after], choosers) if row.request.trace else ()
        choices.append(Choice(token, float(scores[i, token] - masses[i]), _best(scores[i], masses[i], row), stages))
    return choices


def _best(scores: Tensor, mass: Tensor, row: Row) -> tuple[tuple[int, float], ...]:
    if not row.request.alternatives:
        return ()
    top, ids = (scores - mass).topk(row.request.alternatives)
    return tuple(zip(ids.tolist(), top.tolist(), strict=True))


def _stages(scores: list[Tensor], choosers: tuple[Chooser, ...]) -> tuple[Stage, ...]:
    names = ["the model", *(" ".join(repr(chooser).split())[:60] for chooser in choosers)]
    return tuple(Stage(name, s.softmax(-1)) for name, s in zip(names, scores, strict=True))


def _fault(scores: Tensor, said: Said, choosers: tuple[Chooser, ...]) -> Fault:
    """Who is to blame: the model, or the first chooser that left nothing."""
    if not bool(scores.amax().isfinite()):
        at = len(said.prompt) + len(said.new)
        return CheckFailed(
            f"generate: the model's scores must be numbers, got NaN or inf after token {at}; its weights are broken"
        )
    for chooser in choosers:
        scores = chooser(scores, [said])
        if not bool((scores > -torch.inf).any()):
            return BadSetting(
                f"{type(chooser).__name__}: at least one token must be left, got none after {len(said.new)}; ban fewer"
            )
    raise AssertionError("a fault without a culprit")
