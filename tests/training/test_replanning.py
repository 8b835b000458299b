"""A run that must end in time: a slow clock leads to fewer steps, and the learning rate still comes down to the end."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.small import Diary, mean_loss, trainer

from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.schedules import effective_step, steps_that_fit
from headwater.training.state import NoteEvent, StepEvent, StopReason
from headwater.training.storage import CheckpointManager
from headwater.training.trainer import Trainer

STEPS, LIMIT = 40, 40.0


@given(st.integers(2, 500), st.data())
def test_every_plan_leads_on_from_where_it_was_decided_to_the_end(steps, data):
    plan = [(0, steps)]
    for _ in range(data.draw(st.integers(0, 4))):
        decided, last = plan[-1]
        if last - decided > 2:
            now = data.draw(st.integers(decided + 1, last - 1))
            plan.append((now, data.draw(st.integers(now + 1, 2 * last))))
    walked = [effective_step(step, plan) for step in range(plan[-1][1] + 1)]
    assert walked[0] == 0 and walked[-1] == pytest.approx(steps)
    assert all(later > sooner for sooner, later in zip(walked, walked[1:], strict=False))
    assert [effective_step(step, plan[:1]) for step in range(steps)] == list(range(steps))  # as it was, to the last bit


def test_the_plan_stays_while_it_is_right_within_a_tenth():
    assert steps_that_fit([(0, 100)], 50, seconds_left=50.0, step_seconds=1.05) == 0
    assert steps_that_fit([(0, 100)], 50, seconds_left=50.0, step_seconds=0.95) == 0
    assert steps_that_fit([(0, 100)], 50, seconds_left=50.0, step_seconds=2.0) == 50 + 24
    assert steps_that_fit([(0, 100), (50, 74)], 60, seconds_left=14.0, step_seconds=0.5) == 60 + 27
    assert steps_that_fit([(0, 100)], 100, seconds_left=-3.0, step_seconds=1.0) == 0
    assert steps_that_fit([(0, 100)], 50, seconds_left=-3.0, step_seconds=1.0) == 51


class Clock:
    """A second a step as planned; from step 10 on, three."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def passes_in(self, made: Trainer):
        """Within the step, so that the seconds which a checkpoint keeps are those of all its steps."""
        share = made._local_micro_batches

        def slow(*given):
            self.now += 3.0 if made.state.step >= 10 else 0.95
            return share(*given)

        made._local_micro_batches = slow


def timed(clock, *listeners, folder=None, plan=((0, STEPS),)):
    made = trainer(STEPS, listeners, evaluate=mean_loss, eval_every=4, max_time=LIMIT, checkpoint_steps=5)
    clock.passes_in(made)
    made.state.step_plan = list(plan)
    if folder is not None:
        made.output = CheckpointWriter(CheckpointManager(folder, "r"), {})
    return made


def rates(made: Trainer, received):
    outcome = made.train()
    return outcome, [event.lr for event in received if isinstance(event, StepEvent)]


def test_a_slow_clock_leads_to_the_floor_at_the_time_limit(monkeypatch):
    received = []
    clock = Clock(monkeypatch)
    made = timed(clock, received.append)
    outcome, seen = rates(made, received)
    assert outcome.stop_reason is StopReason.FINISHED and 0.8 * LIMIT < clock.now - 1000 <= LIMIT
    assert seen[-1] == pytest.approx(0.0, abs=1e-9) and max(seen) > 9e-3
    notes = [event.text for event in received if isinstance(event, NoteEvent)]
    assert f"fit into the time, not {STEPS}" in notes[0]
    assert 1 <= len(notes) <= len(made.state.step_plan) - 1 == 2  # the first slow stretch was slow in half

    received.clear()  # without a plan, the time is over in the middle of the curve: the test can fail
    outcome, seen = rates(timed(Clock(monkeypatch), received.append, plan=()), received)
    assert outcome.stop_reason is StopReason.TIME_LIMIT and seen[-1] > 2e-3


@pytest.mark.parametrize(("stop", "saved", "plans"), [(12, 10, 1), (17, 15, 2)])
def test_a_run_resumed_before_or_between_its_changes_of_plan_never_stopped(monkeypatch, tmp_path, stop, saved, plans):
    whole = Diary()
    planned = timed(Clock(monkeypatch), whole)
    planned.train()
    (tmp_path / "c").mkdir()

    def cut(event):
        if isinstance(event, StepEvent) and event.step == stop:
            raise KeyboardInterrupt

    first, second = Diary(), Diary()
    with pytest.raises(KeyboardInterrupt):
        timed(Clock(monkeypatch), first, cut, folder=tmp_path / "c").train()
    again = timed(Clock(monkeypatch), second, folder=tmp_path / "c")
    restore_checkpoint(again, CheckpointManager(tmp_path / "c", "r").latest_valid(), {})
    decided = [tuple(pair) for pair in again.state.step_plan]
    assert again.state.step == saved and decided == planned.state.step_plan[:plans]
    again.train()
    assert first.lines[:saved] + second.lines == whole.lines


def test_a_number_of_steps_that_is_given_ends_the_plan(monkeypatch, tmp_path):
    (tmp_path / "c").mkdir()
    timed(Clock(monkeypatch), folder=tmp_path / "c").train()
    more = trainer(2 * STEPS)
    restore_checkpoint(more, CheckpointManager(tmp_path / "c", "r").latest_valid(), {})
    assert more.state.step_plan == [] and more.total_steps == 2 * STEPS
