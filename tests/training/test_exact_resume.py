"""Resumed = uninterrupted, whatever changed meanwhile: the C library, config.yaml, side files, the time, the lock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headwater.cpu import build
from headwater.data.dates import dates_dataset
from headwater.errors import BadSetting, Unavailable
from headwater.training.api import resume, train
from headwater.training.run_dir import RunDir, RunLock
from headwater.training.state import NoteEvent, StepEvent
from headwater.training.storage import CheckpointManager, Disk

TINY = {"size": "xs", "max_steps": 8, "batch_tokens": 600, "eval_examples": 10, "eval_every": 4, "log_every": 1}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pairs(tmp_path):
    return written(tmp_path / "pairs.tsv")


def written(path):
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 200)))
    return path


def cut(step):
    def listener(event):
        if isinstance(event, StepEvent) and event.step == step:
            raise KeyboardInterrupt

    return listener


def begun(pairs, folder, step=5, **given):
    """A run that was stopped in this step; its last checkpoint is older."""
    with pytest.raises(KeyboardInterrupt):
        train(pairs, out=folder, callbacks=[cut(step)], **{**TINY, "checkpoint_steps": 2, **given})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was stopped, for tests that copy it."""
    folder = tmp_path_factory.mktemp("stopped")
    begun(written(folder / "pairs.tsv"), folder / "run", lr=0.002)
    return folder / "run"


def losses(folder):
    return [line["loss"] for line in RunDir.open(folder).read_log("metrics.jsonl") if line.get("split") == "train"]


def notes_of(work):
    received = []
    work([received.append])
    return [event.text for event in received if isinstance(event, NoteEvent)]


# ----------------------------------------------------------------------------------------------------- the C library


needs_c = pytest.mark.skipif(
    build.training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
DROPPING = {"max_steps": 20, "dropout": 0.3, "lr": 1e-3, "optimizer": "adamw", "checkpoint_steps": 10}


@needs_c
@pytest.mark.parametrize("first", ["C", "torch"])
def test_resumed_with_or_without_c_is_the_same_run(pairs, tmp_path, first):
    same_run_with_or_without_c(pairs, tmp_path, first, {})


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("first", ["C", "torch"])
@pytest.mark.parametrize(
    "more", [{"gradient_checkpointing": True}, {"dtype": "bf16"}], ids=["gradient_checkpointing", "bf16"]
)
def test_resumed_with_or_without_c_is_the_same_run_in_other_ways(pairs, tmp_path, first, more):
    same_run_with_or_without_c(pairs, tmp_path, first, more)


def same_run_with_or_without_c(pairs, tmp_path, first, more):
    """The rounding of two libraries, and no more: other dropout masks would differ in the second digit."""
    given = {**TINY, **DROPPING, **more}
    train(pairs, out=tmp_path / "whole", **given)
    with pytest.MonkeyPatch.context() as patch:
        if first == "torch":
            patch.setattr(build, "training_library", lambda: None)
        begun(pairs, tmp_path / "run", 12, **given)
    with pytest.MonkeyPatch.context() as patch:
        if first == "C":
            patch.setattr(build, "training_library", lambda: None)
        said = notes_of(lambda listeners: resume(tmp_path / "run", callbacks=listeners))
    other = {"C": "torch", "torch": "C"}[first]
    assert f"kernels was {first} and is {other} now: numbers may differ in their last bits" in said
    whole, run = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert len(whole) == len(run) == 20
    assert run == pytest.approx(whole, rel=2e-2 if "dtype" in more else 1e-4)


@needs_c
@pytest.mark.slow
@pytest.mark.parametrize("fast", [("1", "0"), ("0", "1")])
def test_resumed_with_or_without_c_in_processes_of_their_own(pairs, tmp_path, fast):
    def run(on, code):
        env = {**os.environ, "HEADWATER_FAST": on, "PYTHONPATH": str(ROOT / "src")}
        words = [sys.executable, "-c", f"from headwater.training.api import *\n{code}"]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]

    for name in ("whole", "run"):
        run(fast[0], f"train({str(pairs)!r}, out={str(tmp_path / name)!r}, **{ {**TINY, **DROPPING} })")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000020")
    run(fast[1], f"resume({str(tmp_path / 'run')!r})")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_a_checkpoint_says_what_its_last_bits_depend_on(pairs, tmp_path):
    train(pairs, out=tmp_path / "run", **{**TINY, "max_steps": 2})
    state = json.loads((tmp_path / "run/checkpoints/step-00000002/state.json").read_text())
    assert state["kernels"] == ("torch" if build.training_library() is None else "C")
    assert state["processor"] and state["device"] == "cpu" and state["config"]["optim"]["lr"] > 0


