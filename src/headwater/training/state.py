"""TrainState (what a checkpoint holds beside tensors), results, training events and callbacks.

A callback is any function of one event. One that raises is removed and a note is emitted; the run goes on.
KeyboardInterrupt in a callback stops the run, as Ctrl-C does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from headwater.core.model import Transformer
from headwater.data.collate import TrainBatch
from headwater.data.dataset import IndexBatch

# ---------------------------------------------------------------------------------------------------- state and results


class TrainDataset(Protocol):
    """A dataset as the Trainer sees it: an endless order of batches, and their collation (data/dataset.py)."""

    @property
    def probe_batches(self) -> int: ...
    @property
    def one_process(self) -> bool: ...
    @property
    def size(self) -> int: ...
    def batches_from(self, position: int) -> Iterator[IndexBatch]: ...
    def micro_batches(self, examples: np.ndarray, max_tokens: int) -> Sequence[np.ndarray]: ...
    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch: ...
    def take_metrics(self) -> dict[str, float]: ...
    def take_notes(self) -> list[str]: ...
    def state_arrays(self) -> dict[str, np.ndarray]: ...
    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None: ...


class EvalResult(NamedTuple):
    """Metrics of an evaluation. selection_score decides which model is best: larger is better, compared as a tuple."""

    selection_score: tuple[float, ...]
    metrics: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...] = ()


class EvaluateFn(Protocol):
    """Evaluates a model in eval mode. max_examples: another number of examples than the usual one."""

    def __call__(self, model: Transformer, max_examples: int | None = None) -> EvalResult: ...


@dataclass
class TrainState:
    """Counters and histories of a run: what resuming needs beside weights and optimizer moments."""

    step: int = 0
    examples_seen: int = 0  # examples drawn so far, over all epochs
    tokens_seen: int = 0  # without padding
    targets_seen: int = 0  # targets of the loss so far
    seconds: float = 0.0
    eval_seconds: float = 0.0  # of these seconds, in evaluations
    setup_seconds: float = 0.0  # before the first step: reading, tokenizer, planning
    nonfinite_steps: int = 0  # consecutive steps with NaN or inf
    last_eval_step: int = 0  # step of the last evaluation
    best_score: tuple[float, ...] | None = None
    best_step: int = 0
    evals_since_best: int = 0  # evaluations without a better score (early stopping)
    step_plan: list[tuple[int, int]] = field(default_factory=list)  # under a time limit: see schedules.py
    last_plan_check: tuple[int, float] = (0, 0.0)  # step and seconds (without evaluations)
    recent_grad_norms: list[float] = field(default_factory=list)
    eval_cadence: tuple[int, int] = (0, 0)  # (first step, interval); (0, 0): as configured
    first_loss: float | None = None
    first_grad_norm: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    divergence_warnings: list[str] = field(default_factory=list)  # kinds that were reported: loss, norm

    def advance(self, examples_seen: int, num_tokens: int, num_targets: int) -> None:
        """Count one step. examples_seen: in all; num_tokens, num_targets: of this step."""
        self.step += 1
        self.examples_seen = examples_seen
        self.tokens_seen += num_tokens
        self.targets_seen += num_targets


@dataclass
class RunningMean:
    """Running mean of a stream of numbers."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float:
        return self.total / max(1, self.count)


class StopReason(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    EARLY_STOPPING = "early_stopping"
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"
    DIVERGED = "diverged"


class TrainResult(NamedTuple):
    stop_reason: StopReason
    state: TrainState


class ReservedSeconds(NamedTuple):
    """Seconds that a run under a time limit needs after its last step."""

    evaluation: float = 0.0
    shutdown: float = 0.0  # checkpoint, best model, plots


NOTHING_RESERVED = ReservedSeconds()


class StepFlags(NamedTuple):
    """Requests of a rank after a step, summed over all ranks so that they act alike."""

    stop_requested: float = 0.0  # a signal was received
    time_is_up: float = 0.0
    checkpoint_due: float = 0.0


# --------------------------------------------------------------------------------------------------------------- events


class StepEvent(NamedTuple):
    """One optimizer step. loss: mean over targets; grad_norm: before clipping; applied: not for NaN or a spike."""

    step: int
    total_steps: int  # of the run
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    num_tokens: int  # without padding
    num_targets: int  # what the loss is divided by
    seconds: float
    examples: np.ndarray
    applied: bool
    layer_grad_norms: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}  # of the task: rewards, margins, divergence


class EvalEvent(NamedTuple):
    step: int
    metrics: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...]
    is_best: bool  # better than all before
    seconds: float


class FinalEvalEvent(NamedTuple):
    """The best model, evaluated after the run on more examples than during it."""

    step: int  # of the best model
    num_examples: int
    metrics: Mapping[str, float]
    seconds: float


class CheckpointEvent(NamedTuple):
    """A checkpoint was written."""

    step: int
    path: str
    seconds: float


class NoteEvent(NamedTuple):
    """A note or warning to the user; training goes on."""

    step: int
    text: str  # a Message, or plain English


class StopEvent(NamedTuple):
    step: int
    reason: StopReason
    seconds: float


Event: TypeAlias = StepEvent | EvalEvent | FinalEvalEvent | CheckpointEvent | NoteEvent | StopEvent
Callback: TypeAlias = Callable[[Event], None]
