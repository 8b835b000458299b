"""Lengths of gradients, layer by layer; clipping; spikes; and the scale of fp16, which a resumed run must know."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.training.small import trainer
from tests.training.test_trainer import FACTS, broken, unbroken, weights

from headwater.errors import CheckFailed
from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.gradients import GradScaler, ModelGradients, layer_name, spike_ratio
from headwater.training.loggers import MetricsLogger, read_jsonl
from headwater.training.state import NoteEvent, StepEvent
from headwater.training.storage import CheckpointManager
from headwater.training.trainer import Trainer


def one_gradient():
    made = trainer(1)
    made.optimizer.zero_grad = lambda **_: None
    received = []
    made.callbacks = [received.append]
    made.config = made.config.replace(max_grad_norm=0.0)
    made.step(next(made.dataset.batches_from(0)))
    return made, received[0]


def test_a_layers_norm_is_that_of_its_gradients_and_their_squares_add_up():
    made, event = one_gradient()
    by_hand = {}
    for path, p in made.model.named_parameters():
        by_hand[layer_name(path)] = by_hand.get(layer_name(path), 0.0) + float(p.grad.double().square().sum())
    assert list(event.layer_grad_norms) == [
        "encoder.embed",
        "encoder.layers.0",
        "decoder.layers.0",
    ]  # tables and head are tied
    for layer, square in by_hand.items():
        assert event.layer_grad_norms[layer] == pytest.approx(math.sqrt(square), rel=1e-5)
    assert event.grad_norm == pytest.approx(math.sqrt(sum(x * x for x in event.layer_grad_norms.values())), rel=1e-9)
    assert event.grad_norm == pytest.approx(
        float(torch.nn.utils.get_total_norm([p.grad for p in made.model.parameters()])), rel=1e-5
    )


def test_the_journal_has_the_norms_of_each_layer(tmp_path):
    made = trainer(4, [MetricsLogger(tmp_path / "m.jsonl", 2)])
    made.train()
    lines = [line for line in read_jsonl(tmp_path / "m.jsonl") if line.get("split") == "train"]
    for line in lines:
        assert list(line["grad_norms"]) == ["encoder.embed", "encoder.layers.0", "decoder.layers.0"]
        assert math.hypot(*line["grad_norms"].values()) == pytest.approx(line["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("most", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.5, 1024.0), (1e9, 8.0)])
def test_cutting_divides_the_scale_out_and_shortens_to_the_limit(most, scale):
    model = torch.nn.Linear(3, 2)
    wanted = {}
    for name, p in model.named_parameters():
        wanted[name] = torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        p.grad = wanted[name] * scale
    gradients = ModelGradients(model)
    norms = gradients.norms(list, scale)
    length = float(torch.cat([g.flatten() for g in wanted.values()]).norm())
    assert norms.total == pytest.approx(length, rel=1e-5)
    gradients.clip_(norms.total, most, scale)
    factor = min(1.0, most / length) if most else 1.0
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name] * factor, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- spikes


def spiking(spike, times=1e6, at=30):
    received = []
    made = trainer(40, [received.append], skip_grad_spikes=spike)
    real = made.loss
    made.loss = lambda n, p: real(n, p) * (times if made.state.step == at else 1.0)
    made.train()
    return (
        made,
        {e.step: e for e in received if isinstance(e, StepEvent)},
        [e for e in received if isinstance(e, NoteEvent)],
    )


def test_an_exploding_gradient_is_clipped_and_said_with_its_batch():
    made, steps, notes = spiking(0.0)
    assert steps[31].applied and steps[31].grad_norm > 1e4 * steps[30].grad_norm
    (note,) = notes
    assert note.step == 31 and "times the usual one, and the gradient was clipped; examples" in note.text
    assert str(steps[31].examples[0]) in note.text and torch.isfinite(weights(made.model)).all()


def test_with_a_limit_it_is_left_out_and_the_next_is_applied():
    _, steps, notes = spiking(20.0, times=1e3)
    assert not steps[31].applied and steps[32].applied and "was left out" in notes[0].text
    assert not spiking(20.0, times=2.0)[2], "twice as long is no spike"


def test_lasting_change_is_not_left_out_for_ever():
    """What is left out is remembered too, so the usual length follows."""
    before = [1.0] * 20
    for _ in range(64):
        before = [*before[-63:], 100.0]
    assert spike_ratio(100.0, before) == 1.0
    assert spike_ratio(100.0, [1.0] * 3) == 0.0, "too few to know"


def test_spikes_are_the_same_in_a_resumed_run(tmp_path):
    """The lengths that are remembered are part of the state."""
    lines, final = unbroken(40, skip_grad_spikes=0.95)
    again, resumed = broken(tmp_path / "c", (23, 31), 40, skip_grad_spikes=0.95)
    assert again == lines and torch.equal(final, resumed)

    def forgetful(made: Trainer, saved, facts):
        restore_checkpoint(made, saved, facts)
        made.state.recent_grad_norms = []

    other, _ = broken(tmp_path / "d", (23, 31), 40, restored=forgetful, skip_grad_spikes=0.95)
    assert other != lines


# -------------------------------------------------------------------------------------------------------- fp16, bf16


def test_the_scale_doubles_after_good_steps_and_halves_at_an_overflow():
    scale = GradScaler(8.0)
    scale.update(False)
    assert scale == GradScaler(4.0, 0)
    for _ in range(GradScaler.GROWTH_INTERVAL):
        scale.update(True)
    assert scale == GradScaler(8.0, 0)
    for _ in range(9):
        scale.update(False)
    assert scale.scale == 1.0, "never below one"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_short_numbers_follow_the_curve_of_long_ones(dtype):
    curves = {}
    for kind in ("fp32", dtype):
        received = []
        trainer(60, [received.append], dropout=0.0, dtype=kind).train()
        curves[kind] = [e.loss for e in received if isinstance(e, StepEvent)]
    assert curves[dtype] != curves["fp32"]
    assert curves[dtype] == pytest.approx(curves["fp32"], rel=0.05)


def test_an_overflow_of_fp16_halves_the_scale_names_nobody_and_ends_nothing():
    received = []
    made = trainer(30, [received.append], dtype="fp16", dropout=0.0)
    made.grad_scaler = GradScaler(2.0**30)
    made.train()
    steps = [e for e in received if isinstance(e, StepEvent)]
    assert not steps[0].applied and steps[-1].applied and made.grad_scaler.scale < 2.0**30
    assert not [e for e in received if isinstance(e, NoteEvent)] and made.state.nonfinite_steps == 0


def test_an_overflow_that_no_scale_mends_ends_the_run():
    made = trainer(40, dtype="fp16", max_nan_steps=3)
    made.grad_scaler = GradScaler(4.0)
    q = made.model.encoder.layers[0].self_attn.q.weight
    q.register_hook(lambda grad: grad * float("inf"))
    with pytest.raises(CheckFailed, match="3 steps in a row gave NaN or inf"):
        made.train()
    assert made.state.step == 5, "two steps sought a scale, three were bad"


def test_fp16_resumed_is_never_stopped_and_the_scale_is_part_of_the_state(tmp_path):
    lines, final = unbroken(dtype="fp16")
    again, resumed = broken(tmp_path / "c", (3, 7, 14), dtype="fp16")
    assert again == lines and torch.equal(final, resumed)
    made = trainer(5, dtype="fp16")
    made.grad_scaler = GradScaler(512.0, 77)
    (tmp_path / "d").mkdir()
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "d", "r"), FACTS)
    made.train()
    other = trainer(5, dtype="fp16")
    restore_checkpoint(other, CheckpointManager(tmp_path / "d", "r").latest_valid(), FACTS)
    assert other.grad_scaler == GradScaler(512.0, 82)
    state = json.loads((tmp_path / "d/step-00000005/state.json").read_text())
    assert state["grad_scaler"] == {"scale": 512.0, "good_steps": 82}
