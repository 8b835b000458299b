"""A run that must end in time: when its steps become slower than planned, the rest of the curve takes fewer of them.

A plan is a list of (step at which it was decided, steps in all); the first is decided at step 0. It is kept in the
checkpoint, so the learning rate stays a function of the step and of what is on disk, whatever the clock said.
"""

from __future__ import annotations

from collections.abc import Sequence

Plan = Sequence[tuple[int, int]]
SLOWER, SPARE = 0.9, 0.98  # share of the steps left that must fit in for the plan to stay; of the time that is used


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


def fewer(plan: Plan, step: int, left: float, seconds_a_step: float) -> int:
    """The steps in all that can be done in the seconds that are left; 0 where the plan may stay."""
    fit = max(1, int(SPARE * left / seconds_a_step))
    return step + fit if fit < SLOWER * (plan[-1][1] - step) else 0
