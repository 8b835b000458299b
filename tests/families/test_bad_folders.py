"""Invalid model folders: each is rejected quickly with a message of one line, and no partial model is left."""

from __future__ import annotations

import gc
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import ALL_CONFIGS, make, reconfigure, rewrite, tiny

import headwater
from headwater.core import Transformer
from headwater.errors import BadFile, BadSetting, Fault, NotFound, Unavailable
from headwater.weights import checks
from headwater.weights.safetensors import SafetensorsFile
from headwater.weights.shards import save_weights

Spoil = Callable[[Path], None]
NORM = "model.layers.1.input_layernorm.weight"


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def config(**changes: object) -> Spoil:
    return lambda folder: reconfigure(folder, **changes)


def config_text(text: str) -> Spoil:
    return lambda folder: (folder / "config.json").write_text(text) and None


def changed(change: Callable) -> Spoil:
    return lambda folder: rewrite(folder, change)


def cut(folder: Path) -> None:
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-10])


def header(change: Callable[[dict], None] | None = None, text: str | None = None, length: int | None = None) -> Spoil:
    def spoil(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        if change is not None:
            change(header)
        new = (text or json.dumps(header)).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length or len(new)) + new + raw[8 + size :])

    return spoil


def sharded(spoil: Callable[[Path, dict], None]) -> Spoil:
    def split(folder: Path) -> None:
        file = SafetensorsFile(folder / "model.safetensors")
        save_weights(folder, {name: file[name].clone() for name in file}, max_shard_size=4000)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        spoil(folder, index["weight_map"])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return split


def upwards(folder: Path, weight_map: dict) -> None:
    weight_map["model.norm.weight"] = "../model-00001-of-00002.safetensors"


def linked(folder: Path, weight_map: dict) -> None:
    shard = folder / weight_map["model.norm.weight"]
    os.rename(shard, folder / "elsewhere")
    shard.symlink_to(folder / "elsewhere")


def elsewhere(folder: Path, weight_map: dict) -> None:
    first, last = sorted(set(weight_map.values()))[0], weight_map["model.norm.weight"]
    weight_map["model.norm.weight"] = first if first != last else sorted(set(weight_map.values()))[1]


def pickled(folder: Path) -> None:
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")


def two_columns(header: dict) -> None:
    header[NORM]["shape"] = [2, 8]


def many(header: dict) -> None:
    header[NORM]["shape"] = [1 << 62, 1 << 62]


def as_nan(tensors: dict) -> None:
    tensors[NORM][3] = float("nan")


def integer_weights(tensors: dict) -> None:
    tensors[NORM] = torch.ones(16, dtype=torch.int64)


def without(*names: str) -> Callable[[dict], None]:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def extra(tensors: dict) -> None:
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)


def deeper(tensors: dict) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.ones(24, 16)