# --------------------------------------------------------------------------------------------- settings and side files


def edited(folder, **changes):
    path = folder / "config.yaml"
    said = yaml.safe_load(path.read_text())
    for name, value in changes.items():
        section = next(part for part in said.values() if name in part)
        section[name] = value
    path.write_text(yaml.safe_dump(said))


@pytest.mark.parametrize(
    ("name", "value", "was"),
    [
        ("lr", 0.8, "0.002"),
        ("seed", 4, "0"),
        ("batch_tokens", 712, "600"),
        ("dropout", 0.5, "0.1"),
        ("max_grad_norm", 9.0, "1.0"),
    ],
)
def test_an_edited_config_is_refused_with_both_values(stopped, tmp_path, name, value, was):
    shutil.copytree(stopped, tmp_path / "run")
    edited(tmp_path / "run", **{name: value})
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(BadSetting) as caught:
        resume(tmp_path / "run")
    assert str(caught.value) == (
        f"{tmp_path / 'run/config.yaml'}: {name} must be {was}, as it was when step-00000004 was saved, it is {value} "
        "now; restore it, or start a new run"
    )
    assert sorted((tmp_path / "run").rglob("*")) == before
    edited(tmp_path / "run", **{name: json.loads(was)})
    assert resume(tmp_path / "run").result.state.step == 8


def test_what_may_change_may_be_given_or_edited_and_is_said(pairs, tmp_path):
    begun(pairs, tmp_path / "run")
    edited(tmp_path / "run", checkpoint_every=5.0)
    said = notes_of(lambda received: resume(tmp_path / "run", max_steps=9, log_every=1, callbacks=received))
    assert {"checkpoint_every was 60.0 and is 5.0 now", "max_steps was 8 and is 9 now"} <= set(said)
    assert RunDir.open(tmp_path / "run").load_config().max_steps == 9


