"""Discovery of models and runs, and their names."""

from __future__ import annotations

import pytest

from headwater.errors import BadInput, NotFound
from headwater.serving.model_store import ModelStore, discover_models


def folder(path, *files):
    path.mkdir(parents=True)
    for name in files:
        (path / name).write_text("{}")
    return path


def test_models_runs_and_folders_of_runs(tmp_path):
    folder(tmp_path / "runs" / "a", "config.yaml")
    folder(tmp_path / "runs" / "task" / "b", "config.yaml", "metrics.jsonl")
    model = folder(tmp_path / "bert", "config.json")
    result = discover_models([str(tmp_path / "runs"), str(model), str(tmp_path / "runs" / "a")])
    assert [(i.name, i.kind) for i in result] == [("a", "run"), ("task/b", "run"), ("bert", "model"), ("a-2", "run")]


def test_without_names_local_runs_and_installed_models_are_listed(tmp_path, monkeypatch):
    folder(tmp_path / "runs" / "a", "config.yaml")
    monkeypatch.chdir(tmp_path)
    assert ("a", "run") in [(item.name, item.kind) for item in discover_models([])]


def test_names_are_harmless(tmp_path):
    odd = folder(tmp_path / "x\x1b[31m\u202ey", "config.json")
    assert [item.name for item in discover_models([str(odd)])] == ["x?[31m?y"]


def test_missing_models_are_reported(tmp_path):
    with pytest.raises(NotFound, match="there is no model, file or folder"):
        discover_models([str(tmp_path / "nothing")])
    with pytest.raises(BadInput, match="must be a model, a run or a folder of them"):
        discover_models([str(folder(tmp_path / "empty"))])


def test_an_unknown_name_is_answered_with_the_nearest(model_store):
    with pytest.raises(NotFound, match="did you mean 'tiny decoder'"):
        model_store.get("tiny decodr")


def test_a_run_without_a_model_is_reported(tmp_path):
    model_store = ModelStore(discover_models([str(folder(tmp_path / "new", "config.yaml"))]))
    with pytest.raises(NotFound, match="has no model yet; wait for its first evaluation"):
        model_store.open("new")


def test_few_models_are_held(model_store):
    for name in ("tiny encoder", "tiny decoder", "tiny encoder-decoder"):
        model_store.open(name)
    assert list(model_store.open_models) == ["tiny decoder", "tiny encoder-decoder"]
    assert model_store.open("tiny decoder") is model_store.open("tiny decoder")
