"""What a run began from, its working directory and even its own folder may vanish: it goes on, and can be resumed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from headwater.data.dates import dates_dataset
from headwater.errors import NotFound, Unavailable
from headwater.training.api import resume, train
from headwater.training.predict import load_run
from headwater.training.run_dir import RunDir, RunLock
from headwater.training.state import NoteEvent, StepEvent

TINY = {"size": "xs", "max_steps": 8, "batch_tokens": 600, "eval_examples": 10, "eval_every": 4, "log_every": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, pairs = tmp_path_factory.mktemp("data"), dates_dataset("train", 200)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (folder / "running.txt").write_text("\n".join(a for a, _ in pairs))
    rows = (f"{a},{'tagged' if a[0] == '>' else 'plain'}\n".replace(", ", " ") for a, _ in pairs)
    (folder / "labels.csv").write_text("text,label\n" + "".join(rows))
    return folder


def cut(step):
    def listener(event):
        if isinstance(event, StepEvent) and event.step == step:
            raise KeyboardInterrupt

    return listener


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_a_run_that_began_from_a_model_is_resumed_without_it(files, tmp_path):
    train(files / "running.txt", out=tmp_path / "start", objective="mlm", context_length=32, **{**TINY, "max_steps": 1})
    given = {**TINY, "init_from": tmp_path / "start", "checkpoint_steps": 2}
    whole = train(files / "labels.csv", out=tmp_path / "whole", **given)
    for name, step in (("early", 1), ("late", 3)):  # before its first checkpoint, and after it
        with pytest.raises(KeyboardInterrupt):
            train(files / "labels.csv", out=tmp_path / name, callbacks=[cut(step)], **given)
    shutil.rmtree(tmp_path / "start")
    assert same_weights(resume(tmp_path / "late"), whole)
    resumed, unbroken = (RunDir.open(tmp_path / name).load_config().replace(out="") for name in ("late", "whole"))
    assert resumed == unbroken
    with pytest.raises(NotFound, match="start"):
        resume(tmp_path / "early")


def test_a_folder_that_is_removed_is_made_again_at_the_next_save(files, tmp_path, monkeypatch):
    whole = train(files / "pairs.tsv", out=tmp_path / "whole", **TINY)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    notes, refused = [], []

    def remove(event):
        if isinstance(event, StepEvent) and event.step == 5:
            os.chdir(tmp_path)
            shutil.rmtree(tmp_path / "here")
        if isinstance(event, StepEvent) and event.step == 7:
            try:
                with RunLock(tmp_path / "here/run/lock"):
                    pass
            except Unavailable as fault:
                refused.append(fault)
        if isinstance(event, NoteEvent):
            notes.append(event.text)

    with pytest.raises(KeyboardInterrupt):
        train(files / "pairs.tsv", out="run", checkpoint_steps=3, callbacks=[remove, cut(7)], **TINY)
    assert [note for note in notes if "was deleted" in note] == [
        "the run directory was deleted; it was recreated with the current model"
    ]
    assert refused  # nobody else may train there, though the first lock went with the folder
    assert load_run(tmp_path / "here/run").model is not None
    again = resume(tmp_path / "here/run")
    assert same_weights(again, whole) and again.folder == tmp_path / "here/run"
    steps = [
        line["step"] for line in RunDir.open(again.folder).read_log("metrics.jsonl") if line.get("split") == "train"
    ]
    assert steps == [6, 7, 8]  # the journal knows what was done since


def test_another_run_in_its_place_is_left_alone(files, tmp_path):
    def replaced(event):
        if isinstance(event, StepEvent) and event.step == 2:
            shutil.rmtree(tmp_path / "run")
            RunDir(tmp_path / "run").create(RunDir.open(tmp_path / "other").load_config())

    train(files / "pairs.tsv", out=tmp_path / "other", **{**TINY, "max_steps": 1})
    with pytest.raises(Unavailable, match="another run is there now: this one stops"):
        train(files / "pairs.tsv", out=tmp_path / "run", checkpoint_steps=3, callbacks=[replaced], **TINY)
    assert not list((tmp_path / "run/checkpoints").iterdir())
    assert not (tmp_path / "run/metrics.jsonl").exists()
