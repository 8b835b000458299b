"""Schedules: the learning rate of a step, as a function of its number (the first is 1). All begin with a warm-up.

A schedule knows nothing but the number, so a resumed run has nothing to restore.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headwater.errors import BadSetting, nearest
from headwater.parts import must, part


class Checked:
    def __post_init__(self) -> None:
        for name in ("peak", "factor"):
            value = getattr(self, name, 1.0)
            must(value > 0, self, f"{name} must be above 0", value, "3e-4 is a usual peak, 1 the paper's factor")
        steps = getattr(self, "steps", 1)
        must(steps >= 1, self, "steps must be at least 1", steps, "give the length of the run")


@part
class Constant(Checked):
    """peak, after a straight rise over `warmup` steps."""

    peak: float
    warmup: int = 0

    def at(self, step: int) -> float:
        return self.peak * rise(step, self.warmup)


@part
class Noam(Checked):
    """factor · d_model^-½ · min(step^-½, step · warmup^-1½): the 2017 paper's."""

    d_model: int
    warmup: int = 4000
    factor: float = 1.0

    def at(self, step: int) -> float:
        return self.factor * self.d_model**-0.5 * min(step**-0.5, step * max(self.warmup, 1) ** -1.5)


@part
class InverseRoot(Checked):
    """Rises to peak, then peak · √(warmup / step)."""

    peak: float
    warmup: int = 4000

    def at(self, step: int) -> float:
        knee = max(self.warmup, 1)
        return self.peak * rise(step, self.warmup) * min(1.0, math.sqrt(knee / step))


@part
class Cosine(Checked):
    """Rises to peak, then half a cosine down to peak · floor at the last step."""

    peak: float
    warmup: int
    steps: int
    floor: float = 0.0

    def at(self, step: int) -> float:
        share = 0.5 * (1 + math.cos(math.pi * gone(step, self.warmup, self.steps)))
        return self.peak * rise(step, self.warmup) * (self.floor + (1 - self.floor) * share)


@part
class Linear(Checked):
    """Rises to peak, then a straight line down to peak · floor at the last step."""

    peak: float
    warmup: int
    steps: int
    floor: float = 0.0

    def at(self, step: int) -> float:
        share = 1 - gone(step, self.warmup, self.steps)
        return self.peak * rise(step, self.warmup) * (self.floor + (1 - self.floor) * share)


def rise(step: int, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def gone(step: int, warmup: int, steps: int) -> float:
    """The share of the way from the end of the warm-up to the last step, from 0 to 1."""
    return min(1.0, max(0.0, (step - warmup) / max(steps - warmup, 1)))


SCHEDULES: dict[str, Callable[..., Any]] = {
    "noam": lambda peak, warmup, steps, d_model, floor: Noam(d_model, warmup, peak),
    "inverse-root": lambda peak, warmup, steps, d_model, floor: InverseRoot(peak, warmup),
    "cosine": lambda peak, warmup, steps, d_model, floor: Cosine(peak, warmup, steps, floor),
    "linear": lambda peak, warmup, steps, d_model, floor: Linear(peak, warmup, steps, floor),
    "constant": lambda peak, warmup, steps, d_model, floor: Constant(peak, warmup),
}


def schedule(name: str, *, peak: float, warmup: int, steps: int, d_model: int, floor: float = 0.0) -> Any:
    """A schedule by its name. For noam, peak is the factor before d_model^-½."""
    if name not in SCHEDULES:
        raise BadSetting(f"no schedule is called {name!r}; {nearest(name, SCHEDULES)}")
    return SCHEDULES[name](peak, warmup, steps, d_model, floor)
