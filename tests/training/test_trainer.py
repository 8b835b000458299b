"""The laws of the loop: resumed = never stopped, accumulated = full batch, watched = unwatched; NaN is caught."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from tests.training.shim import FULL, FaultyDisk
from tests.training.small import Copies, Diary, mean_loss, model, trainer

from headwater.errors import BadFile, BadSetting, CheckFailed
from headwater.tasks.batch import num_targets, to_tensors
from headwater.tasks.language_model import lm_loss
from headwater.training.checkpoint import CheckpointWriter, TrainOutput, restore_checkpoint
from headwater.training.distributed import without_targets
from headwater.training.state import CheckpointEvent, EvalEvent, EvalResult, NoteEvent, StepEvent, StopEvent, StopReason
from headwater.training.storage import CheckpointManager
from headwater.training.trainer import Trainer


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def unbroken(steps=20, **settings):
    diary = Diary()
    made = trainer(steps, [diary], **settings)
    made.train()
    return diary.lines, weights(made.model)


FACTS = {"data": {"x": "1"}}


def broken(folder, stops, steps=20, restored=restore_checkpoint, **settings):
    """The same run as several processes, each cut off after some steps without a word, resumed from what is on disk."""
    folder.mkdir()
    diary, net = [], None
    for stop in (*stops, 10**9):
        book = Diary()
        made = trainer(steps, [book], **settings)
        made.output = CheckpointWriter(CheckpointManager(folder, "r"), FACTS)
        if saved := CheckpointManager(folder, "r").latest_valid():
            restored(made, saved, FACTS)
        del diary[made.state.step :]

        def cut(event, stop=stop):
            if isinstance(event, StepEvent) and event.step >= stop:
                raise KeyboardInterrupt

        made.callbacks.append(cut)
        try:
            made.train()
        except KeyboardInterrupt:
            diary += book.lines
            continue
        diary += book.lines
        net = made.model
        break
    return diary, weights(net)


WAYS = [
    {},
    {"ema": 0.9},
    {"micro_batch_tokens": 40},
    {"gradient_checkpointing": True},
    {"dtype": "bf16"},
    {"optimizer": "muon"},
]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_resumed_is_never_stopped(tmp_path, settings):
    lines, final = unbroken(**settings)
    again, resumed = broken(tmp_path / "c", (3, 7, 8, 14), **settings)
    assert again == lines
    assert torch.equal(final, resumed)


def test_resuming_at_every_step_and_at_the_ends_of_epochs(tmp_path):
    lines, final = unbroken(checkpoint_steps=1)
    again, resumed = broken(tmp_path / "c", range(1, 20), checkpoint_steps=1)
    assert again == lines and torch.equal(final, resumed)


def without_moments(made: Trainer, saved, facts):
    restore_checkpoint(made, saved, facts)
    made.optimizer.state.clear()


def without_position(made: Trainer, saved, facts):
    restore_checkpoint(made, saved, facts)
    made.state.examples_seen = 0


def one_step_on(made: Trainer, saved, facts):
    restore_checkpoint(made, saved, facts)
    made.state.step += 1


@pytest.mark.parametrize("forgetful", [without_moments, without_position, one_step_on])
def test_a_lost_piece_of_state_would_be_seen(tmp_path, forgetful):
    lines, final = unbroken()
    again, resumed = broken(tmp_path / "c", (7,), restored=forgetful)
    assert again != lines and not torch.equal(final, resumed)


def test_accumulated_is_the_full_batch():
    whole, pieces = (trainer(1, dropout=0.0, micro_batch_tokens=n) for n in (0, 30))
    batch = next(whole.dataset.batches_from(0))
    assert len(list(pieces._micro_batches(batch))) > 2 and len(list(whole._micro_batches(batch))) == 1
    for made in (whole, pieces):
        made.optimizer.zero_grad = lambda **_: None
        made.step(batch)
    for a, b in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5)


def test_a_mean_of_means_would_be_seen():
    made = trainer(1, dropout=0.0, micro_batch_tokens=30)
    pieces = list(made._micro_batches(next(made.dataset.batches_from(0))))
    counts = [num_targets(p) for p in pieces]
    sums = [float(lm_loss(made.model.eval(), p).detach()) for p in pieces]
    assert abs(sum(sums) / sum(counts) - np.mean([s / c for s, c in zip(sums, counts, strict=True)])) > 1e-5


def test_computing_twice_changes_nothing():
    """Dropout is drawn again as it was."""
    plain, final = unbroken(dropout=0.3)
    lines, again = unbroken(dropout=0.3, gradient_checkpointing=True)
    assert lines == plain and torch.equal(final, again)


@pytest.mark.slow
def test_compiled_follows_the_curve():
    plain, _ = unbroken(8, dropout=0.0)
    lines, _ = unbroken(8, dropout=0.0, compile=True)
    for got, want in zip(map(json.loads, lines), map(json.loads, plain), strict=True):
        assert got[1] == pytest.approx(want[1], abs=1e-4) and got[3] == want[3]


def test_evaluation_changes_nothing_in_training():
    plain, final = unbroken()
    lines, watched = unbroken(eval_every=3, evaluate=mean_loss, ema=0.0)
    assert lines == plain and torch.equal(final, watched)


def test_it_learns():
    received = []
    made = trainer(400, [received.append], dropout=0.0, label_smoothing=0.0)
    made.train()
    losses = [e.loss for e in received if isinstance(e, StepEvent)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_order_of_examples_is_each_once_an_epoch():
    received = []
    made = trainer(60, [received.append])
    made.train()
    seen = np.concatenate([e.examples for e in received if isinstance(e, StepEvent)])
    for epoch in range(len(seen) // 64):
        assert sorted(seen[epoch * 64 : (epoch + 1) * 64]) == list(range(64))
    assert not np.array_equal(seen[:64], seen[64:128])


# ------------------------------------------------------------------------------------------------------- NaN and inf


def poisoned(where, at_step, steps=12, lasting=False, **settings):
    received = []
    made = trainer(steps, [received.append], **settings)
    real = made.loss

    def hook(module, inputs, output):
        now = made.state.step
        return output * float("nan") if now == at_step or (lasting and now > at_step) else output

    if where == "module":
        made.model.decoder.layers[0].ffn.up.register_forward_hook(hook)
    elif where == "loss":
        made.loss = lambda n, p: real(n, p) * (float("inf") if made.state.step == at_step else 1.0)
    elif where == "gradient":

        def spoil(grad):
            return grad * float("nan") if made.state.step == at_step else grad

        made.model.encoder.layers[0].self_attn.q.weight.register_hook(spoil)
    return made, received


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("module", "decoder.layers.0.ffn.up gave NaN or inf from finite input"),
        ("loss", "the loss is NaN or inf"),
        ("gradient", "the gradient of encoder.layers.0.self_attn.q.weight is NaN or inf"),
    ],
)
def test_a_bad_step_is_not_applied_and_its_culprit_and_batch_are_named(where, said):
    made, received = poisoned(where, 4)
    before = {}

    def watch(event):
        if isinstance(event, StepEvent):
            before[event.step] = weights(made.model).clone()

    made.callbacks.append(watch)
    made.train()
    steps = {e.step: e for e in received if isinstance(e, StepEvent)}
    assert not steps[5].applied and steps[6].applied
    assert torch.equal(before[4], before[5]) and not torch.equal(before[5], before[6])
    note = next(e for e in received if isinstance(e, NoteEvent))
    assert said in note.text and note.step == 5
    assert str(steps[5].examples[0]) in note.text
    assert torch.isfinite(weights(made.model)).all()


def test_spoiled_weights_are_named():
    made, received = poisoned("nothing", 0, max_nan_steps=2)
    with torch.no_grad():
        made.model.encoder.layers[0].ffn.down.weight[0, 0] = float("nan")
    with pytest.raises(CheckFailed, match="2 steps in a row gave NaN"):
        made.train()
    assert (
        "the weights encoder.layers.0.ffn.down.weight hold NaN"
        in next(e for e in received if isinstance(e, NoteEvent)).text
    )


def test_after_some_bad_steps_in_a_row_it_stops():
    made, received = poisoned("module", 4, lasting=True, max_nan_steps=3)
    with pytest.raises(CheckFailed, match="3 steps in a row gave NaN or inf and were not applied; lower --lr"):
        made.train()
    assert made.state.step == 7 and isinstance(received[-1], StopEvent) and received[-1].reason is StopReason.DIVERGED
    assert torch.isfinite(weights(made.model)).all()


# ------------------------------------------------------------------------------------------------ stopping and saving


def test_a_signal_finishes_the_step_saves_and_says_so(tmp_path):
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / number.name
        folder.mkdir()
        received = []
        made = trainer(50, [received.append], checkpoint_steps=1000)
        made.output = CheckpointWriter(CheckpointManager(folder, "r"), FACTS)
        made.callbacks.append(
            lambda e, n=number: os.kill(os.getpid(), n) if isinstance(e, StepEvent) and e.step == 7 else None
        )
        outcome = made.train()
        assert outcome.stop_reason is StopReason.INTERRUPTED and 7 <= outcome.state.step <= 8
        assert CheckpointManager(folder, "r").latest_valid().step == outcome.state.step


def test_a_second_signal_stops_at_once():
    made = trainer(50)

    def twice(event):
        if isinstance(event, StepEvent) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    made.callbacks.append(twice)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert signal.getsignal(signal.SIGINT) is before


def test_time_ends_a_run():
    made = trainer(10**6, max_time="1s")
    made.dataset.size = 64
    assert made.train().stop_reason is StopReason.TIME_LIMIT and 0.9 <= made.elapsed() < 5


def test_early_stopping_and_the_best():
    scores = iter([1.0, 3.0, 2.0, 2.5, 9.0])
    best, received = [], []

    class Best(TrainOutput):
        def write_best(self, model):
            best.append(made.state.step)

    evaluate = lambda m: EvalResult((next(scores),), {})  # noqa: E731
    made = trainer(100, [received.append], evaluate=evaluate, eval_every=4, patience=2, output=Best())
    outcome = made.train()
    assert outcome.stop_reason is StopReason.EARLY_STOPPING and outcome.state.step == 16
    assert best == [4, 8] and outcome.state.best_score == (3.0,) and outcome.state.best_step == 8
    assert [e.is_best for e in received if isinstance(e, EvalEvent)] == [True, True, False, False]


def test_a_full_disk_does_not_end_training_and_the_next_save_works(tmp_path):
    (tmp_path / "graves").mkdir()
    (tmp_path / "c").mkdir()
    disk = FaultyDisk(tmp_path / "graves", at=6, code=FULL)
    received = []
    made = trainer(20, [received.append])
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r", disk), FACTS)
    assert made.train().stop_reason is StopReason.FINISHED
    assert "nothing was saved: No space left" in next(e for e in received if isinstance(e, NoteEvent)).text
    assert [e.step for e in received if isinstance(e, CheckpointEvent)] == [10, 15, 20]
    assert CheckpointManager(tmp_path / "c", "r").latest_valid().step == 20


def test_a_disk_with_too_little_room_is_not_written_to(tmp_path):
    class Small(FaultyDisk):
        def free_bytes(self, folder):
            return 1000

    disk = Small(tmp_path)
    made = trainer(5)
    (tmp_path / "c").mkdir()
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r", disk), FACTS)
    assert made.train().stop_reason is StopReason.FINISHED and disk.count == 0


@pytest.mark.parametrize("error", [OSError("disk"), KeyError("loss"), RuntimeError("no\nfont")], ids=repr)
def test_a_callback_that_fails_is_removed(error):
    def broken(event):
        raise error

    received = []
    assert trainer(3, [broken, received.append]).train().stop_reason is StopReason.FINISHED
    (note,) = (e.text for e in received if isinstance(e, NoteEvent))
    assert note.startswith(f"the callback broken failed ({type(error).__name__}: ") and "\n" not in note


def test_changed_data_is_refused(tmp_path):
    (tmp_path / "c").mkdir()
    made = trainer(5)
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r"), FACTS)
    made.train()
    saved = CheckpointManager(tmp_path / "c", "r").latest_valid()
    with pytest.raises(BadSetting, match="data must be the same as when step-00000005 was saved, it has changed"):
        restore_checkpoint(trainer(5), saved, {"data": {"x": "2"}})


def test_another_model_is_refused(tmp_path):
    (tmp_path / "c").mkdir()
    made = trainer(5)
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r"), FACTS)
    made.train()
    from headwater.families.builders import transformer

    other = trainer(5, net=transformer(12, d_model=8, heads=2, layers=2, d_ff=16).build(seed=0))
    with pytest.raises(BadFile, match="must hold this model's tensors"):
        restore_checkpoint(other, CheckpointManager(tmp_path / "c", "r").latest_valid(), FACTS)


def test_a_finished_run_resumed_does_nothing(tmp_path):
    (tmp_path / "c").mkdir()
    made = trainer(5, evaluate=mean_loss)
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r"), FACTS)
    made.train()
    received = []
    again = trainer(5, [received.append], evaluate=mean_loss)
    restore_checkpoint(again, CheckpointManager(tmp_path / "c", "r").latest_valid(), FACTS)
    assert again.train().stop_reason is StopReason.FINISHED and len(received) == 1


def test_bf16_runs_and_the_chunked_loss_follows():
    received = []
    trainer(3, [received.append], dtype="bf16").train()
    plain = []
    trainer(3, [plain.append]).train()
    a, b = (next(e.loss for e in events if isinstance(e, StepEvent)) for events in (received, plain))
    assert a == pytest.approx(b, rel=0.02) and a != b


def test_the_same_seed_gives_the_same_run_and_another_another():
    assert unbroken()[0] == unbroken()[0]
    assert unbroken(seed=4)[0] != unbroken()[0]
    assert Copies().batches.seed == 0 and model() is not None


def test_a_filler_has_no_gradient_even_where_the_loss_reads_no_targets():
    made = trainer(1, dropout=0.0)
    made.parallel.module.loss_fn = lambda net, batch, smoothing: (
        net(batch["ids"], source=batch["source"]).square().sum()
    )
    batch = to_tensors(made.dataset.collate(np.arange(3), 0))

    def gradient(micro_batch):
        made.optimizer.zero_grad()
        loss = made._backward(0, micro_batch, 3)
        return loss, max(float(p.grad.abs().max()) for p in made.model.parameters() if p.grad is not None)

    assert gradient(without_targets(batch)) == (0.0, 0.0)
    assert min(gradient(batch)) > 0
