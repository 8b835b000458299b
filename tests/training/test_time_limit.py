"""--max-time is clock time: from the start of the command to its end, reading and the last evaluation included."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from tests.training.clock import Clock

from headwater.data.dates import dates_dataset
from headwater.i18n import translated
from headwater.training.api import resume, train
from headwater.training.state import EvalEvent, NoteEvent, StepEvent, StopReason

SMALL = {"size": "xs", "batch_tokens": 200, "quiet": True}


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "labels.tsv"
    rows = (f"{p.source}\t{'asked' if p.source[0] == '>' else 'plain'}\n" for p in dates_dataset("train", 800))
    path.write_text("text\tlabel\n" + "".join(rows))
    return path


@pytest.mark.parametrize(
    ("reading", "step", "row"),
    [(0.0, 3.0, 0.01), (60.0, 3.0, 0.01), (5.0, 3.0, 0.5), (50.0, 8.0, 0.3), (5.0, 2.0, 1.0)],
)
def test_a_run_takes_the_time_it_was_given(labels, tmp_path, monkeypatch, reading, step, row):
    clock = Clock(monkeypatch)
    clock.training(reading, step, row, closing=2.0)
    began = clock.now
    trained = train(labels, out=tmp_path / "run", max_time="150s", **SMALL)
    assert 135 <= clock.now - began <= 165
    assert trained.result.stop_reason is StopReason.FINISHED, "the learning rate must have come down to its end"


@pytest.mark.parametrize("later", [0.5, 1.6])
def test_steps_that_become_faster_or_slower_are_planned_again(labels, tmp_path, monkeypatch, later):
    clock, received = Clock(monkeypatch), []
    clock.training(10.0, lambda *_: 3.0 if clock.now < 1060 else 3.0 * later, 0.01, closing=2.0)
    began = clock.now
    trained = train(labels, out=tmp_path / "run", max_time="150s", callbacks=[received.append], **SMALL)
    assert 135 <= clock.now - began <= 165 and trained.result.stop_reason is StopReason.FINISHED
    (note, *_) = (event for event in received if isinstance(event, NoteEvent))
    said, zh = ("are faster", "快") if later < 1 else ("take longer", "慢")
    assert note.text.startswith(f"steps {said} than planned")
    assert translated(note.text, "zh").startswith(f"每步比预计{zh}：")
    rates = [event.lr for event in received if isinstance(event, StepEvent)]
    assert rates[-1] == pytest.approx(0.0, abs=1e-9) and max(rates) > 1e-3


def test_the_time_of_an_interrupted_run_is_counted_on(labels, tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    clock.training(10.0, 3.0, 0.01, closing=2.0)

    def stop(event):
        if isinstance(event, StepEvent) and event.step == 20:
            raise KeyboardInterrupt

    began = clock.now
    with pytest.raises(KeyboardInterrupt):
        train(labels, out=tmp_path / "run", max_time="150s", callbacks=[stop], checkpoint_steps=5, **SMALL)
    resume(tmp_path / "run")
    assert 135 <= clock.now - began <= 165


def test_a_time_that_is_too_short_is_said(labels, tmp_path, monkeypatch):
    clock, received = Clock(monkeypatch), []
    clock.training(reading=20.0, step=1.0, row=0.1)
    train(labels, out=tmp_path / "run", max_time="15s", callbacks=[received.append], **SMALL)
    assert len([event for event in received if isinstance(event, StepEvent)]) == 1
    assert len([event for event in received if isinstance(event, EvalEvent)]) == 1
    (note,) = (event for event in received if isinstance(event, NoteEvent))
    assert note.text.startswith("--max-time 15s is too short: reading and planning took 2")
    assert "太短" in translated(note.text, "zh")


@pytest.mark.slow
def test_twenty_seconds_by_the_clock(labels, tmp_path):
    """The whole command, imports and all. Generous, for the machine may be shared."""
    command = [sys.executable, "-m", "headwater", "train", str(labels), "--out", str(tmp_path / "run"), "--size", "xs"]
    began = time.monotonic()
    subprocess.run([*command, "--max-time", "20s"], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert 15 <= time.monotonic() - began <= 25