def test_data_may_lie_elsewhere(pairs, tmp_path):
    whole = train(pairs, out=tmp_path / "whole", **TINY)
    begun(pairs, tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(pairs, tmp_path / "elsewhere/pairs.tsv")
    edited(tmp_path / "run", paths=[str(moved)])
    assert resume(tmp_path / "run").result.state.step == whole.result.state.step
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_another_table_of_synonyms_is_another_run(pairs, tmp_path):
    table = tmp_path / "table.tsv"
    table.write_text("january\tjan\nmarch\tmar\n")
    given = {"augment": {"synonyms": "0.5"}, "synonyms": str(table)}
    train(pairs, out=tmp_path / "whole", **TINY, **given)
    begun(pairs, tmp_path / "run", **given)
    table.write_text("january\tfirst\nmarch\tthird\n")
    with pytest.raises(
        BadSetting, match=r"data must be the same as when step-\d+ was saved, it has changed \(table.tsv"
    ):
        resume(tmp_path / "run")
    table.write_text("january\tjan\nmarch\tmar\n")
    resume(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


# -------------------------------------------------------------------------------------------------------------- time


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run whose steps were decided by its time, and which has come to its end: its last state, and its folder."""
    folder = tmp_path_factory.mktemp("ended")
    few = {**TINY, "max_steps": 0, "eval_every": 1000}
    trained = train(written(folder / "pairs.tsv"), out=folder / "run", max_time="1s", **few)
    return trained.result.state, folder / "run"


@pytest.fixture
def timed(ended, tmp_path):
    """The state, and a copy of the folder in tmp_path/timed."""
    shutil.copytree(ended[1], tmp_path / "timed")
    return ended[0], tmp_path / "timed"


def test_more_time_plans_more_steps(timed):
    done, run = timed[0].step, timed[1]
    received = []
    with pytest.raises(KeyboardInterrupt):
        resume(run, max_time="10m", callbacks=[received.append, cut(done + 3)], checkpoint_steps=done + 2)
    steps = [event for event in received if isinstance(event, StepEvent)]
    assert [event.step for event in steps] == [done + 1, done + 2, done + 3]
    assert "max_time was 1.0 and is 600.0 now" in [event.text for event in received if isinstance(event, NoteEvent)]
    planned = steps[0].total_steps
    assert planned > done + 10 and steps[0].lr > 0
    again = []  # killed and resumed: the plan is kept, so the rates are those of a run that was never stopped
    with pytest.raises(KeyboardInterrupt):
        resume(run, max_time="10m", callbacks=[again.append, cut(done + 3)])
    last = [event for event in again if isinstance(event, StepEvent)]
    assert [(e.step, e.total_steps, e.lr, e.loss) for e in last] == [
        (e.step, e.total_steps, e.lr, e.loss) for e in steps[2:]
    ]


def test_a_time_that_has_passed_is_refused(timed):
    done, run = timed
    with pytest.raises(BadSetting, match=r"max_time must be more than the \d+ s that this run has taken already, got"):
        resume(run, max_time=done.seconds / 2)


def test_a_finished_run_says_what_to_give(pairs, timed, tmp_path):
    train(pairs, out=tmp_path / "steps", **{**TINY, "max_steps": 2})
    said = notes_of(lambda received: resume(tmp_path / "steps", callbacks=received))
    assert "all its 2 steps were done; to continue, give --max-steps above 2" in said
    said = notes_of(lambda received: resume(tmp_path / "steps", max_time="9m", callbacks=received))
    assert "all its 2 steps were done; to continue, give --max-steps above 2" in said
    train(pairs, out=tmp_path / "epochs", epochs=0.01, **{**TINY, "max_steps": 0})
    said = notes_of(lambda received: resume(tmp_path / "epochs", callbacks=received))
    assert "all its 1 steps were done; to continue, give --max-steps above 1 or --epochs above 0.01" in said
    said = " ".join(notes_of(lambda received: resume(timed[1], callbacks=received)))
    assert "to continue, give --max-time above " in said and "s (it counts from the beginning)" in said


# -------------------------------------------------------------------------------------------------------------- lock


def test_a_trainer_whose_lock_was_replaced_stops_and_writes_no_more(pairs, tmp_path):
    lock, others = tmp_path / "run/lock", []

    def replaced(event):
        if isinstance(event, StepEvent) and event.step == 3:
            lock.unlink()
            others.append(RunLock(lock))
            others[0].acquire()

    with pytest.raises(Unavailable) as caught:
        train(pairs, out=tmp_path / "run", callbacks=[replaced], checkpoint_steps=2, **TINY)
    assert str(caught.value) == (
        f"only one process may train in {tmp_path / 'run'}, but its lock file was replaced: this run stops and writes "
        "nothing more (its checkpoints are safe; continue with --resume once no other process trains there)"
    )
    assert [line["step"] for line in RunDir.open(tmp_path / "run").read_log("metrics.jsonl") if "loss" in line] == [
        1,
        2,
        3,
    ]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    assert json.loads(lock.read_text())["pid"] == os.getpid(), "the other's words in its file are left alone"
    others[0].release()
    assert resume(tmp_path / "run").result.state.step == 8


def test_a_lock_that_was_only_removed_is_taken_again_at_once(pairs, tmp_path):
    refused = []

    def removed(event):
        if isinstance(event, StepEvent) and event.step == 3:
            (tmp_path / "run/lock").unlink()
        if isinstance(event, StepEvent) and event.step == 4:  # long before the next checkpoint
            with pytest.raises(Unavailable) as caught:
                RunLock(tmp_path / "run/lock").acquire()
            refused.append(str(caught.value))

    train(pairs, out=tmp_path / "run", callbacks=[removed], **TINY)
    assert refused and losses(tmp_path / "run")[-1]


def test_nobody_is_told_to_remove_the_lock_of_a_living_process(tmp_path):
    path = tmp_path / "lock"
    with RunLock(path), pytest.raises(Unavailable) as caught:
        RunLock(path).acquire()
    assert str(caught.value).endswith(" does; wait for it, or stop it")
    path.write_text(json.dumps({"pid": 7, "host": "a-machine-elsewhere"}))
    with pytest.raises(Unavailable, match="if a-machine-elsewhere no longer exists, remove"):
        RunLock(path).acquire()


# -------------------------------------------------------------------------------------------------------------- disk


def test_a_full_disk_says_how_much_is_needed_and_free(tmp_path):
    class Full(Disk):
        def free_bytes(self, folder):
            return 300_000

    with pytest.raises(OSError, match=r"No space left on device \(1\.1 MB are needed, 0\.3 MB are free\)"):
        CheckpointManager(tmp_path, "r", Full()).check_disk_space(100_000)
