"""Why this word: the page's shares add up, a head that is off is off, and the past has a name of its own."""

from __future__ import annotations

import math

import pytest
import torch

from headwater.inspection.ablation import ablate
from headwater.serving.tiny import made

SHAPES = {"both": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT = "the cat sat on the mat"


def asked(shape):
    return {"model": SHAPES[shape], "text": TEXT, **({"source": "the dog sat"} if shape == "both" else {})}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_each_token_adds_adds_up(ask, shape):
    found = ask("why", **asked(shape), place=2)
    assert len(found["scores"]) == len(found["tokens"]) and len(found["source_scores"]) == len(found["source"])
    assert bool(found["source"]) == (shape == "both")
    if found["by"] == "integrated":
        whole = found["log_p"] - found["nothing"]
        assert sum(found["scores"]) + sum(found["source_scores"]) == pytest.approx(whole, abs=0.06 * abs(whole) + 1e-4)


def test_what_is_explained_is_what_the_model_says(ask):
    found = ask("why", **asked("decoder"), place=3)
    loaded = made(SHAPES["decoder"])
    ids = loaded.tokenizer.encode(TEXT)
    with torch.no_grad():
        log_p = loaded.model(torch.tensor([ids]))[0, 3].log_softmax(-1)
        most = float(loaded.model(torch.tensor([ids]))[0, -1].log_softmax(-1).max())
    assert found["log_p"] == pytest.approx(float(log_p[ids[4]]), abs=1e-5)
    last = ask("why", **asked("decoder"))
    assert last["place"] == len(ids) - 1 and last["log_p"] == pytest.approx(most, abs=1e-5)


def test_a_gap_is_explained_without_its_answer(ask):
    found = ask("why", **asked("encoder"), place=1)
    assert found["tokens"][1]["text"] == "▢"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_that_is_off_is_off(ask, shape):
    kind = "encoder.self_attn" if shape == "encoder" else "decoder.self_attn"
    one = ask("without", **asked(shape), kind=kind, layer=1, head=2)
    row = ask("each_off", **asked(shape), kind=kind, layer=1)["change"]
    assert one["loss_without"] - one["loss"] == pytest.approx(row[2], abs=1e-5)
    loaded = made(SHAPES[shape])
    out = loaded.model.get_submodule(f"{kind.partition('.')[0]}.layers.1.self_attn").out
    with torch.no_grad():
        out.weight[:, 2 * 8 : 3 * 8] = 0  # the columns that head 2 is read through
    texts = ("the dog sat", TEXT) if shape == "both" else (TEXT, None)
    same = ablate(loaded, texts[0], 0, 0, texts[1], kind=kind)
    assert one["loss_without"] == pytest.approx(same.loss, abs=1e-5)
    assert not math.isclose(one["loss"], one["loss_without"], abs_tol=1e-6), "another head would be seen"


def test_a_checkpoint_is_a_model_by_name(ask, client):
    first, last = (ask("about", model=f"dates@{step}") for step in (20, 40))
    assert first["kind"] == last["kind"] == "checkpoint" and first["parameters"] == last["parameters"]
    told = [ask("next", model=f"dates@{step}", source="the cat", text="the") for step in (20, 40)]
    assert told[0]["rows"] != told[1]["rows"], "weights of another step say other things"
    for wrong in ("dates@21", "tiny decoder@20", "dates@", "@20", "dates@-1", "dates@²0"):
        answer = client.post("/api/about", json={"model": wrong})
        assert answer.status_code == 404, wrong
    assert "no checkpoint of step 21" in client.post("/api/about", json={"model": "dates@21"}).text


WRONG = [
    ("about", {"model": "nobody"}),
    ("run", {"run": "tiny decoder"}),
    ("next", {"model": "tiny encoder", "text": "a"}),
    ("hidden", {"model": "tiny decoder", "text": "a", "place": 0}),
    ("attention", {"model": "tiny decoder", "text": "a " * 5000}),
    ("attention", {"model": "tiny encoder-decoder", "ids": [1]}),
    ("why", {"model": "tiny decoder", "text": "cat " * 400}),
    ("walk", {"model": "tiny decoder", "text": "a", "layer": 9}),
    ("tile", {"trace": "x", "kind": "y", "layer": 0, "head": 0, "level": 0, "row": 0, "column": 0}),
    ("about", {"model": 3}),
]


@pytest.mark.parametrize(("name", "body"), WRONG)
def test_what_is_refused_is_refused_in_both_languages(client, name, body):
    error = client.post(f"/api/{name}", json=body).json()["error"]
    assert error["message"] and not has_chinese(error["message"])
    assert has_chinese(error["message_zh"])


def has_chinese(text):
    return any("\u4e00" <= c <= "\u9fff" for c in text)
