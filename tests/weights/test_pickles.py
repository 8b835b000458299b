"""Pickles are converted in a sandbox: tensors come out unchanged, and no code of the file runs."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import zipfile

import pytest
import torch

from headwater.errors import BadFile, Fault, NotFound
from headwater.weights.pickles import convert_pickles
from headwater.weights.shards import open_weights


def test_tensors_are_converted_unchanged(tmp_path):
    table = torch.randn(7, 5)
    tensors = {
        "a.weight": table,
        "a.bias": torch.randn(5).half(),
        "tied.weight": table,
        "transposed": torch.randn(3, 4).t(),
        "count": torch.tensor(3),
        "view": torch.arange(10)[2:5],
    }
    torch.save({**tensors, "step": 3, "args": argparse.Namespace(lr=1.0)}, tmp_path / "pytorch_model.bin")
    paths = convert_pickles(tmp_path / "pytorch_model.bin", tmp_path / "out")
    assert [p.name for p in paths] == ["model.safetensors"]
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    read = open_weights(tmp_path / "out")
    assert set(read) == set(tensors)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in tensors.items())


@pytest.mark.usefixtures("forked_pickles")
def test_training_states_legacy_files_and_parameters(tmp_path):
    weights = {"w": torch.nn.Parameter(torch.randn(4))}
    torch.save({"model": weights, "optimizer": {"lr": 1}}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    convert_pickles(tmp_path / "a.pt", tmp_path / "out")
    assert torch.equal(open_weights(tmp_path / "out")["w"], weights["w"].data)


@pytest.mark.usefixtures("forked_pickles")
def test_sharded_pickles_become_one_model(tmp_path):
    for n in (1, 2):
        torch.save({f"w{n}": torch.full((3,), float(n))}, tmp_path / f"pytorch_model-0000{n}-of-00002.bin")
    names = {f"w{n}": f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    convert_pickles(tmp_path, tmp_path / "out")
    assert {name: t[0].item() for name, t in open_weights(tmp_path / "out").items()} == {"w1": 1, "w2": 2}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    with pytest.raises(BadFile, match="must name files in this folder"):
        convert_pickles(tmp_path, tmp_path / "out")


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_the_code_of_a_pickle_does_not_run(tmp_path):
    marker = tmp_path / "marker"
    torch.save({"w": torch.ones(2), "x": RunsCode(marker)}, tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(pickle.dumps(RunsCode(marker)))
    for name in ("a.bin", "b.bin"):
        with pytest.raises(BadFile) as caught:
            convert_pickles(tmp_path / name, tmp_path / "out")
        assert "not converted" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not marker.exists()
        assert os.listdir(tmp_path / "out") == []


@pytest.mark.usefixtures("forked_pickles")
def test_errors_of_torch_are_reworded(tmp_path):
    """The messages of torch advise to load the file anyway, and contain colour codes."""
    torch.save({"w": torch.ones(2), "x": RunsCode(tmp_path / "marker")}, tmp_path / "a.bin")
    (tmp_path / "b.bin").write_bytes(b"nothing of the kind")
    (tmp_path / "c.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:300])
    messages = {
        "a": "it needs posix.system, which is neither a tensor nor plain data; loading it would run its code",
        "b": "it is not a pickle of plain tensors: loading it would run its code, or it is not a pickle at all",
        "c": "it is not a complete weight file: it is cut short, damaged or of another format; fetch it again",
    }
    for name, words in messages.items():
        with pytest.raises(BadFile) as caught:
            convert_pickles(tmp_path / f"{name}.bin", tmp_path / "out")
        assert str(caught.value) == f"{tmp_path / name}.bin: not converted: {words}"


@pytest.mark.usefixtures("forked_pickles")
def test_other_values_than_dense_tensors_are_refused(tmp_path):
    cases = {
        "sparse": ({"w": torch.eye(3).to_sparse()}, "plain dense tensor"),
        "list": ([torch.ones(2)], "table of named tensors"),
        "numbers": ({"a": 1}, "they claim 0 bytes"),
        "expanded": ({"w": torch.ones(1).expand(10**9)}, "they claim 4,000,000,000 bytes"),
        "name": ({"../w": torch.ones(2)}, "not a valid tensor name"),
    }
    for name, (value, words) in cases.items():
        torch.save(value, tmp_path / f"{name}.bin")
        with pytest.raises(BadFile) as caught:
            convert_pickles(tmp_path / f"{name}.bin", tmp_path / "out")
        assert words in str(caught.value), name


@pytest.mark.usefixtures("forked_pickles")
def test_damaged_and_missing_files_are_reported(tmp_path):
    torch.save({"w": torch.ones(100)}, tmp_path / "a.bin")
    good = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "cut.bin").write_bytes(good[: len(good) // 2])
    (tmp_path / "text.bin").write_bytes(b"hello, this is no pickle")
    with zipfile.ZipFile(tmp_path / "zip.bin", "w") as archive:
        archive.writestr("../escape", "x")
    for name in ("cut.bin", "text.bin", "zip.bin"):
        with pytest.raises(BadFile, match="not converted"):
            convert_pickles(tmp_path / name, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "absent.bin", tmp_path / "empty"):
        with pytest.raises(NotFound):
            convert_pickles(source, tmp_path / "out")
    (tmp_path / "link.bin").symlink_to(tmp_path / "a.bin")
    with pytest.raises(Fault, match="link"):
        convert_pickles(tmp_path / "link.bin", tmp_path / "out")
