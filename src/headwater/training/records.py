"""What a trainer is given, remembers and gives back, as plain records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from headwater.data.batches import Batch
from headwater.data.objectives.lesson import Lesson


class Source(Protocol):
    """Where batches come from: an order of examples, and what is taught with them."""

    @property
    def size(self) -> int: ...
    def after(self, position: int) -> Iterator[Batch]: ...
    def pieces(self, examples: np.ndarray, tokens: int) -> Sequence[np.ndarray]: ...
    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson: ...


class Scored(NamedTuple):
    """What an evaluation found; `score` decides which model is best: larger is better, later numbers decide a draw."""

    score: tuple[float, ...]
    scores: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Progress:
    """All that a resumed run must know beside weights and moments."""

    step: int = 0
    position: int = 0  # examples given so far
    tokens: int = 0  # given to the model so far, padding left out
    answers: int = 0  # it was taught so far
    seconds: float = 0.0
    evaluation: float = 0.0  # of these, in evaluations
    preparation: float = 0.0  # seconds before the first step of each command: reading, tokenizer, planning
    bad: int = 0  # steps in a row that were not applied
    evaluated: int = 0  # step of the last evaluation
    best: tuple[float, ...] | None = None
    best_step: int = 0
    stale: int = 0  # evaluations since the best
    plan: list[tuple[int, int]] = field(default_factory=list)  # steps that fit the time: see strides.py
    mark: tuple[int, float] = (0, 0.0)  # step and seconds (without evaluations) of the last look at the plan
    norms: list[float] = field(default_factory=list)  # of the last gradients
    cadence: tuple[int, int] = (0, 0)  # from a step on, steps between evaluations; (0, 0): as the settings say
    first_loss: float | None = None
    first_norm: float | None = None
    losses: list[float] = field(default_factory=list)  # of the last steps
    warned: list[str] = field(default_factory=list)  # kinds of divergence that have been said


@dataclass
class Mean:
    """The mean of numbers that come one by one."""

    total: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        self.total += number
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / max(1, self.count)


class Outcome(NamedTuple):
    why: str
    progress: Progress


class Wishes(NamedTuple):
    """What a process would like to happen after a step; summed over all, so that they do the same."""

    signal: float = 0.0  # somebody asked to stop
    late: float = 0.0  # the time is over
    save: float = 0.0  # a checkpoint is due
