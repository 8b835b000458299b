"""What a run began from, its working directory and even its own folder may vanish: it goes on, and can be resumed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from headwater.data.dates import dates
from headwater.errors import NotFound, Unavailable
from headwater.training.events import Noted, Stepped
from headwater.training.lock import Lock
from headwater.training.run import Run
from headwater.training.teaching import resume, train
from headwater.training.use import load_run

TINY = {"size": "xs", "max_steps": 8, "batch_tokens": 600, "eval_rows": 10, "eval_every": 4, "log_every": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, pairs = tmp_path_factory.mktemp("data"), dates("train", 200)
    (folder / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    (folder / "running.txt").write_text("\n".join(a for a, _ in pairs))
    rows = (f"{a},{'tagged' if a[0] == '>' else 'plain'}\n".replace(", ", " ") for a, _ in pairs)
    (folder / "labels.csv").write_text("text,label\n" + "".join(rows))
    return folder


def cut(step):
    def listener(event):
        if isinstance(event, Stepped) and event.step == step:
            raise KeyboardInterrupt

    return listener


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_a_run_that_began_from_a_model_is_resumed_without_it(files, tmp_path):
    train(files / "running.txt", out=tmp_path / "start", objective="masked", context=32, **{**TINY, "max_steps": 1})
    given = {**TINY, "start": tmp_path / "start", "save_steps": 2}
    whole = train(files / "labels.csv", out=tmp_path / "whole", **given)
    for name, step in (("early", 1), ("late", 3)):  # before its first checkpoint, and after it
        with pytest.raises(KeyboardInterrupt):
            train(files / "labels.csv", out=tmp_path / name, listeners=[cut(step)], **given)
    shutil.rmtree(tmp_path / "start")
    assert same_weights(resume(tmp_path / "late"), whole)
    resumed, unbroken = (Run.open(tmp_path / name).settings().but(out="") for name in ("late", "whole"))
    assert resumed == unbroken
    with pytest.raises(NotFound, match="start"):
        resume(tmp_path / "early")


def test_a_folder_that_is_removed_is_made_again_at_the_next_save(files, tmp_path, monkeypatch):
    whole = train(files / "pairs.tsv", out=tmp_path / "whole", **TINY)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    notes, refused = [], []

    def remove(event):
        if isinstance(event, Stepped) and event.step == 5:
            os.chdir(tmp_path)
            shutil.rmtree(tmp_path / "here")
        if isinstance(event, Stepped) and event.step == 7:
            try:
                with Lock(tmp_path / "here/run/lock"):
                    pass
            except Unavailable as fault:
                refused.append(fault)
        if isinstance(event, Noted):
            notes.append(event.text)

    with pytest.raises(KeyboardInterrupt):
        train(files / "pairs.tsv", out="run", save_steps=3, listeners=[remove, cut(7)], **TINY)
    assert [note for note in notes if "was gone" in note] == [
        "the folder of the run was gone; it is made again, with the model as it is now"
    ]
    assert refused  # nobody else may train there, though the first lock went with the folder
    assert load_run(tmp_path / "here/run").model is not None
    again = resume(tmp_path / "here/run")
    assert same_weights(again, whole) and again.folder == tmp_path / "here/run"
    steps = [line["step"] for line in Run.open(again.folder).lines("metrics.jsonl") if line.get("split") == "train"]
    assert steps == [6, 7, 8]  # the journal knows what was done since


def test_another_run_in_its_place_is_left_alone(files, tmp_path):
    def replaced(event):
        if isinstance(event, Stepped) and event.step == 2:
            shutil.rmtree(tmp_path / "run")
            Run.new(tmp_path / "run", Run.open(tmp_path / "other").settings())

    train(files / "pairs.tsv", out=tmp_path / "other", **{**TINY, "max_steps": 1})
    with pytest.raises(Unavailable, match="another run is there now: this one stops"):
        train(files / "pairs.tsv", out=tmp_path / "run", save_steps=3, listeners=[replaced], **TINY)
    assert not list((tmp_path / "run/checkpoints").iterdir())
    assert not (tmp_path / "run/metrics.jsonl").exists()
