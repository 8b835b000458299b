"""Bottleneck adapters in the layout of the adapters library: there and back, its own outputs, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import VOCAB, make

from headwater import load, load_adapter, save_adapter, tune
from headwater.cli import main
from headwater.errors import BadFile, BadSetting
from headwater.tuning import Houlsby, LoRA, Parallel, Pfeiffer
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

IDS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))
METHODS = {"seq_bn": Pfeiffer(4), "double_seq_bn": Houlsby(4, "gelu"), "par_bn": Parallel(4)}


@pytest.fixture
def saved(tmp_path, random_weights):
    """A function that saves an adapter of a tiny model: the base, the folder, the outputs."""

    def save(family, method, **head):
        base = make(tmp_path / "base", family, **head)
        loaded = tune(load(base), method)
        random_weights(loaded.model)
        save_adapter(loaded, tmp_path / "a", layout="adapters")
        with torch.no_grad():
            return base, tmp_path / "a", loaded.model(IDS)

    return save


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@torch.no_grad()
def test_there_and_back(saved, family, method):
    base, folder, want = saved(family, method)
    assert torch.equal(load_adapter(load(base), folder).model(IDS), want)
    assert not torch.allclose(load(base).model(IDS), want, atol=0.1)
    (name, *_names) = sorted(SafetensorsFile(folder / "adapter.safetensors"))
    first = "bert.encoder.layer.0." if family == "bert" else "model.layers.0."
    assert name.startswith(first) and name.endswith(".adapters.default.adapter_down.0.bias")
    assert main(["adapter", "show", str(folder)]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phm_layer": True}, "'phm_layer' = 'True'"),
        ({"scaling": 2.0}, "'scaling' = '2.0'"),
        ({"reduction_factor": 1.5}, "'reduction_factor' = '1.5'"),
        ({"non_linearity": "leakyrelu"}, "'non_linearity' = 'leakyrelu'"),
        ({"is_parallel": True}, "'mh_adapter'"),
        ({"something_new": 1}, "'something_new' = '1'"),
    ],
)
def test_settings_that_are_refused(saved, changes, words):
    base, folder, _want = saved("bert", Pfeiffer(4))
    path = folder / "adapter_config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"config": about["config"] | changes}))
    with pytest.raises(BadFile) as refused:
        load_adapter(load(base), folder)
    assert words in str(refused.value)


def test_tensors_and_methods_that_are_refused(saved, tmp_path):
    base, folder, _want = saved("bert", Pfeiffer(4))
    path = folder / "adapter.safetensors"
    whole = {name: tensor.clone() for name, tensor in SafetensorsFile(path).items()}
    write_safetensors(path, dict(list(whole.items())[1:]))
    with pytest.raises(BadFile, match="is missing"):
        load_adapter(load(base), folder)
    write_safetensors(path, whole | {"x": torch.zeros(1)})
    with pytest.raises(BadFile, match="the tensor 'x' is not known"):
        load_adapter(load(base), folder)
    with pytest.raises(BadSetting, match="has no layout for"):
        save_adapter(tune(load(base), LoRA(2)), tmp_path / "b", layout="adapters")
    with pytest.raises(BadSetting, match="is known for bert, roberta, llama, mistral"):
        save_adapter(tune(load(make(tmp_path / "gpt2", "gpt2")), Pfeiffer(4)), tmp_path / "b", layout="adapters")


LIBRARY = """
import sys; sys.path.insert(0, sys.argv[1])
import adapters, torch, transformers
from safetensors.torch import load_file, save_file
base, ours, theirs, kind, config = sys.argv[2:]
auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
model = auto.from_pretrained(base).eval()
adapters.init(model)
ids = load_file(ours + ".ids")["ids"]
model.set_active_adapters(model.load_adapter(ours, use_safetensors=True))
outputs = {"ours": model(ids)[0].detach()}
model.add_adapter("x", config=adapters.AdapterConfig.load(config, reduction_factor=4))
draw = torch.Generator().manual_seed(0)
for name, parameter in model.named_parameters():
    if ".adapters.x." in name:
        parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.3)
model.set_active_adapters("x")
outputs["theirs"] = model(ids)[0].detach()
model.save_adapter(theirs, "x", use_safetensors=True)
save_file(outputs, ours + ".outputs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("config", METHODS)
@torch.no_grad()
def test_the_library_gives_the_same_outputs(saved, tmp_path, family, config):
    """HEADWATER_ADAPTERS names a folder with the adapters library and the transformers it needs."""
    if not (library := os.environ.get("HEADWATER_ADAPTERS")):
        pytest.skip("HEADWATER_ADAPTERS names no folder of the adapters library")
    head = {"head": "hidden_states", "architectures": ["BertModel"]} if family == "bert" else {}
    base, folder, want = saved(family, METHODS[config], **head)
    write_safetensors(f"{folder}.ids", {"ids": IDS})
    words = [library, base, folder, tmp_path / "theirs", family, config]
    subprocess.run([sys.executable, "-c", LIBRARY, *map(str, words)], check=True, capture_output=True)
    outputs = SafetensorsFile(f"{folder}.outputs")
    assert (outputs["ours"] - want).abs().max() < 1e-5
    theirs = load_adapter(load(base), tmp_path / "theirs").model(IDS)
    assert (outputs["theirs"] - theirs).abs().max() < 1e-5
