"""Checkpoints are written while training goes on: whole, of their own step, one at a time, and never in silence."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.training.shim import BROKEN, FaultyDisk
from tests.training.small import trainer
from tests.training.test_trainer import FACTS, weights

from headwater.training.checkpoint import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    AsyncCheckpointer,
    CheckpointWriter,
    restore_checkpoint,
    take_snapshot,
)
from headwater.training.state import CheckpointEvent, NoteEvent, StepEvent, StopReason
from headwater.training.storage import CheckpointManager, Disk
from headwater.weights.safetensors import SafetensorsFile


class Slow(Disk):
    """Each file takes its time; how many are written at once is counted."""

    def __init__(self, seconds):
        self.seconds, self.now, self.most = seconds, 0, 0

    def write(self, path, pieces):
        self.now += 1
        self.most = max(self.most, self.now)
        time.sleep(self.seconds)
        self.now -= 1
        return super().write(path, pieces)


def started(folder, disk=None, steps=20, **settings):
    folder.mkdir()
    received = []
    made = trainer(steps, [received.append], **settings)
    made.output = CheckpointWriter(CheckpointManager(folder, "r", disk, max_to_keep=100), FACTS)
    return made, received


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    made, received = started(tmp_path / "c", Slow(0.3), checkpoint_steps=5, steps=9)
    made.train()
    order = [(type(e).__name__, e.step) for e in received if isinstance(e, (StepEvent, CheckpointEvent))]
    assert order.index(("StepEvent", 6)) < order.index(("CheckpointEvent", 5)), "the next step did not wait"
    assert order[-1] == ("CheckpointEvent", 9), "the end waited"


def test_one_at_a_time_the_next_waits(tmp_path):
    disk = Slow(0.05)
    made, received = started(tmp_path / "c", disk, checkpoint_steps=1, steps=6)
    made.train()
    assert disk.most == 1
    assert [e.step for e in received if isinstance(e, CheckpointEvent)] == [1, 2, 3, 4, 5, 6]


def test_by_time_a_save_in_flight_is_not_followed_by_another():
    saver = AsyncCheckpointer(interval_seconds=0.0, interval_steps=0, emit=lambda e: None)
    gate = threading.Event()
    assert saver.due(1)
    saver.start(1, lambda: None, lambda copy: str(gate.wait(10)))
    assert not saver.due(2)
    gate.set()
    saver.join()
    assert saver.pending is None


def test_what_is_kept_is_the_step_it_was_taken_at_though_weights_change_meanwhile(tmp_path):
    """20 saves by a slow thread equal 20 copies taken on the spot; no two are alike."""
    made, _ = started(tmp_path / "c", Slow(0.01), checkpoint_steps=1, ema=0.9)
    wanted = {}
    real = made.save

    def save():
        wanted[made.state.step] = take_snapshot(made)
        real()

    made.save = save
    made.train()
    seen = set()
    for step, want in wanted.items():
        folder = tmp_path / "c" / f"step-{step:08d}"
        for file, tensors in want.tensors.items():
            kept = SafetensorsFile(folder / file)
            assert set(kept) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(kept[name], tensor), (step, file, name)
        seen.add((folder / OPTIMIZER_FILE).read_bytes())
    assert len(wanted) == len(seen) == 20


def test_a_copy_that_shared_memory_would_be_seen(tmp_path):
    made, _ = started(tmp_path / "c")
    made.step(next(made.dataset.batches_from(0)))
    copy = take_snapshot(made)
    before = weights(made.model)
    for own, tensors in ((dict(made.model.named_parameters()), copy.tensors[MODEL_FILE]),):
        assert all(own[name].data_ptr() != t.data_ptr() for name, t in tensors.items())
    made.step(next(made.dataset.batches_from(made.state.examples_seen)))
    assert not torch.equal(before, weights(made.model))
    assert torch.equal(before, torch.cat([t.flatten() for t in copy.tensors[MODEL_FILE].values()]))
    moments = copy.tensors[OPTIMIZER_FILE]
    assert all(float(t) == 1.0 for name, t in moments.items() if name.startswith("step:"))
    copy.state["train_state"]["step"] = 99
    assert made.state.step == 2


def test_a_writer_that_dies_is_heard_of_at_the_next_step_and_is_not_counted_as_saved(tmp_path):
    made, received = started(tmp_path / "c", checkpoint_steps=5)

    def dies(copy):
        raise ZeroDivisionError("a mistake of ours")

    made.output.write_checkpoint = dies
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert made.state.step in (6, 7, 8, 9, 10) and not [e for e in received if isinstance(e, CheckpointEvent)]


def test_a_failing_disk_is_said_once_for_each_save_and_the_last_good_one_is_found(tmp_path):
    (tmp_path / "graves").mkdir()
    disk = FaultyDisk(tmp_path / "graves", at=500, code=BROKEN, lasting=True)
    made, received = started(tmp_path / "c", disk, checkpoint_steps=4)
    assert made.train().stop_reason is StopReason.FINISHED
    kept = [e.step for e in received if isinstance(e, CheckpointEvent)]
    failed = [
        e.step for e in received if isinstance(e, NoteEvent) and "nothing was saved: Input/output error" in e.text
    ]
    assert sorted(kept + failed) == [4, 8, 12, 16, 20] and kept and failed
    assert CheckpointManager(tmp_path / "c", "r").latest_valid().step == kept[-1]
    again = trainer(20)
    restore_checkpoint(again, CheckpointManager(tmp_path / "c", "r").latest_valid(), FACTS)
    assert again.state.step == kept[-1]


def test_a_second_signal_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    made, _ = started(tmp_path / "c", Slow(0.2), checkpoint_steps=3)

    def stop(event):
        if isinstance(event, StepEvent) and event.step == 4:
            raise KeyboardInterrupt

    made.callbacks.append(stop)
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert CheckpointManager(tmp_path / "c", "r").latest_valid().step == 3
    assert not [name for name in os.listdir(tmp_path / "c") if name.startswith(".")]


def test_rhythm_a_dear_checkpoint_is_put_off():
    saver = AsyncCheckpointer(interval_seconds=1.0, interval_steps=0, emit=lambda e: None)
    saver.last_saved -= 2.0
    assert saver.due(1)
    saver.last_seconds = 10.0
    assert not saver.due(1), "ten seconds of writing are worth five hundred of training"
