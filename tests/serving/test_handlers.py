"""The responses of the server equal the results of Python: weights, probabilities, sampled tokens, counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headwater.generation.api import generate
from headwater.inspection.attention import attention_maps
from headwater.serving.handlers.attention import MAX_CACHED_BYTES, AttentionTrace, to_uint8
from headwater.serving.model_store import ModelStore, StoredModel, build_tiny_model

ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT, SOURCE = "the cat sat on the mat", "the dog 小河"


def request_body(architecture):
    return {
        "model": ARCHITECTURES[architecture],
        "text": TEXT,
        **({"source": SOURCE} if architecture == "encoder-decoder" else {}),
    }


@pytest.fixture(scope="module")
def python():
    """The same models, loaded without a server."""
    return {architecture: build_tiny_model(name) for architecture, name in ARCHITECTURES.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_of_inspection(ask, python, architecture):
    sent = ask("attention", **request_body(architecture))
    result = attention_maps(
        python[architecture],
        SOURCE if architecture == "encoder-decoder" else TEXT,
        TEXT if architecture == "encoder-decoder" else None,
    )
    assert list(sent["kinds"]) == list(result.kinds)
    for kind, facts in sent["kinds"].items():
        rows, columns = facts["queries"], facts["keys"]
        for layer in range(facts["layers"]):
            for head in (0, facts["heads"] - 1, -1):
                where = {"trace_id": sent["trace_id"], "kind": kind, "layer": layer, "head": head}
                raw = ask("attention_block", **where, rows=[0, rows], columns=[0, columns])
                got = np.frombuffer(raw, "<f4").reshape(rows, columns)
                expected = result.get_map(kind, layer).head_weights(None if head == -1 else head)
                np.testing.assert_allclose(got, expected, atol=1e-6)
                raw = ask("attention_tile", **where, level=0, row=0, column=0, power=0.5)
                tile = np.frombuffer(raw, np.uint8).reshape(rows, columns)
                assert np.array_equal(tile, to_uint8(torch.tensor(got.copy()), float(got.max()), 0.5).numpy())
                assert np.array_equal(tile == 0, got == 0), "only exact zeros are drawn as zero"


def test_tiles_of_a_long_text_are_the_largest_of_their_squares(ask):
    ids = [5 + n % 300 for n in range(600)]
    sent = ask("attention", model=ARCHITECTURES["decoder"], ids=ids)
    where = {"trace_id": sent["trace_id"], "kind": "decoder.self_attn", "layer": 1, "head": 2}
    rows = [
        np.frombuffer(ask("attention_block", **where, rows=[r, r + 60], columns=[0, 600]), "<f4")
        for r in range(0, 600, 60)
    ]
    full = np.concatenate(rows).reshape(600, 600)
    tile = np.frombuffer(ask("attention_tile", **where, level=1, row=0, column=0, power=1.0), np.uint8).reshape(
        256, 256
    )
    pooled = full[:512, :512].reshape(256, 2, 256, 2).max((1, 3))
    assert np.array_equal(tile, to_uint8(torch.tensor(pooled), float(full.max()), 1.0).numpy())
    edge = np.frombuffer(ask("attention_tile", **where, level=1, row=1, column=1, power=1.0), np.uint8)
    assert edge.size == 44 * 44


def test_a_layer_that_was_let_go_comes_back_the_same(client, model_store, monkeypatch):
    from headwater.inspection.inputs import tokenize_input

    monkeypatch.setattr("headwater.serving.handlers.attention.MAX_CACHED_BYTES", 4 * 4 * 40 * 40)  # one layer
    trace = AttentionTrace("x", tokenize_input(build_tiny_model(ARCHITECTURES["decoder"]), list(range(5, 45))))
    assert len(trace.cached_weights) == 1 and MAX_CACHED_BYTES > 1 << 20
    again = [trace.layer_weights("decoder.self_attn", n).clone() for n in (0, 1, 2, 0)]
    assert torch.equal(again[0], again[3]) and not torch.equal(again[0], again[1]) and len(trace.cached_weights) == 1


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}])
def test_probabilities_and_choices_are_those_of_generate(ask, python, architecture, how):
    loaded = python[architecture]
    prompt = SOURCE if architecture == "encoder-decoder" else TEXT
    begin = (
        {"decoder_start_ids": [loaded.decoder_start_id, *loaded.tokenizer.encode(TEXT, add_special_tokens=False)]}
        if architecture == "encoder-decoder"
        else {}
    )
    answer = generate(loaded, prompt, max_tokens=4, trace=True, seed=3, **begin, **how)
    ids = list(begin.get("decoder_start_ids", answer.prompt_ids))
    more = {"source": SOURCE} if architecture == "encoder-decoder" else {}
    for step, token in enumerate(answer.ids):
        sent = ask("next_token", model=ARCHITECTURES[architecture], ids=ids, num_generated=step, seed=3, **more, **how)
        assert sent["token_id"] == token
        for row in sent["candidates"]:
            expected = [float(stage.probs[row["id"]]) for stage in answer.trace[step]]
            assert row["probs"] == pytest.approx(expected, abs=2e-6)
        ids.append(token)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_the_shares_of_the_text_are_those_of_the_model(ask, python, architecture):
    sent = ask("next_token", **request_body(architecture))
    ids = torch.tensor([[token["id"] for token in sent["tokens"]]])
    source = {"source": torch.tensor([[t["id"] for t in sent["source"]]])} if architecture == "encoder-decoder" else {}
    with torch.no_grad():
        probs = python[architecture].model(ids, **source)[0].softmax(-1)
    expected = [float(probs[n, token]) for n, token in enumerate(ids[0, 1:].tolist())]
    assert sent["token_probs"][0] is None and sent["token_probs"][1:] == pytest.approx(expected, abs=1e-6)


def test_a_gap_is_filled_as_the_model_fills_it(ask, python):
    sent = ask("fill_mask", model=ARCHITECTURES["encoder"], text=TEXT, position=2)
    loaded = python["encoder"]
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    ids[0, 2] = loaded.tokenizer.mask_id
    with torch.no_grad():
        probs = loaded.model(ids)[0, 2].softmax(-1)
    assert [row["probs"][0] for row in sent["candidates"]] == pytest.approx(
        [float(probs[row["id"]]) for row in sent["candidates"]]
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_lens_ends_where_the_model_does(ask, python, architecture):
    sent = ask("logit_lens", **request_body(architecture))
    assert len(sent["cells"]) == 4 and sent["layers"][0] == "embedding"
    if architecture != "encoder":
        last = ask("next_token", **request_body(architecture))["candidates"][0]
        assert sent["cells"][-1][-1][0]["prob"] == pytest.approx(last["probs"][0], abs=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_walk_uses_the_models_own_numbers(ask, architecture):
    body = {**request_body(architecture), "text": "the cat sat"}
    sent = ask("walkthrough", **body, layer=1, head=2)
    steps = {step["key"]: step for step in sent["steps"]}
    trace = ask("attention", **body)
    kind = "encoder.self_attn" if architecture == "encoder" else "decoder.self_attn"
    size = len(sent["tokens"])
    raw = ask(
        "attention_block", trace_id=trace["trace_id"], kind=kind, layer=1, head=2, rows=[0, size], columns=[0, size]
    )
    weights = np.array(steps["softmax"]["matrices"][0]["values"])
    np.testing.assert_allclose(weights, np.frombuffer(raw, "<f4").reshape(size, size), atol=1e-5)
    assert ("cross_qkv" in steps) is (architecture == "encoder-decoder")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_checker_finds_nothing_in_a_sound_model(ask, architecture):
    sent = ask("check", model=ARCHITECTURES[architecture])
    assert sent["ok"] and sent["dependencies"]["leaks"] == []
    change = np.array(sent["dependencies"]["change"])
    assert (np.triu(change, 1) > 0).any() == (architecture == "encoder")


def test_a_leak_is_seen_on_the_matrix():
    """The planted fault: a decoder with a bidirectional mask."""
    from headwater.core.masks import Bidirectional, Causal
    from headwater.inspection.inputs import InspectedModel
    from headwater.parts import swap
    from headwater.serving.handlers.check import dependency_matrix
    from headwater.serving.model_store import OpenModel

    loaded = build_tiny_model(ARCHITECTURES["decoder"])
    loaded.model = swap(loaded.model.spec, Causal, lambda past: Bidirectional()).build(seed=0).eval()
    result = dependency_matrix(OpenModel(StoredModel("x", "random"), (), InspectedModel.wrap(loaded), loaded))
    assert len(result["leaks"]) == 13 * 12 // 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_anatomy_is_the_count(ask, python, architecture):
    sent = ask("model_structure", model=ARCHITECTURES[architecture])
    assert sent["costs"]["parameters"] == sum(p.numel() for p in python[architecture].model.parameters())
    assert (
        list(sent["stacks"])
        == {"encoder-decoder": ["encoder", "decoder"], "encoder": ["encoder"], "decoder": ["decoder"]}[architecture]
    )
    assert ask("positions", model=ARCHITECTURES[architecture])["effects"]
    tokens = ask("tokenize", **request_body(architecture))
    assert "".join(t["text"] for t in tokens["tokens"] if t["text"] != "<bos>").strip() == TEXT
    assert bytes.fromhex(tokens["tokens"][-1]["bytes"]).decode().strip() == tokens["tokens"][-1]["text"].strip()


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_chat_equals_generate(client, python, architecture):
    key = "source" if architecture == "encoder-decoder" else "text"
    answer = client.post("/api/chat", json={"model": ARCHITECTURES[architecture], key: SOURCE, "max_tokens": 6})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    printed = generate(python[architecture], SOURCE, max_tokens=6)
    assert [line["token"] for line in lines[:-1]] == list(printed.ids) and "".join(
        x["text"] for x in lines[:-1]
    ) == printed.text
    assert lines[-1]["finish_reason"] == printed.finish_reason
    response = client.post(
        "/api/attention",
        json={
            "model": ARCHITECTURES[architecture],
            "ids": lines[-1]["ids"],
            **({"source_ids": lines[-1]["source_ids"]} if architecture == "encoder-decoder" else {}),
        },
    )
    assert response.status_code == 200


def test_a_run_is_read_from_its_files(ask, run_folder):
    sent = ask("run", run="dates")
    assert sent["state"] == "finished" and sent["step"] == 40 and sent["checkpoints"] == [20, 40]
    assert len(sent["metrics"]) == 43 and ask("run", run="dates", after_line=40)["metrics"][0]["line"] == 41
    assert [sample["output"] for sample in sent["samples"]] == ["output at 20", "output at 40"]
    assert ask("model_info", model="dates")["task"] == "seq2seq"


def test_a_checkpoint_is_the_model_as_it_was(ask):
    body = {
        "run": "dates",
        "source": "the cat sat",
        "text": "the dog",
        "kind": "decoder.cross_attn",
        "layer": 0,
        "head": 1,
    }
    early, late = (np.array(ask("checkpoint", checkpoint=step, **body)["weights"]) for step in (20, 40))
    assert early.shape == late.shape and not np.allclose(early, late)
    assert np.allclose(early.sum(1), 1, atol=1e-4)


def test_a_deleted_checkpoint_is_reported(client):
    answer = client.post("/api/checkpoint", json={"run": "dates", "checkpoint": 30, "source": "a"})
    assert answer.status_code == 404 and "no checkpoint of step 30" in answer.text


def test_a_model_that_is_deleted_meanwhile(tmp_path):
    import shutil

    from starlette.testclient import TestClient

    from headwater.serving.app import create_app
    from headwater.serving.security import AccessPolicy
    from headwater.weights.native import save_native

    tiny = build_tiny_model(ARCHITECTURES["encoder-decoder"])
    save_native(tmp_path / "m", tiny.model, {"task": "seq2seq"})
    tiny.tokenizer.save(tmp_path / "m")
    client = TestClient(
        create_app(ModelStore([StoredModel("m", "model", tmp_path / "m")]), AccessPolicy("127.0.0.1", 8017)),
        base_url="http://127.0.0.1:8017",
    )
    assert client.post("/api/model_info", json={"model": "m"}).status_code == 200
    shutil.rmtree(tmp_path / "m")
    answer = client.post("/api/model_info", json={"model": "m"})
    assert answer.status_code == 404 and "were deleted while the server was running" in answer.text
    assert str(tmp_path) not in answer.text


@pytest.mark.parametrize("each_token", [False, True])
def test_labels_are_those_of_the_head(each_token):
    from headwater.core.heads import ClassificationHead, TokenClassificationHead
    from headwater.families.builders import encoder
    from headwater.inspection.inputs import InspectedModel
    from headwater.serving.handlers.chat import stream_chat
    from headwater.serving.model_store import OpenModel
    from headwater.serving.schemas import ChatRequest

    loaded = build_tiny_model(ARCHITECTURES["encoder"])
    head = TokenClassificationHead(3) if each_token else ClassificationHead(3)
    loaded.model = encoder(len(loaded.tokenizer), head=head, d_model=32, heads=4, layers=1).build(seed=0).eval()
    loaded.labels = ["one", "two", "<b>three"]
    (printed,) = stream_chat(
        OpenModel(StoredModel("x", "random"), (), InspectedModel.wrap(loaded), loaded),
        ChatRequest(model="x", text=TEXT),
    )
    with torch.no_grad():
        probs = loaded.model(torch.tensor([printed["ids"]]))[0].softmax(-1)
    if each_token:
        assert [name for name, _ in printed["tags"]] == [loaded.labels[n] for n in probs.argmax(-1).tolist()]
    else:
        assert dict(printed["labels"]) == pytest.approx(dict(zip(loaded.labels, probs.tolist(), strict=True)), abs=1e-6)


def test_laws_can_be_checked_one_by_one(ask, client):
    laws = ask("model_info", model=ARCHITECTURES["decoder"])["laws"]
    parts = [ask("check", model=ARCHITECTURES["decoder"], laws=[law]) for law in laws]
    full = ask("check", model=ARCHITECTURES["decoder"])
    assert [(v["law"], v["status"]) for part in parts for v in part["verdicts"]] == [
        (v["law"], v["status"]) for v in full["verdicts"]
    ]
    assert [part["dependencies"] is not None for part in parts].count(True) == 1
    unknown = client.post("/api/check", json={"model": ARCHITECTURES["decoder"], "laws": ["futur"]})
    assert unknown.status_code == 422 and "did you mean 'future'" in unknown.text
