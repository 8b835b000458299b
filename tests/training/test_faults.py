"""Rows of the fault list that need a real disk, real files or a whole state: refused in words, or nothing changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.training.small import mean_loss, trainer
from tests.training.test_trainer import FACTS, broken, unbroken

from headwater.data.dates import dates_dataset
from headwater.errors import BadFile, BadInput, BadSetting
from headwater.text.train import train_tokenizer
from headwater.training import task_data
from headwater.training.api import resume, train
from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.state import EvalResult, NoteEvent, StepEvent, StopReason
from headwater.training.storage import CheckpointManager
from headwater.training.trainer import Trainer

TINY = {"size": "xs", "max_steps": 4, "batch_tokens": 600, "eval_examples": 10, "eval_every": 2, "log_every": 1}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 120)))
    return path


# ------------------------------------------------------------------------------------------------- the state of a run


def test_killed_at_each_piece_of_a_step_there_is_no_half_gradient(tmp_path):
    _, final = unbroken(micro_batch_tokens=40)
    pieces = len(list((made := trainer(20, micro_batch_tokens=40))._micro_batches(next(made.dataset.batches_from(0)))))
    assert pieces > 2
    for number in range(pieces):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        made = trainer(20, micro_batch_tokens=40)
        made.output = CheckpointWriter(CheckpointManager(folder, "r"), FACTS)
        real = made._backward

        def dies(piece, *given, made=made, real=real, last=number):
            found = real(piece, *given)
            if made.state.step == 7 and piece == last:
                raise KeyboardInterrupt
            return found

        made._backward = dies
        with pytest.raises(KeyboardInterrupt):
            made.train()
        again = trainer(20, micro_batch_tokens=40)
        restore_checkpoint(again, CheckpointManager(folder, "r").latest_valid(), FACTS)
        again.train()
        assert torch.equal(final, torch.cat([p.detach().flatten() for p in again.model.parameters()])), number


def measured(net):
    """It gets worse in the middle, so that the best and the patience matter."""
    found = mean_loss(net)
    return EvalResult((round(-found.metrics["loss"], 1),), found.metrics)


def test_counters_best_and_patience_come_back_field_by_field(tmp_path):
    settings = {"eval_every": 2, "evaluate": measured, "patience": 4, "ema": 0.9, "skip_grad_spikes": 50.0, "steps": 60}
    whole = trainer(**settings)
    outcome = whole.train()
    assert outcome.stop_reason is StopReason.EARLY_STOPPING, "the run must end by patience, or the counter is not seen"
    (tmp_path / "c").mkdir()
    made = trainer(**settings)
    made.output = CheckpointWriter(CheckpointManager(tmp_path / "c", "r", max_to_keep=100), FACTS)
    states = {}

    def watch(event):
        if isinstance(event, StepEvent) and event.step % 5 == 0:
            states[event.step] = json.dumps(asdict(made.state))

    made.callbacks.append(watch)
    made.train()
    step = max(step for step in states if step % 2)  # no evaluation comes between this step and its checkpoint
    for newer in (path for path in (tmp_path / "c").iterdir() if int(path.name[5:]) > step):
        shutil.rmtree(newer)
    again = trainer(**settings)
    restore_checkpoint(again, CheckpointManager(tmp_path / "c", "r").latest_valid(), FACTS)
    assert json.loads(json.dumps(asdict(again.state))) == json.loads(states[step])
    assert again.state.evals_since_best and again.state.best_step < step, "there must be something to forget"
    end = again.train()
    for name in ("step", "best_score", "best_step", "evals_since_best", "tokens_seen", "recent_grad_norms"):
        assert getattr(end.state, name) == getattr(outcome.state, name), name


def test_forgotten_patience_would_be_seen(tmp_path):
    settings = {"eval_every": 2, "evaluate": measured, "patience": 4, "checkpoint_steps": 1}
    lines, _ = unbroken(60, **settings)

    def forgetful(made: Trainer, saved, facts):
        restore_checkpoint(made, saved, facts)
        made.state.evals_since_best = 0

    again, _ = broken(tmp_path / "c", (len(lines) - 1,), 60, restored=forgetful, **settings)
    assert len(again) > len(lines)


# -------------------------------------------------------------------------------------------------------- a real disk

FILL = """
import sys
from pathlib import Path
from small import trainer
from headwater.training.checkpoint import CheckpointWriter
from headwater.training.storage import CheckpointManager
from headwater.training.state import CheckpointEvent, NoteEvent, StepEvent, StopReason
from headwater.training.storage import Disk
folder, received = Path(sys.argv[1]), []
made = trainer(20, [received.append], checkpoint_steps=2)
made.output = CheckpointWriter(CheckpointManager(folder / "c", "r"), {})
(folder / "c").mkdir()
def fill(event):
    if isinstance(event, StepEvent) and event.step in (7, 13):
        made.checkpointer.join()  # a checkpoint is written beside the steps: the one begun before must be whole
    if isinstance(event, StepEvent) and event.step == 7:  # all but a few bytes are taken, behind the back of who asks
        with (folder / "heap").open("wb", buffering=0) as heap:
            try:
                while heap.write(bytes(4096)):
                    pass
            except OSError:
                pass
    if isinstance(event, StepEvent) and event.step == 13:
        (folder / "heap").unlink()
