"""What is found where, under which names."""

from __future__ import annotations

import pytest

from headwater.errors import BadInput, NotFound
from headwater.serving.shelf import Shelf, find


def folder(path, *files):
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def test_models_runs_and_folders_of_runs(tmp_path):
    folder(tmp_path / "runs" / "a", "config.yaml")
    folder(tmp_path / "runs" / "task" / "b", "config.yaml", "metrics.jsonl")
    model = folder(tmp_path / "bert", "config.json")
    found = find([str(tmp_path / "runs"), str(model), str(tmp_path / "runs" / "a")])
    assert [(i.name, i.kind) for i in found] == [("a", "run"), ("task/b", "run"), ("bert", "model"), ("a-2", "run")]


def test_nothing_given_is_what_lies_around(tmp_path, monkeypatch):
    folder(tmp_path / "runs" / "a", "config.yaml")
    monkeypatch.chdir(tmp_path)
    assert ("a", "run") in [(item.name, item.kind) for item in find([])]


def test_names_are_harmless(tmp_path):
    odd = folder(tmp_path / "x\x1b[31m\u202ey", "config.json")
    assert [item.name for item in find([str(odd)])] == ["x?[31m?y"]


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(NotFound, match="there is no model, file or folder"):
        find([str(tmp_path / "nothing")])
    with pytest.raises(BadInput, match="must be a model, a run or a folder of them"):
        find([str(folder(tmp_path / "empty"))])


def test_an_unknown_name_is_answered_with_the_nearest(shelf):
    with pytest.raises(NotFound, match="did you mean 'tiny decoder'"):
        shelf.item("tiny decodr")


def test_a_run_without_a_model_is_told(tmp_path):
    shelf = Shelf(find([str(folder(tmp_path / "new", "config.yaml"))]))
    with pytest.raises(NotFound, match="has no model yet; wait for its first evaluation"):
        shelf.open("new")


def test_few_models_are_held(shelf):
    for name in ("tiny encoder", "tiny decoder", "tiny encoder-decoder"):
        shelf.open(name)
    assert list(shelf.loaded) == ["tiny decoder", "tiny encoder-decoder"]
    assert shelf.open("tiny decoder") is shelf.open("tiny decoder")
