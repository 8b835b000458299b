"""What a machine does to a run: no memory, unreadable data, clocks that jump, another torch. Nothing is lost."""

from __future__ import annotations

import itertools
import json
import time

import pytest
import torch
from tests.training.small import Copies, trainer
from tests.training.test_loop import FACTS

from headwater.errors import Unavailable
from headwater.training.checkpoints import Checkpoints
from headwater.training.events import Kept
from headwater.training.mishaps import explained
from headwater.training.snapshot import keeper, restore


def kept(folder, **given):
    folder.mkdir()
    made = trainer(20, **given)
    made.keep = keeper(Checkpoints(folder, "r"), FACTS)
    return made


def test_a_step_that_does_not_fit_into_memory_names_its_piece_and_what_to_do(tmp_path):
    made = kept(tmp_path / "c")
    real = made._loss

    def hungry(number, piece):
        if made.progress.step == 7:
            torch.empty(1 << 55, dtype=torch.uint8)
        return real(number, piece)

    made._loss = hungry
    with pytest.raises(Unavailable) as caught:
        made.run()
    said = str(caught.value)
    assert said.startswith("step 8 needs more memory than there is, for a piece of ") and " rows of " in said
    assert "--micro-tokens or --recompute" in said and "\n" not in said
    assert Checkpoints(tmp_path / "c", "r").newest().step == 5


def test_a_mistake_of_ours_is_not_explained_away():
    assert explained(RuntimeError("shapes do not match"), 1, "") is None
    assert "all processes, one is gone (Connection closed" in str(
        explained(RuntimeError("[/x/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), 1, "")
    )
    assert "memory" in str(explained(MemoryError(), 3, "2 rows of 9 tokens"))
    said = str(explained(RuntimeError("can't start new thread"), 8, "2 rows of 9 tokens"))
    assert said.startswith("after step 7 the machine has no room for another thread; end other programs")


class Unreadable(Copies):
    def lesson(self, examples, epoch):
        if epoch == 1:
            raise OSError(5, "Input/output error", "pairs.tsv")
        return super().lesson(examples, epoch)


def test_data_that_can_not_be_read_ends_the_run_with_its_cause_and_what_was_saved_is_whole(tmp_path):
    made = kept(tmp_path / "c", source=Unreadable())
    with pytest.raises(OSError, match="Input/output error"):
        made.run()
    assert made.saver.running is None and made.progress.step in range(10, 15)
    assert Checkpoints(tmp_path / "c", "r").newest().step == 10


def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    jumps = itertools.cycle([0.0, 4e9, -1e6, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    heard = []
    made = kept(tmp_path / "c", save_steps=0, save_every=1e6, max_time=1e6)
    made.listeners.append(heard.append)
    assert made.run().why == "finished"
    assert [e.step for e in heard if isinstance(e, Kept)] == [20], "only the last step's"


def test_another_torch_is_said_and_not_refused(tmp_path):
    made = kept(tmp_path / "c")
    made.run()
    folder = tmp_path / "c/step-00000020"
    assert json.loads((folder / "state.json").read_text())["torch"] == torch.__version__
    saved = Checkpoints(tmp_path / "c", "r").newest()
    state = {**saved.state(), "torch": "1.0"}
    object.__setattr__(saved, "state", lambda: state)
    assert restore(trainer(20), saved, FACTS) == [
        f"torch was 1.0 and is {torch.__version__} now: numbers may differ in their last bits"
    ]
