"""Runs that learn an adapter on the page: the run, its checkpoints and its base are models in every view."""

from __future__ import annotations

import shutil

import pytest
import torch
from starlette.testclient import TestClient

import headwater
from headwater.errors import NotFound
from headwater.serving.app import create_app
from headwater.serving.handlers.runs import summarize_run
from headwater.serving.model_store import ModelStore, StoredModel, checkpoint_steps
from headwater.serving.security import AccessPolicy
from headwater.tasks.ppo import with_value_head
from headwater.tasks.rollouts import language_tensors
from headwater.training.checkpoint import MODEL_FILE
from headwater.weights.safetensors import SafetensorsFile

TEXT = "".join(f"the {a} {b} sees a {c}.\n" for a in ("old", "red", "big") for b in ("cat", "dog") for c in "abcdefg")
SETTINGS = {"batch_tokens": 200, "max_steps": 4, "eval_every": 2, "eval_examples": 4, "log_every": 1, "quiet": True,
            "context_length": 16, "checkpoint_steps": 2, "lr": 1e-2}  # fmt: skip
IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A base, and a run of each of three methods on it: merged, beside it, and with virtual tokens."""
    root = tmp_path_factory.mktemp("runs")
    (root / "text.txt").write_text(TEXT * 6)
    base = root / "base"
    headwater.train(root / "text.txt", out=base, size="xs", task="language-model", tokenizer="char", **SETTINGS)
    for method in ("lora", "pfeiffer", "prefix"):
        headwater.train(root / "text.txt", out=root / method, init_from=base, tune=method, **SETTINGS)
    return root


@pytest.fixture
def store(runs):
    return ModelStore([StoredModel(name, "run", runs / name) for name in ("base", "lora", "pfeiffer", "prefix")])


@torch.no_grad()
def logits(store, name):
    return store.open(name).inspected.model(IDS)


@pytest.mark.parametrize("method", ["lora", "pfeiffer", "prefix"])
def test_a_run_its_checkpoints_and_its_base(store, runs, method):
    base = logits(store, "base")
    assert torch.equal(logits(store, f"{method}@base"), base)
    tuned = logits(store, method)
    assert not torch.allclose(tuned, base, atol=1e-3)
    steps = checkpoint_steps(runs / method)
    at_step = {step: logits(store, f"{method}@{step}") for step in steps}
    assert steps[-1] == 4 and len(steps) > 1
    assert not torch.allclose(at_step[steps[0]], at_step[4], atol=1e-5)
    assert not torch.allclose(at_step[steps[0]], base, atol=1e-5)
    best = headwater.load(runs / method).model
    with torch.no_grad():
        assert any(torch.allclose(each, best(IDS), atol=1e-5) for each in at_step.values())
    assert summarize_run(method, runs / method)["has_base"] and not summarize_run("base", runs / "base")["has_base"]


def test_what_is_not_there(store, runs, tmp_path):
    with pytest.raises(NotFound, match="base has no base: it is not the run of an adapter"):
        store.open("base@base")
    with pytest.raises(NotFound, match="this server has no model 'lora@basis'"):
        store.open("lora@basis")
    shutil.copytree(runs / "lora", tmp_path / "lora")
    moved = ModelStore([StoredModel("lora", "run", tmp_path / "lora")])
    config = tmp_path / "lora" / "model" / "config.json"
    config.write_text(config.read_text().replace(str(runs / "base"), str(runs / "bass")).replace("../base", "../bass"))
    with pytest.raises(NotFound, match=r"its base .* is missing"):
        moved.open("lora@base")


def test_a_checkpoint_of_ppo_is_shown_without_its_value_head(store):
    model = store.open("base").inspected.model
    want = {name: tensor.clone() for name, tensor in model.named_parameters()}
    tensors = dict(with_value_head(model).named_parameters())
    assert any("value" in name for name in tensors)
    found = language_tensors(tensors)
    assert sorted(found) == sorted(want) and all(torch.equal(found[name], want[name]) for name in want)


VIEWS = {
    "model_info": {}, "attention": {"text": "the old cat"}, "next_token": {"text": "the old cat"},
    "logit_lens": {"text": "the old cat"}, "attribution": {"text": "the old cat"}, "walkthrough": {"text": "the old"},
    "model_structure": {}, "check": {},
}  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "pfeiffer", "prefix"])
def test_every_view_takes_a_tuned_run(store, method):
    app = create_app(store, AccessPolicy("127.0.0.1", 8017))
    client = TestClient(app, base_url="http://127.0.0.1:8017", raise_server_exceptions=False)
    for model in (method, f"{method}@4", f"{method}@base"):
        for view, body in VIEWS.items():
            answer = client.post(f"/api/{view}", json={"model": model, **body})
            assert answer.status_code == 200, (view, model, answer.text)


def test_the_checkpoint_file_has_the_adapter_alone(runs):
    names = set(SafetensorsFile(runs / "lora" / "checkpoints" / "step-00000004" / MODEL_FILE))
    assert names and all(".changes." in name for name in names)


def test_virtual_tokens_stand_before_the_keys_of_the_walkthrough(store):
    client = TestClient(create_app(store, AccessPolicy("127.0.0.1", 8017)), base_url="http://127.0.0.1:8017")
    answer = client.post("/api/walkthrough", json={"model": "prefix", "text": "the old"}).json()
    steps = {step["type"]: step["formulas"] for step in answer["steps"]}
    shapes = {each["name"]: each["shape"] for step in answer["steps"] for each in step["matrices"]}
    ((keys, values), (z,)) = (steps[name] for name in ("virtual_tokens", "weighted_values"))
    of_keys, of_values = keys.split(" = ")[0], values.split(" = ")[0]
    virtual, tokens = shapes[f"P_{of_keys.removesuffix('_p')}"][0], shapes["z"][0]
    assert virtual == 16 and z == f"z = A {of_values}"
    assert shapes[of_keys][0] == shapes[of_values][0] == virtual + tokens
    assert shapes["A"] == [tokens, virtual + tokens]
