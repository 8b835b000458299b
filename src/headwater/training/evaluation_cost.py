"""What evaluation may cost: how often, and on how many rows, so that it takes a small share of a run's time.

Evaluations while training take at most SHARE of the time, the last one on all rows at most FINAL_SHARE.
An interval that was chosen here is chosen again when an evaluation turns out to cost more or less; it is kept in the
checkpoint. Neither the losses nor the order of the data depend on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from headwater.training.events import Noted
from headwater.training.settings import Settings

if TYPE_CHECKING:
    from headwater.training.loop import Trainer

SHARE, FINAL_SHARE = 0.08, 0.05
FREE = 1.0  # seconds of evaluation that are allowed in any run, however short
MOST_ROWS, FEWEST_ROWS = 2000, 16
MOST_EVALUATIONS, WANTED_EVALUATIONS = 10, 5  # rows are left out only to afford the second number
LONGEST_INTERVAL = 1000  # steps between two evaluations that are cheap
CHANGED = 1.5  # an interval is replaced by one that is longer or shorter by more than this factor


class EvaluationPlan(NamedTuple):
    every: int  # steps between two evaluations
    rows: int  # validation rows of each
    final_rows: int  # rows on which the best model is evaluated at the end
    seconds: float  # of one evaluation
    available: int  # rows that could be evaluated

    @property
    def final_seconds(self) -> float:
        """Of the last evaluation, where it is on more rows than the others."""
        return self.seconds * self.final_rows / self.rows if self.final_rows > self.rows else 0.0

    def total_seconds(self, steps: int) -> float:
        return self.seconds * max(1, math.ceil(steps / self.every)) + self.final_seconds


def plan_evaluations(
    s: Settings, seconds: float, step_seconds: float, row_seconds: float, available: int
) -> EvaluationPlan:
    """seconds: of the whole run; step_seconds, row_seconds: of a training step, of one row's evaluation."""
    row_seconds = max(row_seconds, 1e-9)  # 0 where it was not measured, since all is given
    steps = max(1, s.max_steps or int(seconds / step_seconds))
    budget = max(FREE, SHARE * seconds)
    most = min(MOST_ROWS, available)
    wanted = math.ceil(steps / s.eval_every) if s.eval_every else WANTED_EVALUATIONS
    affordable = int(budget / (wanted * row_seconds))
    rows = min(available, s.eval_rows) if s.eval_rows else min(most, max(FEWEST_ROWS, affordable))
    every = s.eval_every or interval(steps, steps, budget, rows * row_seconds)
    return EvaluationPlan(every, rows, _final_rows(s, rows, most, seconds, row_seconds), rows * row_seconds, available)


def _final_rows(s: Settings, rows: int, most: int, seconds: float, row_seconds: float) -> int:
    if s.final_rows or s.eval_rows:
        return max(rows, s.final_rows)
    return min(most, max(rows, int(max(FREE, FINAL_SHARE * seconds) / row_seconds)))


def interval(steps: int, left: int, budget: float, seconds: float) -> int:
    """Steps between evaluations of so many seconds each, with a budget for the steps that are left.

    >>> interval(1000, 1000, budget=10.0, seconds=0.5), interval(1000, 1000, budget=10.0, seconds=4.0)
    (100, 500)
    """
    usual = max(1, min(LONGEST_INTERVAL, math.ceil(steps / MOST_EVALUATIONS)))
    affordable = max(1, int(budget / max(seconds, 1e-9)))
    return max(usual, math.ceil(left / affordable))


def changed_interval(every: int, steps: int, done: int, seconds: float, step_seconds: float) -> int:
    """The interval that suits an evaluation which took so long; 0 where the present one may stay."""
    left = steps - done
    if left <= 0:
        return 0
    found = interval(steps, left, max(FREE * left / steps, SHARE * left * step_seconds), seconds)
    return found if found > CHANGED * every or CHANGED * found < every else 0


def interval_of(trainer: Trainer) -> int:
    """Steps between evaluations, as last chosen or as given; 0: one at the end."""
    return trainer.progress.cadence[1] or trainer.settings.eval_every


def evaluation_due(trainer: Trainer) -> bool:
    (since, _), every, step = trainer.progress.cadence, interval_of(trainer), trainer.progress.step
    return every > 0 and (step - since) % every == 0 and (step <= _last(trainer) or step == trainer.steps)


def evaluations_ahead(trainer: Trainer) -> int:
    """How many are due before the one at the end."""
    (since, _), every = trainer.progress.cadence, interval_of(trainer)
    if not every:
        return 0
    return max(0, (_last(trainer) - since) // every - (trainer.progress.step - since) // every)


def _last(trainer: Trainer) -> int:
    """The last step but the end at which one may be due: none of a chosen interval comes shortly before the end."""
    chosen = trainer.progress.cadence[1]
    return trainer.steps - max(1, math.ceil(chosen / 2))


def choose_interval(trainer: Trainer) -> None:
    """After an evaluation, where the interval was not given: another one, if it cost more or less than planned."""
    p, seconds = trainer.progress, trainer.evaluation_seconds
    _, every = p.cadence
    if not every:
        return
    found = changed_interval(every, trainer.steps, p.step, seconds, trainer.step_seconds.value)
    (found,) = map(int, trainer.team.told([float(found)]))
    if not found:
        return
    p.cadence = (p.step, found)
    if found > every:
        note = f"an evaluation takes {seconds:.1f} s: the next ones come every {found} steps, not every {every}"
        trainer.tell(Noted(p.step, note))