made.callbacks.append(fill)
Disk.free_bytes = lambda self, where: 1 << 40  # the disk itself must say that it is full: nobody asks before
assert made.train().stop_reason is StopReason.FINISHED
saved = [e.step for e in received if isinstance(e, CheckpointEvent)]
print(saved, [e.text for e in received if isinstance(e, NoteEvent)])
assert CheckpointManager(folder / "c", "r").latest_valid().step == 20
assert not [p for p in (folder / "c").iterdir() if p.name.startswith(".")]
"""


def in_tmpfs(code, folder):
    """A process with a disk of 1 MB of its own there, mounted for it alone; None where this machine lends none."""
    mount = 'mount -t tmpfs -o size=1m none "$2" && exec "$0" -c "$1" "$2"'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, code, str(folder)]
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests" / "training")))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=200)
    except FileNotFoundError:
        return None
    return None if "unshare:" in done.stderr or "mount:" in done.stderr else done


def test_a_disk_that_is_really_full_for_a_while_loses_nothing(tmp_path):
    done = in_tmpfs(FILL, tmp_path)
    if done is None:
        pytest.skip("this machine lends no disk of its own (unshare, mount)")
    assert done.returncode == 0, done.stderr[-2000:]
    kept, notes = done.stdout.split("] [")
    assert kept == "[2, 4, 6, 14, 16, 18, 20" and notes.count("nothing was saved: No space left on device") == 3


READ_ONLY = """
import subprocess, sys
from headwater.errors import BadFile
from headwater.training.run_dir import RunDir
from headwater.training.config import parse_config
from pathlib import Path
folder = Path(sys.argv[1]) / "run"
run = RunDir(folder).create(parse_config({}))
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
for begun in (lambda: run.locked().__enter__(), lambda: RunDir(folder.parent / "other").create(parse_config({}))):
    try:
        begun()
    except BadFile as fault:
        print(str(fault).replace(sys.argv[1], ""))
