"""Evaluation takes a small share of the time, and neither it nor the clock changes what is learned."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.training.clock import Clock
from tests.training.small import Diary, mean_loss, trainer

from headwater.data.dates import dates_dataset
from headwater.i18n import translated
from headwater.training import schedules
from headwater.training.api import train
from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.config import parse_config
from headwater.training.run_dir import RunDir
from headwater.training.schedules import (
    MAX_EVAL_TIME_FRACTION,
    MAX_FINAL_TIME_FRACTION,
    MIN_BUDGET_SECONDS,
    MIN_EVAL_EXAMPLES,
    evaluations_left,
    plan_evaluations,
)
from headwater.training.state import EvalEvent, FinalEvalEvent, NoteEvent, StepEvent
from headwater.training.storage import CheckpointManager

SMALL = {"size": "xs", "batch_tokens": 200}
STEPS = 60


# ----------------------------------------------------------------------------------------------------------- the plan

positive = st.floats(1e-4, 10.0)


@given(st.integers(1, 10_000), positive, positive, st.integers(1, 100_000))
def test_the_plan_keeps_to_its_share(steps, step_seconds, row_seconds, available):
    seconds = steps * step_seconds
    plan = plan_evaluations(parse_config({"max_steps": steps}), seconds, step_seconds, row_seconds, available)
    least = min(MIN_EVAL_EXAMPLES, available) * row_seconds  # one evaluation of this many rows there is always
    budget = max(MIN_BUDGET_SECONDS, MAX_EVAL_TIME_FRACTION * seconds, least)
    final = max(MIN_BUDGET_SECONDS, MAX_FINAL_TIME_FRACTION * seconds, least)
    assert 1 <= plan.num_examples <= plan.num_final_examples <= min(2000, available)
    assert plan.total_seconds(steps) <= 1.001 * (budget + final)
    if seconds >= MIN_BUDGET_SECONDS / MAX_FINAL_TIME_FRACTION and least <= MAX_FINAL_TIME_FRACTION * seconds:
        assert plan.total_seconds(steps) <= 0.15 * seconds


def test_cheap_evaluations_are_ten_on_all_rows():
    plan = plan_evaluations(parse_config({"max_steps": 1000}), 1000.0, 1.0, 1e-3, 500)
    assert (plan.every, plan.num_examples, plan.num_final_examples) == (100, 500, 500) and plan.final_seconds == 0


def test_what_is_given_is_kept():
    given = {"max_steps": 100, "eval_every": 5, "eval_examples": 700}
    plan = plan_evaluations(parse_config(given), 100.0, 1.0, 1.0, 1000)
    assert (plan.every, plan.num_examples, plan.num_final_examples) == (5, 700, 700)


# --------------------------------------------------------------------------------------------------------- in the loop


def timed(monkeypatch, evaluation, *listeners, folder=None, step=1.0, **settings):
    """A second a step; the interval was chosen to be 6 steps, and an evaluation turns out to take so long."""
    clock = Clock(monkeypatch)

    def evaluate(model):
        clock.now += evaluation
        return mean_loss(model)

    made = trainer(STEPS, listeners, evaluate=evaluate, eval_every=6, **settings)
    share = made._local_micro_batches

    def slow(*given):
        clock.now += step
        return share(*given)

    made._local_micro_batches = slow
    made.state.eval_cadence = (0, 6)
    if folder is not None:
        made.output = CheckpointWriter(CheckpointManager(folder, "r"), {})
    return made, clock


def evaluated(received):
    return [event.step for event in received if isinstance(event, EvalEvent)]


def test_evaluations_that_cost_more_than_planned_come_less_often(monkeypatch):
    received = []
    made, clock = timed(monkeypatch, 3.0, received.append)
    made.train()
    assert evaluated(received)[0] == 6 and evaluated(received)[-1] == STEPS
    assert 3.0 * len(evaluated(received)) <= 0.15 * (clock.now - 1000)
    (note,) = (event for event in received if isinstance(event, NoteEvent))
    assert note.text == "an evaluation takes 3.0 s: the next ones come every 54 steps, not every 6"
    assert translated(note.text, "zh").startswith("一次评估要 3.0 秒")


def test_an_interval_that_was_given_is_kept(monkeypatch):
    received = []
    made, _ = timed(monkeypatch, 30.0, received.append)
    made.state.eval_cadence = (0, 0)
    made.train()
    assert evaluated(received) == list(range(6, STEPS + 1, 6))


def test_cheap_evaluations_stay_where_they_were(monkeypatch):
    received = []
    made, _ = timed(monkeypatch, 0.1, received.append)
    made.train()
    assert evaluated(received) == list(range(6, STEPS + 1, 6)) and made.state.eval_cadence == (0, 6)


@pytest.mark.parametrize("every", [0, 7, 8, 11])
@pytest.mark.parametrize("chosen", [True, False])
def test_evaluations_are_foreseen(monkeypatch, every, chosen):
    """Where the interval was chosen, none comes shortly before the one at the end."""
    monkeypatch.setattr(schedules, "update_interval", lambda made: None)
    received, foreseen = [], []
    made = trainer(30, [received.append], evaluate=mean_loss, eval_every=every)
    made.state.eval_cadence = (0, every) if chosen else (0, 0)
    made.callbacks.append(
        lambda event: foreseen.append(evaluations_left(made)) if isinstance(event, StepEvent) else None
    )
    first = evaluations_left(made)
    made.train()
    steps = evaluated(received)
    assert [first, *foreseen] == [len([s for s in steps if step < s < 30]) for step in range(31)]
    assert steps[-1] == 30 and (every == 0 or len(steps) > 1)
    assert not chosen or every == 0 or 30 - steps[-2] >= every / 2


def test_the_clock_changes_no_loss_and_no_order(monkeypatch):
    diaries = []
    for evaluation, step in ((0.0, 1.0), (3.0, 1.0), (100.0, 0.01)):
        diary = Diary()
        timed(monkeypatch, evaluation, diary, step=step)[0].train()
        diaries.append(diary.lines)
    assert diaries[0] == diaries[1] == diaries[2] and len(diaries[0]) == STEPS


@pytest.mark.parametrize("remembered", [True, False])
def test_resumed_is_never_stopped_in_its_evaluations_too(monkeypatch, tmp_path, remembered):
    """Saved after the interval changed. Without what the checkpoint says of it, other steps would be evaluated."""
    whole, first, second = [], [], []
    lines = Diary()
    timed(monkeypatch, 1.0, whole.append, lines)[0].train()
    (tmp_path / "c").mkdir()

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 22:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        timed(monkeypatch, 1.0, first.append, cut, folder=tmp_path / "c", checkpoint_steps=20)[0].train()
    diary = Diary()
    again, _ = timed(monkeypatch, 1.0, second.append, diary, checkpoint_steps=20)
    restore_checkpoint(again, CheckpointManager(tmp_path / "c", "r").latest_valid(), {})
    assert again.state.step == 20 and again.state.eval_cadence == (6, 14)
    if not remembered:
        again.state.eval_cadence = (0, 0)
    again.train()
    assert lines.lines[20:] == diary.lines
    same = [step for step in evaluated(first) if step <= 20] + evaluated(second) == evaluated(whole)
    assert same is remembered


# --------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 2000)))
    return path


def test_a_run_with_costly_evaluations_spends_its_time_in_steps(pairs, tmp_path, monkeypatch):
    clock, received = Clock(monkeypatch), []
    clock.training(step=1.0, row=0.25)
    train(pairs, out=tmp_path / "run", max_steps=60, callbacks=[received.append], quiet=True, **SMALL)
    rows = [event for event in received if isinstance(event, EvalEvent)]
    assert rows and sum(event.seconds for event in rows) <= 0.15 * 60
    chosen = RunDir.open(tmp_path / "run").load_config()
    assert chosen.eval_examples == MIN_EVAL_EXAMPLES <= chosen.final_eval_examples


def test_the_best_model_is_evaluated_on_more_rows_at_the_end(pairs, tmp_path, monkeypatch):
    clock, received = Clock(monkeypatch), []
    clock.training(step=1.0, row=0.05)
    train(pairs, out=tmp_path / "run", max_steps=60, callbacks=[received.append], quiet=True, **SMALL)
    (final,) = (event for event in received if isinstance(event, FinalEvalEvent))
    chosen = RunDir.open(tmp_path / "run").load_config()
    assert chosen.eval_examples < final.num_examples == chosen.final_eval_examples
    best = [event for event in received if isinstance(event, EvalEvent) and event.is_best][-1]
    assert final.step == best.step and final.metrics.keys() == best.metrics.keys()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (line,) = (line for line in lines if line.get("split") == "final")
    assert (
        line["loss"] == final.metrics["loss"]
        and line["num_examples"] == final.num_examples
        and "stop_reason" in lines[-1]
    )


def test_rows_that_are_given_are_all_there_is(pairs, tmp_path):
    received = []
    given = {"max_steps": 4, "eval_examples": 20, "eval_every": 2}
    train(pairs, out=tmp_path / "run", callbacks=[received.append], quiet=True, **given, **SMALL)
    assert evaluated(received) == [2, 4] and not [event for event in received if isinstance(event, FinalEvalEvent)]


def test_the_report_says_how_much_is_evaluated(pairs, tmp_path, monkeypatch, capsys):
    Clock(monkeypatch).training(step=1.0, row=0.05)
    train(pairs, out=tmp_path / "run", max_steps=60, **SMALL)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluation"))
    assert line.startswith("evaluation every 1") and " validation rows; the best model on " in line
