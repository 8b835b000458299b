"""What a person sees: numbers that are true from the first step on, in either language; nothing steers a terminal."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from headwater.i18n import use_language
from headwater.tasks import get_task
from headwater.training.evaluate import Evaluator
from headwater.training.loggers import ProgressBar
from headwater.training.state import EvalEvent, NoteEvent, StepEvent


def shown(*events):
    out = io.StringIO()
    show = ProgressBar(Console(file=out, width=200, highlight=False))
    for event in events:
        show(event)
    return out.getvalue()


def step(number, loss, last=10, applied=True):
    return StepEvent(number, last, 0.5, loss, 1e-3, 1.0, 100, 50, 0.1, np.arange(2), applied)


def test_the_loss_that_is_shown_is_the_mean_of_a_short_run():
    said = shown(*(step(n, 10.0 if n == 1 else 1.0) for n in range(1, 11)))
    assert "step 10/10  epoch 0.50  loss 1.900  1,000 tok/s" in said


def test_of_a_long_run_it_is_that_of_the_last_steps_and_what_was_not_applied_does_not_count():
    events = [step(n, 9.0 if n < 200 else 1.0, 400) for n in range(1, 400)]
    said = shown(*events, step(400, float("nan"), 400, applied=False))
    assert "loss 1.000" in said


def test_chinese_where_it_is_asked_for():
    sample = {"input": "a", "output": "b\x1b[2J", "expected": "c"}
    events = (step(10, 1.0), NoteEvent(1, "[bold] is no markup"), EvalEvent(10, {"loss": 1.0}, (sample,), True, 1.0))
    with use_language("zh"):
        said = shown(*events)
    for words in ("步 10/10  轮 0.50  loss 1.000  1,000 词元/秒", "还剩 0 秒", "注意 [bold] is no markup", "目前最好",
                  "b·[2J  (应为 c)"):  # fmt: skip
        assert words in said
    assert "\x1b[2J" not in said
    assert "0 s left" in shown(*events) and "note [bold] is no markup" in shown(*events)


def test_texts_that_agree_by_accident_do_not_decide_which_model_is_best():
    """Half a point of BLEU at the first evaluation must not beat a model that has learned since."""
    evaluator = Evaluator(type("TaskData", (), {"task": get_task("seq2seq")})())
    early, late = ({"bleu": bleu, "loss": loss} for bleu, loss in ((0.6, 4.5), (0.0, 2.5)))
    assert evaluator._selection_score(late) > evaluator._selection_score(early)
    assert evaluator._selection_score({"bleu": 8.0, "loss": 4.0}) > evaluator._selection_score(
        {"bleu": 7.0, "loss": 2.0}
    ), "where it means something"
    assert Evaluator(evaluator.task_data, "loss")._selection_score(late) > Evaluator(
        evaluator.task_data, "loss"
    )._selection_score(early)
