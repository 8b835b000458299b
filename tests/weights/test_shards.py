"""Sharded weights: the index and the shards must agree, and no name may leave the folder."""

from __future__ import annotations

import json

import pytest
import torch

from headwater.errors import BadFile, Fault, NotFound
from headwater.weights.safetensors import SafetensorsFile, write_safetensors
from headwater.weights.shards import WEIGHTS_INDEX_NAME, ShardedSafetensors, open_weights, save_weights

WEIGHTS = {f"layers.{n}.weight": torch.full((4, 4), float(n)) for n in range(5)}


def sharded(folder):
    save_weights(folder, WEIGHTS, max_shard_size=130)
    return folder


def test_shards_are_read_as_one_mapping(tmp_path):
    paths = save_weights(tmp_path, WEIGHTS, max_shard_size=130)
    assert [p.name for p in paths] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)] + [WEIGHTS_INDEX_NAME]
    read = open_weights(tmp_path)
    assert isinstance(read, ShardedSafetensors) and set(read) == set(WEIGHTS) and len(read) == 5
    assert all(torch.equal(read[n], WEIGHTS[n]) and read.meta_tensor(n).shape == (4, 4) for n in WEIGHTS)
    assert json.loads((tmp_path / WEIGHTS_INDEX_NAME).read_text())["metadata"]["total_size"] == 5 * 64


def test_small_weights_are_one_file_and_the_last_write_counts(tmp_path):
    sharded(tmp_path)
    save_weights(tmp_path, {"a": torch.ones(1)})
    assert isinstance(open_weights(tmp_path), SafetensorsFile) and list(open_weights(tmp_path)) == ["a"]
    sharded(tmp_path)
    assert set(open_weights(tmp_path)) == set(WEIGHTS)


def test_transformers_reads_our_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=11, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path)
    tensors = {k: v.clone() for k, v in open_weights(tmp_path).items()}
    save_weights(tmp_path, tensors, max_shard_size=2000)
    assert (tmp_path / WEIGHTS_INDEX_NAME).exists()
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "x\0.safetensors",
        "..safetensors",
        "http://x/y.safetensors",
        "model.bin",
        "",
        "x" * 500 + ".safetensors",
        3,
        None,
        "a..safetensors",
    ],
)
def test_a_shard_is_a_plain_name_in_the_folder(tmp_path, shard):
    (tmp_path / WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(BadFile, match="is not a shard"):
        ShardedSafetensors(tmp_path)


def test_a_linked_shard_is_refused(tmp_path):
    outside = tmp_path / "outside.safetensors"
    write_safetensors(outside, {"a": torch.ones(1)})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "m.safetensors").symlink_to(outside)
    (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))
    with pytest.raises(BadFile, match="it is a link"):
        ShardedSafetensors(folder)


def edit(folder, change):
    index = json.loads((folder / WEIGHTS_INDEX_NAME).read_text())
    change(index["weight_map"])
    (folder / WEIGHTS_INDEX_NAME).write_text(json.dumps(index))


def test_index_and_shards_must_agree(tmp_path):
    first, last = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    cases = {
        "moved": (lambda m: m.update({"layers.0.weight": last}), "places in"),
        "forgotten": (lambda m: m.pop("layers.0.weight"), "places nowhere"),
        "invented": (lambda m: m.update({"ghost": first}), "which lacks it"),
        "empty": (lambda m: m.clear(), "weight_map must name"),
    }
    for n, (change, words) in enumerate(cases.values()):
        (tmp_path / str(n)).mkdir()
        edit(sharded(tmp_path / str(n)), change)
        with pytest.raises(BadFile, match=words):
            ShardedSafetensors(tmp_path / str(n))


def test_two_shards_with_the_same_key(tmp_path):
    sharded(tmp_path)
    write_safetensors(
        tmp_path / "model-00003-of-00003.safetensors",
        {"layers.4.weight": torch.ones(4, 4), "layers.0.weight": torch.ones(1)},
    )
    with pytest.raises(BadFile, match="mixed up"):
        ShardedSafetensors(tmp_path)


def test_a_missing_shard_and_invalid_counts(tmp_path):
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFound, match="model-00002"):
        ShardedSafetensors(tmp_path)
    for index, words in [
        ({"weight_map": {f"t{n}": f"s{n}.safetensors" for n in range(3000)}}, "at most 2,000"),
        ({"weight_map": []}, "weight_map must name"),
        ({}, "weight_map must name"),
    ]:
        (tmp_path / WEIGHTS_INDEX_NAME).write_text(json.dumps(index))
        with pytest.raises(BadFile, match=words):
            ShardedSafetensors(tmp_path)


def test_a_pickle_is_never_loaded(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(NotFound, match="headwater convert"):
        open_weights(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(Fault, match="it has neither"):
        open_weights(tmp_path)
