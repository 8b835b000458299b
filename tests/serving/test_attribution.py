"""Attribution is complete, head ablation equals zeroed weights, and a checkpoint is a model by name."""

from __future__ import annotations

import math

import pytest
import torch

from headwater.inspection.ablation import ablate
from headwater.serving.model_store import build_tiny_model

ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT = "the cat sat on the mat"


def request_body(architecture):
    return {
        "model": ARCHITECTURES[architecture],
        "text": TEXT,
        **({"source": "the dog sat"} if architecture == "encoder-decoder" else {}),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_each_token_adds_adds_up(ask, architecture):
    result = ask("attribution", **request_body(architecture), position=2)
    assert len(result["attributions"]) == len(result["tokens"]) and len(result["source_attributions"]) == len(
        result["source"]
    )
    assert bool(result["source"]) == (architecture == "encoder-decoder")
    if result["method"] == "integrated_gradients":
        full = result["logprob"] - result["baseline_logprob"]
        assert sum(result["attributions"]) + sum(result["source_attributions"]) == pytest.approx(
            full, abs=0.06 * abs(full) + 1e-4
        )


def test_the_explained_output_is_the_model_output(ask):
    result = ask("attribution", **request_body("decoder"), position=3)
    loaded = build_tiny_model(ARCHITECTURES["decoder"])
    ids = loaded.tokenizer.encode(TEXT)
    with torch.no_grad():
        log_p = loaded.model(torch.tensor([ids]))[0, 3].log_softmax(-1)
        max_value = float(loaded.model(torch.tensor([ids]))[0, -1].log_softmax(-1).max())
    assert result["logprob"] == pytest.approx(float(log_p[ids[4]]), abs=1e-5)
    last = ask("attribution", **request_body("decoder"))
    assert last["position"] == len(ids) - 1 and last["logprob"] == pytest.approx(max_value, abs=1e-5)


def test_a_gap_is_explained_without_its_answer(ask):
    result = ask("attribution", **request_body("encoder"), position=1)
    assert result["tokens"][1]["text"] == "▢"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_head_that_is_off_is_off(ask, architecture):
    kind = "encoder.self_attn" if architecture == "encoder" else "decoder.self_attn"
    one = ask("ablate_head", **request_body(architecture), kind=kind, layer=1, head=2)
    row = ask("ablate_layer", **request_body(architecture), kind=kind, layer=1)["loss_change"]
    assert one["ablated_loss"] - one["loss"] == pytest.approx(row[2], abs=1e-5)
    loaded = build_tiny_model(ARCHITECTURES[architecture])
    out = loaded.model.get_submodule(f"{kind.partition('.')[0]}.layers.1.self_attn").out
    with torch.no_grad():
        out.weight[:, 2 * 8 : 3 * 8] = 0  # the columns that head 2 is read through
    texts = ("the dog sat", TEXT) if architecture == "encoder-decoder" else (TEXT, None)
    same = ablate(loaded, texts[0], 0, 0, texts[1], kind=kind)
    assert one["ablated_loss"] == pytest.approx(same.loss, abs=1e-5)
    assert not math.isclose(one["loss"], one["ablated_loss"], abs_tol=1e-6), "the ablation changes the loss"


def test_a_checkpoint_is_a_model_by_name(ask, client):
    first, last = (ask("model_info", model=f"dates@{step}") for step in (20, 40))
    assert first["kind"] == last["kind"] == "checkpoint" and first["parameters"] == last["parameters"]
    answers = [ask("next_token", model=f"dates@{step}", source="the cat", text="the") for step in (20, 40)]
    assert answers[0]["candidates"] != answers[1]["candidates"], "another checkpoint gives other probabilities"
    for wrong in ("dates@21", "tiny decoder@20", "dates@", "@20", "dates@-1", "dates@²0"):
        answer = client.post("/api/model_info", json={"model": wrong})
        assert answer.status_code == 404, wrong
    assert "no checkpoint of step 21" in client.post("/api/model_info", json={"model": "dates@21"}).text


WRONG = [
    ("model_info", {"model": "nobody"}),
    ("run", {"run": "tiny decoder"}),
    ("next_token", {"model": "tiny encoder", "text": "a"}),
    ("fill_mask", {"model": "tiny decoder", "text": "a", "position": 0}),
    ("attention", {"model": "tiny decoder", "text": "a " * 5000}),
    ("attention", {"model": "tiny encoder-decoder", "ids": [1]}),
    ("attribution", {"model": "tiny decoder", "text": "cat " * 400}),
    ("walkthrough", {"model": "tiny decoder", "text": "a", "layer": 9}),
    ("attention_tile", {"trace_id": "x", "kind": "y", "layer": 0, "head": 0, "level": 0, "row": 0, "column": 0}),
    ("model_info", {"model": 3}),
]


@pytest.mark.parametrize(("name", "body"), WRONG)
def test_what_is_refused_is_refused_in_both_languages(client, name, body):
    error = client.post(f"/api/{name}", json=body).json()["error"]
    assert error["message"] and not has_chinese(error["message"])
    assert has_chinese(error["message_zh"])


def has_chinese(text):
    return any("\u4e00" <= c <= "\u9fff" for c in text)
