"""A run that diverges says so once, with what to change; runs that learn are left in peace."""

from __future__ import annotations

import pytest
from tests.training.small import mean_loss, trainer

from headwater.data.dates import dates_dataset
from headwater.i18n import translated
from headwater.training.api import train
from headwater.training.diagnostics import MEDIAN_WINDOW, divergence_warning, lr_warning, record_loss
from headwater.training.schedules import ConstantSchedule, CosineSchedule
from headwater.training.state import NoteEvent, StepEvent, TrainState


def notes(lr=3.0, schedule=None, steps=40, **settings):
    received = []
    made = trainer(steps, [received.append], lr=lr, **settings)
    made.schedule = schedule or ConstantSchedule(lr)
    made.train()
    return [event for event in received if isinstance(event, NoteEvent)], [
        e.loss for e in received if isinstance(e, StepEvent)
    ]


def test_a_loss_far_above_its_start_is_said_once():
    said, losses = notes()
    assert max(losses) > 10 * losses[0], "the run must diverge"
    (note,) = said
    assert note.text.startswith(f"loss rose from {losses[0]:.3g} to ") and note.text.endswith("lower --lr (now 3)")
    assert f" at step {note.step}: " in note.text and note.step <= 2 * MEDIAN_WINDOW
    assert translated(note.text, "zh").startswith(f"第 {note.step} 步时损失从 {losses[0]:.3g} 升到 ")


NORMAL = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.3},
    "no smoothing": {"label_smoothing": 0.0},
    "muon": {"optimizer": "muon"},
    "dropout": {"dropout": 0.5},
    "warmup": {"schedule": CosineSchedule(1e-2, 30, 40)},
    "no warmup": {"schedule": ConstantSchedule(1e-2)},
    "small batches": {"batch_tokens": 24},
    "evaluated": {"evaluate": mean_loss, "eval_every": 3, "ema": 0.9},
}


@pytest.mark.parametrize("name", NORMAL)
def test_no_false_alarm(name):
    for seed in range(3):
        settings = {"schedule": CosineSchedule(1e-2, 5, 40), **NORMAL[name]}
        assert notes(1e-2, seed=seed, **settings)[0] == []


def passed(losses, norms):
    """What is said after each step of a run with these losses and norms."""
    p, said = TrainState(), []
    for loss, norm in zip(losses, norms, strict=True):
        p.step += 1
        p.recent_grad_norms = [*p.recent_grad_norms[-63:], norm]
        record_loss(p, loss, norm)
        said.append(divergence_warning(p, 0.5))
    return [(step + 1, warned) for step, warned in enumerate(said) if warned]


def test_one_odd_batch_is_no_divergence():
    losses = [7.0] * 20 + [700.0] + [7.0] * 20
    assert passed(losses, [1.0] * 41) == []
    lasting = [7.0] * 20 + [700.0] * 20
    assert passed(lasting, [1.0] * 40) == [(25, "loss rose from 7 to 700 at step 25: lower --lr (now 0.5)")]


def test_a_gradient_norm_that_explodes_is_said_once():
    norms = [2.0] * 10 + [500.0] * 30
    assert passed([7.0] * 40, norms) == [(15, "gradient norm rose from 2 to 500 at step 15: lower --lr (now 0.5)")]
    assert passed([7.0] * 40, [1e-3] * 10 + [2.0] * 30) == [], "a norm that began near zero may grow"


def test_a_loss_that_stays_high_or_falls_is_none():
    assert passed([7.7] * 100, [1.0] * 100) == []
    assert passed([0.7, *([0.9] * 50)], [1.0] * 51) == [], "classes are guessed wrongly at times"


def test_what_was_said_is_kept_in_the_checkpoint():
    said, _ = notes(steps=30)
    made = trainer(40, lr=3.0)
    made.load_state_dict(
        {"train_state": {"first_loss": 2.0, "divergence_warnings": ["loss", "norm"]}, "grad_scaler": {}}
    )
    made.state.recent_losses, made.state.recent_grad_norms = [900.0] * MEDIAN_WINDOW, [900.0] * MEDIAN_WINDOW
    assert said and made.state.first_loss == 2.0 and divergence_warning(made.state, 3.0) == ""
    made.state.first_grad_norm = 1.0
    assert divergence_warning(made.state, 3.0) == ""
    made.state.divergence_warnings = []
    assert divergence_warning(made.state, 3.0)


@pytest.mark.parametrize(("lr", "said"), [(3.0, True), (0.5, True), (1e-2, False), (0.1, False)])
def test_an_absurd_learning_rate_is_said_before_training(lr, said):
    assert bool(lr_warning("adamw", lr)) is said


def test_before_the_first_step(tmp_path):
    path, received = tmp_path / "pairs.tsv", []
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 100)))
    given = {"size": "xs", "max_steps": 2, "batch_tokens": 300, "eval_examples": 4, "eval_every": 2, "quiet": True}
    train(path, out=tmp_path / "a", lr=3.0, optimizer="adamw", callbacks=[received.append], **given)
    note, step = (event for event in received[:2])
    assert isinstance(note, NoteEvent) and isinstance(step, StepEvent)
    assert note.text.startswith("the learning rate reaches 3, adamw usually takes")
    assert "学习率将达到 3" in translated(note.text, "zh")
    received.clear()
    train(path, out=tmp_path / "b", callbacks=[received.append], **given)
    train(path, out=tmp_path / "c", callbacks=[received.append], schedule="noam", warmup=4000, **given)
    assert not [event for event in received if isinstance(event, NoteEvent)]