CASES: dict[str, tuple[Spoil, type[Fault], str]] = {
    "no config": (without_config, NotFound, "must have a config.json, it has none"),
    "unknown model_type": (config(model_type="llamma"), BadFile, "'llamma' is not a known family; did you mean"),
    "no model_type": (config(model_type=...), BadFile, "model_type is missing; it must be a text"),
    "an unknown key": (config(logit_softcap=30.0), BadFile, "unknown settings.*'logit_softcap' = '30.0'"),
    "auto_map": (config(auto_map={"AutoModel": "x.Y"}), BadFile, "'auto_map' asks to run code.*never does"),
    "auto_map within": (config(rope_scaling={"auto_map": {}}), BadFile, "'auto_map' asks to run code"),
    "internal attention": (config(_attn_implementation_internal="a/b"), BadFile, "asks to run code"),
    "trust_remote_code": (config(trust_remote_code=True), BadFile, "asks to run code"),
    "a negative size": (config(hidden_size=-16), BadFile, "hidden_size must be an integer, 1 to .*, got '-16'"),
    "a size that is true": (config(num_attention_heads=True), BadFile, "num_attention_heads must be an integer"),
    "a fraction": (config(num_hidden_layers=2.5), BadFile, "num_hidden_layers must be an integer"),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=3), BadSetting, "Attention"),
    "unknown activation": (config(hidden_act="sillu"), BadFile, "hidden_act 'sillu' is not known; did you mean 'silu'"),
    "unknown rope": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), BadFile, "spiral"),
    "config twice a key": (config_text('{"model_type": "llama", "model_type": "bert"}'), BadFile, "model_type.*twice"),
    "config of NaN": (config_text('{"model_type": NaN}'), BadFile, "config.json"),
    "config no JSON": (config_text("{"), BadFile, "config.json"),
    "config a list": (config_text("[]"), BadFile, "config.json"),
    "config deep": (config_text('{"a":' * 5000 + "1" + "}" * 5000), BadFile, "config.json"),
    "10^12 weights": (config(hidden_size=65536, intermediate_size=10**6, num_attention_heads=64, num_hidden_layers=9),
                      Unavailable, r"1,\d{3},[\d,]{11} weights, [\d,.]+ GB in float32, and this machine has [\d.]+ GB"),
    "10^20 weights": (config(hidden_size=2**31 - 2, intermediate_size=2**31 - 2, num_hidden_layers=9), BadSetting,
                      "every tensor must have a size a machine can name"),
    "10,000 layers": (config(num_hidden_layers=10_000), BadFile, "10,000 layers, but the file holds only 21 tensors"),
    "20,000 layers": (config(num_hidden_layers=20_000), BadFile, "num_hidden_layers must be an integer, 1 to 10000"),
    "one layer too many": (config(num_hidden_layers=3), BadFile, r"9 missing: 'decoder.layers.2.*and 5 more"),
    "one layer too few": (config(num_hidden_layers=1), BadFile, r"9 not known: 'model.layers.1.*and 5 more"),
    "another width": (config(intermediate_size=20), BadFile, r"6 of the wrong shape.*\[24, 16\], must be \[20, 16\]"),
    "a missing tensor": (changed(without(NORM)), BadFile, "1 missing: 'decoder.layers.1.self_attn_norm.weight'"),
    "an extra tensor": (changed(extra), BadFile, "1 not known: 'model.layers.0.self_attn.k_scale'"),
    "a tensor of a third layer": (changed(deeper), BadFile, "1 not known: 'model.layers.2.mlp.up_proj.weight'"),
    "missing and extra": (changed(lambda t: t.update(x=t.pop(NORM))), BadFile, "1 missing.*1 not known: 'x'"),
    "a wrong shape": (header(two_columns), BadFile, r"self_attn_norm.weight \[2, 8\], must be \[16\]"),
    "a wrong kind": (changed(integer_weights), BadFile, "input_layernorm.weight' is int64, must be float32"),
    "NaN": (changed(as_nan), BadFile, "decoder.layers.1.self_attn_norm.weight holds NaN or infinity"),
    "cut short": (cut, BadFile, "cut short: the tensors need"),
    "no header": (lambda f: (f / "model.safetensors").write_bytes(b"abc") and None, BadFile, "not a safetensors file"),
    "absurd header length": (header(length=1 << 62), BadFile, "not a safetensors file, or cut short"),
    "absurd shape": (header(many), BadFile, "needs .* bytes"),
    "a name twice": (header(text='{"a": {}, "a": {}}'), BadFile, "'a' .*twice"),
    "only a pickle": (pickled, NotFound, "only pytorch_model.bin: a pickle can run code and is never loaded"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), NotFound, "must hold model.safetensors or"),
    "a shard above": (sharded(upwards), BadFile, "is not a shard: it must be the plain name"),
    "a shard that is a link": (sharded(linked), BadFile, "must be a regular file, it is a link"),
    "a tensor in another shard": (sharded(elsewhere), BadFile, "model"),
}  # fmt: skip


@pytest.fixture(scope="module")
def valid_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("valid") / "llama"
    return make(folder, "llama")


@pytest.fixture
def folder(valid_folder, tmp_path) -> Path:
    return Path(shutil.copytree(valid_folder, tmp_path / "model"))


@pytest.mark.parametrize("name", CASES)
def test_a_bad_folder_is_one_line_and_quick(name, folder):
    spoil, fault, words = CASES[name]
    spoil(folder)
    fastest = 9.0
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(fault, match=words) as caught:
            headwater.load(folder)
        fastest = min(fastest, time.process_time() - start)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    assert fastest < 0.05, f"took {fastest:.3f} s of processor time"


def test_no_partial_model_is_left(folder):
    """The last check of all: most tensors are loaded when the NaN is detected."""
    rewrite(folder, as_nan)
    gc.collect()
    before = {id(item) for item in gc.get_objects() if type(item) is Transformer}  # other tests may keep models
    for _ in range(3):
        with pytest.raises(BadFile, match="NaN"):
            headwater.load(folder)
    gc.collect()
    assert not [item for item in gc.get_objects() if type(item) is Transformer and id(item) not in before]


def test_a_valid_folder_loads(folder):
    assert headwater.load(folder).model.decoder is not None


def test_a_machine_with_less_memory(folder, monkeypatch):
    """Planted fault of the memory check: a valid folder on a machine of ten kilobytes."""
    monkeypatch.setattr(checks, "memory_limit", lambda: 10_000)
    with pytest.raises(Unavailable, match=r"the model has 5,424 weights, 0.0 GB in float32"):
        headwater.load(folder)


def test_weights_are_counted_without_being_built():
    for name in ALL_CONFIGS:
        model = tiny(name).model
        bare = sum(p.numel() for _, p in model.named_parameters(remove_duplicate=False))
        assert checks.count_parameters(model.spec) == bare, name
