"""What a machine does to a run: no memory, unreadable data, clocks that jump, another torch. Nothing is lost."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from tests.training.small import Copies, trainer
from tests.training.test_trainer import FACTS

from headwater.errors import Unavailable
from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.diagnostics import as_fault
from headwater.training.distributed import SingleProcess
from headwater.training.state import CheckpointEvent, StopReason
from headwater.training.storage import CheckpointManager


def kept(folder, **given):
    folder.mkdir()
    made = trainer(20, **given)
    made.output = CheckpointWriter(CheckpointManager(folder, "r"), FACTS)
    return made


def test_a_step_that_does_not_fit_into_memory_names_its_piece_and_what_to_do(tmp_path):
    made = kept(tmp_path / "c")
    real = made.loss

    def hungry(index, micro_batch):
        if made.state.step == 7:
            torch.empty(1 << 55, dtype=torch.uint8)
        return real(index, micro_batch)

    made.loss = hungry
    with pytest.raises(Unavailable) as caught:
        made.train()
    said = str(caught.value)
    assert said.startswith("step 8 needs more memory than there is, for a micro-batch of ") and " rows of " in said
    assert "--micro-batch-tokens or --gradient-checkpointing" in said and "\n" not in said
    assert CheckpointManager(tmp_path / "c", "r").latest_valid().step == 5


def test_a_mistake_of_ours_is_not_explained_away():
    assert as_fault(RuntimeError("shapes do not match"), 1, "", SingleProcess()) is None
    assert "all processes, one of them does not answer (Connection closed" in str(
        as_fault(RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), 1, "", SingleProcess())
    )
    assert "memory" in str(as_fault(MemoryError(), 3, "2 rows of 9 tokens", SingleProcess()))
    said = str(as_fault(RuntimeError("can't start new thread"), 8, "2 rows of 9 tokens", SingleProcess()))
    assert said.startswith("after step 7 the machine cannot start another thread; end other programs")


class Unreadable(Copies):
    def collate(self, examples, epoch):
        if epoch == 1:
            raise OSError(5, "Input/output error", "pairs.tsv")
        return super().collate(examples, epoch)


def test_data_that_can_not_be_read_ends_the_run_with_its_cause_and_what_was_saved_is_whole(tmp_path):
    made = kept(tmp_path / "c", source=Unreadable())
    with pytest.raises(OSError, match="Input/output error"):
        made.train()
    assert made.checkpointer.pending is None and made.state.step in range(10, 15)
    assert CheckpointManager(tmp_path / "c", "r").latest_valid().step == 10


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    jumps = itertools.cycle([0.0, 4e9, -1e6, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    received = []
    made = kept(tmp_path / "c", checkpoint_steps=0, checkpoint_every=1e6, max_time=1e6)
    made.callbacks.append(received.append)
    assert made.train().stop_reason is StopReason.FINISHED
    assert [e.step for e in received if isinstance(e, CheckpointEvent)] == [20], "only the last step's"


def test_another_torch_is_said_and_not_refused(tmp_path):
    made = kept(tmp_path / "c")
    made.train()
    folder = tmp_path / "c/step-00000020"
    assert json.loads((folder / "state.json").read_text())["torch"] == torch.__version__
    saved = CheckpointManager(tmp_path / "c", "r").latest_valid()
    state = {**saved.state(), "torch": "1.0"}
    object.__setattr__(saved, "state", lambda: state)
    assert restore_checkpoint(trainer(20), saved, FACTS) == [
        f"torch was 1.0 and is {torch.__version__} now: numbers may differ in their last bits"
    ]
