"""What a run tells those who listen. A listener is any function of one event; one that fails does not end the run.

What it raises is said and it is left out; KeyboardInterrupt stops the run, as Ctrl-C does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np


class Stepped(NamedTuple):
    """One step is done. loss: an answer's mean; norm: of the gradient before it was clipped; applied: not NaN."""

    step: int
    steps: int  # in all
    epoch: float
    loss: float
    lr: float
    norm: float
    tokens: int  # real ones the model was given: padding is none
    answers: int  # what the loss is divided by: tokens, rows or spans
    seconds: float
    examples: np.ndarray
    applied: bool
    norms: Mapping[str, float] = {}  # of each layer's gradient


class Evaluated(NamedTuple):
    step: int
    scores: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...]
    better: bool  # than all before
    seconds: float


class FinalEvaluated(NamedTuple):
    """The best model, evaluated at the end of a run on more rows than during it."""

    step: int  # at which the best model was found
    rows: int
    scores: Mapping[str, float]
    seconds: float


class Kept(NamedTuple):
    """A checkpoint is on disk."""

    step: int
    path: str
    seconds: float


class Noted(NamedTuple):
    """Something the user should know; training goes on."""

    step: int
    text: str  # English; its Chinese is in the catalogue (headwater.i18n)


class Stopped(NamedTuple):
    step: int
    why: str  # finished, no better, time, signal, bad steps
    seconds: float


Event: TypeAlias = Stepped | Evaluated | FinalEvaluated | Kept | Noted | Stopped
Listener: TypeAlias = Callable[[Event], None]
