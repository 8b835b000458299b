"""Checkpoints are written while training goes on: whole, of their own step, one at a time, and never in silence."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.training.shim import BROKEN, FaultyDisk
from tests.training.small import trainer
from tests.training.test_loop import FACTS, weights

from headwater.training.checkpoints import Checkpoints
from headwater.training.events import Kept, Noted, Stepped
from headwater.training.saving import Saver
from headwater.training.snapshot import MODEL, OPTIMISER, keeper, restore, snapshot
from headwater.training.storage import Disk
from headwater.weights.tensors import TensorFile


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
    heard = []
    made = trainer(steps, [heard.append], **settings)
    made.keep = keeper(Checkpoints(folder, "r", disk, keep=100), FACTS)
    return made, heard


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path):
    made, heard = started(tmp_path / "c", Slow(0.3), save_steps=5, steps=9)
    made.run()
    order = [(type(e).__name__, e.step) for e in heard if isinstance(e, (Stepped, Kept))]
    assert order.index(("Stepped", 6)) < order.index(("Kept", 5)), "the next step did not wait"
    assert order[-1] == ("Kept", 9), "the end waited"


def test_one_at_a_time_the_next_waits(tmp_path):
    disk = Slow(0.05)
    made, heard = started(tmp_path / "c", disk, save_steps=1, steps=6)
    made.run()
    assert disk.most == 1
    assert [e.step for e in heard if isinstance(e, Kept)] == [1, 2, 3, 4, 5, 6]


def test_by_time_a_save_in_flight_is_not_followed_by_another():
    saver = Saver(every=0.0, steps=0, tell=lambda e: None)
    gate = threading.Event()
    assert saver.due(1)
    saver.begin(1, lambda: None, lambda copy: str(gate.wait(10)))
    assert not saver.due(2)
    gate.set()
    saver.collect()
    assert saver.running is None


def test_what_is_kept_is_the_step_it_was_taken_at_though_weights_change_meanwhile(tmp_path):
    """20 saves by a slow thread equal 20 copies taken on the spot; no two are alike."""
    made, _ = started(tmp_path / "c", Slow(0.01), save_steps=1, average=0.9)
    wanted = {}
    real = made.save

    def save():
        wanted[made.progress.step] = snapshot(made)
        real()

    made.save = save
    made.run()
    seen = set()
    for step, want in wanted.items():
        folder = tmp_path / "c" / f"step-{step:08d}"
        for file, tensors in want.tensors.items():
            kept = TensorFile(folder / file)
            assert set(kept) == set(tensors)
            for name, tensor in tensors.items():
                assert torch.equal(kept[name], tensor), (step, file, name)
        seen.add((folder / OPTIMISER).read_bytes())
    assert len(wanted) == len(seen) == 20


def test_a_copy_that_shared_memory_would_be_seen(tmp_path):
    made, _ = started(tmp_path / "c")
    made.step(next(made.source.after(0)))
    copy = snapshot(made)
    before = weights(made.model)
    for own, tensors in ((dict(made.model.named_parameters()), copy.tensors[MODEL]),):
        assert all(own[name].data_ptr() != t.data_ptr() for name, t in tensors.items())
    made.step(next(made.source.after(made.progress.position)))
    assert not torch.equal(before, weights(made.model))
    assert torch.equal(before, torch.cat([t.flatten() for t in copy.tensors[MODEL].values()]))
    moments = copy.tensors[OPTIMISER]
    assert all(float(t) == 1.0 for name, t in moments.items() if name.startswith("step:"))
    copy.state["progress"]["step"] = 99
    assert made.progress.step == 2


def test_a_writer_that_dies_is_heard_of_at_the_next_step_and_is_not_counted_as_saved(tmp_path):
    made, heard = started(tmp_path / "c", save_steps=5)

    def dies(copy):
        raise ZeroDivisionError("a mistake of ours")

    made.keep = dies
    with pytest.raises(ZeroDivisionError):
        made.run()
    assert made.progress.step in (6, 7, 8, 9, 10) and not [e for e in heard if isinstance(e, Kept)]


def test_a_failing_disk_is_said_once_for_each_save_and_the_last_good_one_is_found(tmp_path):
    (tmp_path / "graves").mkdir()
    disk = FaultyDisk(tmp_path / "graves", at=500, code=BROKEN, lasting=True)
    made, heard = started(tmp_path / "c", disk, save_steps=4)
    assert made.run().why == "finished"
    kept = [e.step for e in heard if isinstance(e, Kept)]
    failed = [e.step for e in heard if isinstance(e, Noted) and "nothing was saved: Input/output error" in e.text]
    assert sorted(kept + failed) == [4, 8, 12, 16, 20] and kept and failed
    assert Checkpoints(tmp_path / "c", "r").newest().step == kept[-1]
    again = trainer(20)
    restore(again, Checkpoints(tmp_path / "c", "r").newest(), FACTS)
    assert again.progress.step == kept[-1]


def test_a_second_signal_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    made, _ = started(tmp_path / "c", Slow(0.2), save_steps=3)

    def stop(event):
        if isinstance(event, Stepped) and event.step == 4:
            raise KeyboardInterrupt

    made.listeners.append(stop)
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert Checkpoints(tmp_path / "c", "r").newest().step == 3
    assert not [name for name in os.listdir(tmp_path / "c") if name.startswith(".")]


def test_rhythm_a_dear_checkpoint_is_put_off():
    saver = Saver(every=1.0, steps=0, tell=lambda e: None)
    saver.last -= 2.0
    assert saver.due(1)
    saver.took = 10.0
    assert not saver.due(1), "ten seconds of writing are worth five hundred of training"