"""


def test_a_read_only_disk_is_refused_at_the_start_and_not_at_the_first_save(tmp_path):
    done = in_tmpfs(READ_ONLY, tmp_path)
    if done is None:
        pytest.skip("this machine lends no disk of its own (unshare, mount)")
    assert done.stdout.splitlines() == [
        "/run must be writable, it is not; choose another --out, or change its mode",
        "/other cannot be created: read-only file system; choose another --out",
    ], done.stderr[-2000:]


# ----------------------------------------------------------------------------------------------- data and tokenizers


def test_a_file_that_changes_while_it_is_read_is_refused(pairs, tmp_path, monkeypatch):
    """Else the checkpoint would vouch for what was never learned, and a resumed run would learn it."""
    real = task_data.read_dataset

    def meanwhile(*args, **options):
        found = real(*args, **options)
        with pairs.open("a") as file:
            file.write("one more\trow\n")
        return found

    monkeypatch.setattr(task_data, "read_dataset", meanwhile)
    with pytest.raises(BadFile, match="pairs.tsv must not change while it is read, it did; wait until it is written"):
        train(pairs, out=tmp_path / "run", **TINY)
    assert not (tmp_path / "run").exists()


def test_a_synonym_table_that_changes_while_it_is_read_is_refused(pairs, tmp_path, monkeypatch):
    table = tmp_path / "synonyms.tsv"
    table.write_text("one\tsingle\n")
    build = task_data.build_task_data

    def write_meanwhile(*args):
        data = build(*args)
        table.write_text("one\tsole\n")
        return data

    monkeypatch.setattr(task_data, "build_task_data", write_meanwhile)
    with pytest.raises(BadFile, match="synonyms.tsv must not change while it is read"):
        train(pairs, out=tmp_path / "run", augment="synonyms=0.5", synonyms=str(table), **TINY)


def test_a_file_cut_short_or_removed_while_training_changes_nothing(pairs, tmp_path):
    whole = train(pairs, out=tmp_path / "whole", **TINY)

    def cut(event):
        if isinstance(event, StepEvent) and event.step == 1:
            os.truncate(pairs, 10)
        if isinstance(event, StepEvent) and event.step == 3:
            pairs.unlink()

    other = train(pairs, out=tmp_path / "other", callbacks=[cut], **TINY)
    for a, b in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)
    pairs.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 60)))
    with pytest.raises(BadSetting, match="data must be the same as when step-00000004 was saved, it has changed"):
        resume(tmp_path / "other", max_steps=6)


def test_a_file_of_another_layout_is_first_of_all_another_file(pairs, tmp_path):
    """Not the columns it lacks now: what has happened is that the data changed."""
    train(pairs, out=tmp_path / "run", columns={"source": "1", "target": "2"}, **TINY)
    pairs.write_text("one\ntwo\n")
    with pytest.raises(BadSetting, match=r"data must be .* it has changed \(.*\.tsv\); restore it"):
        resume(tmp_path / "run", max_steps=6)


def test_two_files_of_one_name_are_both_watched(pairs, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    lines = pairs.read_text().splitlines(keepends=True)
    files = [tmp_path / name / "pairs.tsv" for name in "ab"]
    for file, some in zip(files, (lines[:60], lines[60:]), strict=True):
        file.write_text("".join(some))
    train(*files, out=tmp_path / "run", **TINY)
    for file in files:
        kept = file.read_text()
        file.write_text(kept + "one more\trow\n")
        with pytest.raises(BadSetting, match="data must be the same"):
            resume(tmp_path / "run", max_steps=6)
        file.write_text(kept)
    assert resume(tmp_path / "run", max_steps=5).result.state.step == 5


def test_another_tokenizer_in_the_folder_of_a_run_is_refused(pairs, tmp_path):
    train(pairs, out=tmp_path / "run", **TINY)
    vocab = len(json.loads((tmp_path / "run/model/tokenizer.json").read_text())["model"]["vocab"])
    train_tokenizer(["quite another text"] * 9, "bpe", max(vocab, 300)).save(tmp_path / "run/model")
    with pytest.raises(BadSetting, match="tokenizer must be the same as when step-00000004 was saved, it has changed"):
        resume(tmp_path / "run", max_steps=6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hi\n", "a text of 2 tokens cannot be split with 2 on each side; give a longer text"),
        ("", "is empty; give a file with at least one line"),
        ("\n \n\n", "is empty; give a file with at least one line"),
    ],
)
def test_too_little_text_is_refused_before_a_model_is_built(tmp_path, text, said, monkeypatch):
    monkeypatch.setattr("headwater.training.setup._initial_model", None)
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises((BadFile, BadInput, BadSetting), match=said):
        train(tmp_path / "a.txt", out=tmp_path / "run", **TINY)


def test_a_text_shorter_than_the_context_is_read_with_a_shorter_one_and_it_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("it was the best of times, it was the worst of times\n" * 3)
    received = []
    train(tmp_path / "a.txt", out=tmp_path / "run", context_length=4096, callbacks=[received.append], **TINY)
    assert any("the text is short: the context is " in e.text for e in received if isinstance(e, NoteEvent))


def test_lines_that_are_not_in_the_encoding_stop_it_or_are_counted(tmp_path):
    rows = [f"{a}\t{b}\n".encode() for a, b in dates_dataset("train", 60)]
    (tmp_path / "a.tsv").write_bytes(b"".join([*rows[:40], b"broken \xff\there\n", *rows[40:]]))
    with pytest.raises(
        BadFile, match=r"\(line 41\) is 0xFF, not valid utf-8; name the file's --encoding, or --encoding-errors"
    ):
        train(tmp_path / "a.tsv", out=tmp_path / "run", **TINY)
    said = []
    skipping = {"encoding_errors": "skip", "on_setup": lambda setup: said.append(str(setup.data_summary)), **TINY}
    train(tmp_path / "a.tsv", out=tmp_path / "run", **skipping)
    assert "bad: 1 × not valid utf-8 (a.tsv:41)" in said[0] and "train      60 rows" in said[0]
    with pytest.raises(
        BadSetting, match="encoding_errors must be strict, skip or replace, got 'skp'; did you mean 'skip'"
    ):
        train(tmp_path / "a.tsv", out=tmp_path / "other", encoding_errors="skp", **TINY)
