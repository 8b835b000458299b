"""Learning rate schedules, the evaluation interval, and the number of steps under a time limit.

A learning rate schedule is a function of the step number (the first is 1), so that a resumed run has nothing to
restore. All begin with a linear warmup. A step plan is a list of (step at which it was made, total steps); the first is
made at step 0. It is kept in the checkpoint, so that the learning rate does not depend on the clock.

Evaluations during training take at most MAX_EVAL_TIME_FRACTION of the time, the final one MAX_FINAL_TIME_FRACTION.
An interval chosen here is updated when an evaluation takes longer or shorter than planned; it is kept in the
checkpoint. Neither the losses nor the order of the data depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.parts import must, part
from headwater.training.config import TrainConfig
from headwater.training.state import TrainState

if TYPE_CHECKING:
    from headwater.training.trainer import Trainer


# --------------------------------------------------------------------------------------------- learning rate schedules


class Schedule:
    """Base class of learning rate schedules."""

    def __post_init__(self) -> None:
        for name in ("peak", "factor"):
            value = getattr(self, name, 1.0)
            must(
                value > 0,
                self,
                _("{name} must be above 0", name=name),
                value,
                _("3e-4 is a usual peak, 1 the paper's factor"),
            )
        steps = getattr(self, "steps", 1)
        must(steps >= 1, self, _("steps must be at least 1"), steps, _("give the length of the run"))

    def at(self, step: float) -> float:
        """The learning rate of a step; the first is 1."""
        raise NotImplementedError


@part
class ConstantSchedule(Schedule):
    """Constant learning rate `peak` after a linear warmup."""

    peak: float
    warmup: int = 0

    def at(self, step: float) -> float:
        return self.peak * warmup_factor(step, self.warmup)


@part
class NoamSchedule(Schedule):
    """Noam schedule (Vaswani et al. 2017): factor · d_model^-½ · min(step^-½, step · warmup^-1½)."""

    d_model: int
    warmup: int = 4000
    factor: float = 1.0

    def at(self, step: float) -> float:
        return self.factor * self.d_model**-0.5 * min(step**-0.5, step * max(self.warmup, 1) ** -1.5)


@part
class InverseSqrtSchedule(Schedule):
    """Inverse square root schedule: linear warmup to peak, then peak · √(warmup / step)."""

    peak: float
    warmup: int = 4000

    def at(self, step: float) -> float:
        knee = max(self.warmup, 1)
        return self.peak * warmup_factor(step, self.warmup) * min(1.0, math.sqrt(knee / step))


@part
class CosineSchedule(Schedule):
    """Cosine schedule: linear warmup to peak, then half a cosine down to peak · min_lr_ratio at the last step."""

    peak: float
    warmup: int
    steps: int
    min_lr_ratio: float = 0.0

    def at(self, step: float) -> float:
        factor = 0.5 * (1 + math.cos(math.pi * decay_progress(step, self.warmup, self.steps)))
        return self.peak * warmup_factor(step, self.warmup) * (self.min_lr_ratio + (1 - self.min_lr_ratio) * factor)


@part
class LinearSchedule(Schedule):
    """Linear schedule: linear warmup to peak, then linear decay to peak · min_lr_ratio at the last step."""

    peak: float
    warmup: int
    steps: int
    min_lr_ratio: float = 0.0

    def at(self, step: float) -> float:
        factor = 1 - decay_progress(step, self.warmup, self.steps)
        return self.peak * warmup_factor(step, self.warmup) * (self.min_lr_ratio + (1 - self.min_lr_ratio) * factor)


def warmup_factor(step: float, warmup: int) -> float:
    return min(1.0, step / warmup) if warmup else 1.0


def decay_progress(step: float, warmup: int, steps: int) -> float:
    """Progress from the end of the warmup to the last step, from 0 to 1."""
    return min(1.0, max(0.0, (step - warmup) / max(steps - warmup, 1)))


SCHEDULES: dict[str, Callable[[TrainConfig], Schedule]] = {
    "noam": lambda c: NoamSchedule(c.d_model, c.warmup, c.lr),  # lr: the factor before d_model^-½
    "inverse-sqrt": lambda c: InverseSqrtSchedule(c.lr, c.warmup),
    "cosine": lambda c: CosineSchedule(c.lr, c.warmup, c.max_steps, c.min_lr_ratio),
    "linear": lambda c: LinearSchedule(c.lr, c.warmup, c.max_steps, c.min_lr_ratio),
    "constant": lambda c: ConstantSchedule(c.lr, c.warmup),
}


def build_schedule(config: TrainConfig) -> Schedule:
    """The learning rate schedule of a config whose lr, warmup and max_steps are resolved."""
    name = config.schedule
    if name not in SCHEDULES:
        raise BadSetting(_("no schedule is called {name!r}; {nearest}", name=name, nearest=nearest(name, SCHEDULES)))
    return SCHEDULES[name](config)


# ---------------------------------------------------------------------------------------------------------- evaluations

MAX_EVAL_TIME_FRACTION = 0.08
MAX_FINAL_TIME_FRACTION = 0.05
MIN_BUDGET_SECONDS = 1.0  # seconds of evaluation that are allowed in any run, however short
MAX_EVAL_EXAMPLES = 2000
MIN_EVAL_EXAMPLES = 16
MAX_EVALUATIONS = 10
TARGET_EVALUATIONS = 5  # rows are left out only to afford this number
MAX_INTERVAL = 1000  # steps between two evaluations that are cheap
MIN_INTERVAL_CHANGE = 1.5  # an interval is replaced by one that is longer or shorter by more than this factor


class EvaluationPlan(NamedTuple):
    every: int  # steps between two evaluations
    num_examples: int  # validation rows of each
    num_final_examples: int  # rows on which the best model is evaluated at the end
    seconds: float  # of one evaluation
    num_available: int  # rows that could be evaluated

    @property
    def final_seconds(self) -> float:
        """Of the last evaluation, where it is on more rows than the others."""
        if self.num_final_examples <= self.num_examples:
            return 0.0
        return self.seconds * self.num_final_examples / self.num_examples

    def total_seconds(self, steps: int) -> float:
        return self.seconds * max(1, math.ceil(steps / self.every)) + self.final_seconds


def plan_evaluations(
    config: TrainConfig, run_seconds: float, step_seconds: float, example_seconds: float, num_available: int
) -> EvaluationPlan:
    """Plan the evaluations of a run that takes run_seconds; step_seconds, example_seconds: measured."""
    example_seconds = max(example_seconds, 1e-9)  # 0 where it was not measured, since all is given
    steps = max(1, config.max_steps or int(run_seconds / step_seconds))
    budget = max(MIN_BUDGET_SECONDS, MAX_EVAL_TIME_FRACTION * run_seconds)
    max_examples = min(MAX_EVAL_EXAMPLES, num_available)

    # examples of each evaluation
    if config.eval_examples:
        num_examples = min(num_available, config.eval_examples)
    else:
        wanted = math.ceil(steps / config.eval_every) if config.eval_every else TARGET_EVALUATIONS
        affordable = int(budget / (wanted * example_seconds))
        num_examples = min(max_examples, max(MIN_EVAL_EXAMPLES, affordable))
    seconds = num_examples * example_seconds

    # examples of the final one
    if config.final_eval_examples or config.eval_examples:
        num_final_examples = max(num_examples, config.final_eval_examples)
    else:
        final_budget = max(MIN_BUDGET_SECONDS, MAX_FINAL_TIME_FRACTION * run_seconds)
        num_final_examples = min(max_examples, max(num_examples, int(final_budget / example_seconds)))

    every = config.eval_every or eval_interval(steps, steps, budget, seconds)
    return EvaluationPlan(every, num_examples, num_final_examples, seconds, num_available)


def eval_interval(steps: int, steps_left: int, budget: float, eval_seconds: float) -> int:
    """Steps between evaluations of so many seconds each, with a budget for the steps that are left.

    >>> [eval_interval(1000, 1000, budget=10.0, eval_seconds=seconds) for seconds in (0.5, 4.0)]
    [100, 500]
    """
    usual = max(1, min(MAX_INTERVAL, math.ceil(steps / MAX_EVALUATIONS)))
    affordable = max(1, int(budget / max(eval_seconds, 1e-9)))
    return max(usual, math.ceil(steps_left / affordable))


def updated_interval(current: int, steps: int, steps_done: int, eval_seconds: float, step_seconds: float) -> int:
    """The interval that suits an evaluation which took so long; 0 where the present one may stay."""
    steps_left = steps - steps_done
    if steps_left <= 0:
        return 0
    budget = max(MIN_BUDGET_SECONDS * steps_left / steps, MAX_EVAL_TIME_FRACTION * steps_left * step_seconds)
    interval = eval_interval(steps, steps_left, budget, eval_seconds)
    changed = interval > MIN_INTERVAL_CHANGE * current or MIN_INTERVAL_CHANGE * interval < current
    return interval if changed else 0


def current_interval(trainer: Trainer) -> int:
    """Steps between evaluations, as last chosen or as given; 0: one at the end."""
    return trainer.state.eval_cadence[1] or trainer.config.eval_every


def evaluation_due(trainer: Trainer) -> bool:
    step = trainer.state.step
    since = trainer.state.eval_cadence[0]
    every = current_interval(trainer)
    if not every or (step - since) % every:
        return False
    return step <= _last_eval_step(trainer) or step == trainer.total_steps


def evaluations_left(trainer: Trainer) -> int:
    """How many are due before the one at the end."""
    since = trainer.state.eval_cadence[0]
    every = current_interval(trainer)
    if not every:
        return 0
    return max(0, (_last_eval_step(trainer) - since) // every - (trainer.state.step - since) // every)


def _last_eval_step(trainer: Trainer) -> int:
    """The last step but the end at which one may be due: none of a chosen interval comes shortly before the end."""
    chosen = trainer.state.eval_cadence[1]
    return trainer.total_steps - max(1, math.ceil(chosen / 2))


def update_interval(trainer: Trainer) -> None:
    """After an evaluation, where the interval was not given: another one, if it cost more or less than planned."""
    state = trainer.state
    seconds = trainer.eval_seconds
    every = state.eval_cadence[1]
    if not every:
        return
    interval = updated_interval(every, trainer.total_steps, state.step, seconds, trainer.step_seconds.value)
    interval = trainer.dist.broadcast(interval)
    if not interval:
        return
    state.eval_cadence = (state.step, interval)
    if interval > every:
        note = _(
            "an evaluation takes {seconds:.1f} s: the next ones come every {found} steps, not every {every}",
            seconds=seconds,
            found=interval,
            every=every,
        )
        trainer.note(state.step, note)


# ----------------------------------------------------------------------------------------------------------- time limit


StepPlan = Sequence[tuple[int, int]]
MIN_PLAN_CHANGE = 1.1  # the remaining steps must differ from the plan by this factor
USED_TIME_FRACTION = 0.98  # of the remaining time
NOTED_CHANGE_FRACTION = 0.1  # of all steps: a smaller change of plan is not noted
GRACE_FRACTION = 0.05  # of the time limit, by which a plan may exceed it
CHECKS_PER_RUN = 10  # how often a run compares its speed with the plan


def effective_step(step: int, plan: StepPlan) -> float:
    """Map a step to its position on the original learning rate schedule.

    After re-planning to fewer steps the remaining schedule is traversed faster, so that it still reaches its end.

    >>> [effective_step(step, [(0, 100), (50, 60)]) for step in (10, 50, 55, 60)]
    [10.0, 50.0, 75.0, 100.0]
    """
    if not plan:
        return step
    end = plan[0][1]
    at = 0.0
    since = 0
    stride = 1.0
    for decided, steps in plan:
        if step > decided:
            at, since = at + stride * (decided - since), decided
            stride = (end - at) / (steps - decided)
    return at + stride * (step - since)


def steps_that_fit(plan: StepPlan, step: int, seconds_left: float, step_seconds: float) -> int:
    """The total number of steps that fit into the remaining seconds; 0 where the plan may stay."""
    planned = plan[-1][1] - step
    fit = max(1, int(USED_TIME_FRACTION * seconds_left / max(step_seconds, 1e-9)))
    if planned <= 0 or planned / MIN_PLAN_CHANGE <= fit <= planned * MIN_PLAN_CHANGE:
        return 0
    return step + fit


def replanning_due(state: TrainState) -> bool:
    return bool(state.step_plan) and state.step % math.ceil(state.step_plan[0][1] / CHECKS_PER_RUN) == 0


def replan(trainer: Trainer) -> None:
    """Change the total number of steps where a time limit decides it and steps are slower or faster than planned."""
    state = trainer.state

    # seconds per step, without evaluations: since the last check, or since the beginning if that is slower
    last_step, last_seconds = state.last_plan_check
    seconds = trainer.elapsed() - state.eval_seconds
    state.last_plan_check = (state.step, seconds)
    recent = (seconds - last_seconds) / max(1, state.step - last_step)
    step_seconds = max(recent, seconds / state.step)

    # steps that fit into the time left
    left = time_left(trainer) - evaluations_left(trainer) * trainer.eval_seconds
    fit = steps_that_fit(state.step_plan, state.step, left, step_seconds)
    steps = trainer.dist.broadcast(fit)
    if not steps:
        return
    if abs(steps - trainer.total_steps) > NOTED_CHANGE_FRACTION * trainer.total_steps:
        note = _(
            "steps {words} than planned: {steps} fit into the time, not {steps2}",
            words=_("take longer") if steps < trainer.total_steps else _("are faster"),
            steps=steps,
            steps2=trainer.total_steps,
        )
        trainer.note(state.step, note)
    state.step_plan = [*state.step_plan, (state.step, steps)]


def out_of_time(trainer: Trainer) -> bool:
    """Whether the next step must be the last. A plan that is nearly right is carried out to its end."""
    grace = GRACE_FRACTION * trainer.config.max_time if trainer.state.step_plan else 0.0
    return time_left(trainer) + grace <= trainer.step_seconds.value


def time_left(trainer: Trainer) -> float:
    """Seconds left for steps: the limit without setup, elapsed time, the last evaluation and the files of the end."""
    config = trainer.config
    final = 0.0
    if 0 < config.eval_examples < config.final_eval_examples:
        final = config.final_eval_examples / config.eval_examples
    ending = trainer.eval_seconds * (1.0 + final) + trainer.shutdown_seconds
    return config.max_time - trainer.state.setup_seconds - trainer.elapsed() - ending
