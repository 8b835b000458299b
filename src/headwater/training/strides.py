"""A run that must end in time: if its steps are slower or faster than planned, its curve takes fewer or more.

A plan is a list of (step at which it was decided, steps in all); the first is decided at step 0. It is kept in the
checkpoint, so the learning rate stays a function of the step and of what is on disk, whatever the clock said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwater.training.evaluation_cost import evaluations_ahead
from headwater.training.events import Noted
from headwater.training.records import Progress

if TYPE_CHECKING:
    from headwater.training.loop import Trainer

Plan = Sequence[tuple[int, int]]
CHANGED, SPARE = 1.1, 0.98  # factor by which the steps left must differ from the plan; share of the time that is used
NOTABLE = 0.1  # share of all steps by which a new plan must differ to be said
GRACE = 0.05  # share of the time by which a plan may be exceeded
LOOKS = 10  # times that a run compares its pace with the plan


def place(step: int, plan: Plan) -> float:
    """Where on the curve of the first plan a step is: after each later plan, strides so long that it ends at the end.

    >>> [place(step, [(0, 100), (50, 60)]) for step in (10, 50, 55, 60)]
    [10.0, 50.0, 75.0, 100.0]
    """
    if not plan:
        return step
    end, at, since, stride = plan[0][1], 0.0, 0, 1.0
    for decided, steps in plan:
        if step > decided:
            at, since = at + stride * (decided - since), decided
            stride = (end - at) / (steps - decided)
    return at + stride * (step - since)


def replanned(plan: Plan, step: int, left: float, seconds_a_step: float) -> int:
    """The steps in all that can be done in the seconds that are left; 0 where the plan may stay."""
    planned = plan[-1][1] - step
    fit = max(1, int(SPARE * left / max(seconds_a_step, 1e-9)))
    return step + fit if planned > 0 and not planned / CHANGED <= fit <= planned * CHANGED else 0


def replanning_due(p: Progress) -> bool:
    return bool(p.plan) and p.step % math.ceil(p.plan[0][1] / LOOKS) == 0


def plan_again(trainer: Trainer) -> None:
    """Where the time decided the number of steps: fewer or more, if the last ones took longer or less long."""
    p = trainer.progress
    now = trainer.elapsed() - p.evaluation
    (step, then), p.mark = p.mark, (p.step, now)
    left = time_left(trainer) - evaluations_ahead(trainer) * trainer.evaluation_seconds
    pace = max((now - then) / max(1, p.step - step), now / p.step)  # a fast stretch after slow ones is not trusted
    found = replanned(p.plan, p.step, left, pace)
    (steps,) = map(int, trainer.team.told([float(found)]))
    if not steps:
        return
    words = "take longer" if steps < trainer.steps else "are faster"
    if abs(steps - trainer.steps) > NOTABLE * trainer.steps:
        note = f"steps {words} than planned: {steps} fit into the time, not {trainer.steps}"
        trainer.tell(Noted(p.step, note))
    p.plan = [*p.plan, (p.step, steps)]


def out_of_time(trainer: Trainer) -> bool:
    """Whether no step should follow the next one. A plan that is nearly right is walked to its end."""
    grace = GRACE * trainer.settings.max_time if trainer.progress.plan else 0.0
    return time_left(trainer) + grace <= trainer.step_seconds.value


def time_left(trainer: Trainer) -> float:
    """Seconds for steps: without what went before them, and without the evaluations and files that end a run."""
    s, p = trainer.settings, trainer.progress
    final = s.final_rows / s.eval_rows if 0 < s.eval_rows < s.final_rows else 0.0
    ending = trainer.evaluation_seconds * (1.0 + final) + trainer.closing_seconds
    return s.max_time - p.preparation - trainer.elapsed() - ending
