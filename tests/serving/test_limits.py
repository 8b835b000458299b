"""A text that is too long is rejected before any forward pass; runs are served while a model is busy."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_server import call, posting, running

from headwater.core.stack import TransformerStack
from headwater.generation import api as generation
from headwater.serving.app import AppState
from headwater.serving.model_store import build_tiny_model

BOTH, LONG = "tiny encoder-decoder", "the cat " * 7000
ASKED = {
    "attention": {},
    "tokenize": {},
    "walkthrough": {},
    "attribution": {},
    "next_token": {},
    "logit_lens": {},
    "ablate_head": {"kind": "decoder.cross_attn", "layer": 0, "head": 0},
    "ablate_layer": {"kind": "decoder.cross_attn", "layer": 0},
    "chat": {},
}


SIDES = [(name, side) for name in ASKED for side in ("source", "text") if (name, side) != ("chat", "text")]


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_a_text_is_counted_before_the_model_works(client, monkeypatch, name, side):
    """No forward pass and no generation for a text that is rejected."""
    calls = []
    passed = TransformerStack.forward
    monkeypatch.setattr(TransformerStack, "forward", lambda *a, **k: (calls.append(1), passed(*a, **k))[1])
    monkeypatch.setattr(generation, "generate", lambda *a, **k: calls.append(2))
    other = {"source": "the cat"} if side == "text" else {}
    body = {"model": "dates", side: LONG, **other, **ASKED[name]}  # a model trained here has no longest text of its own
    answer = client.post(f"/api/{name}", json=body)
    assert answer.status_code == 422 and "tokens are allowed here, got" in answer.text
    assert "shorten the text" in answer.text and "请缩短文字" in answer.json()["error"]["message_zh"]
    assert calls == []


def test_a_text_that_fits_is_read(client, monkeypatch):
    calls = []
    passed = TransformerStack.forward
    monkeypatch.setattr(TransformerStack, "forward", lambda *a, **k: (calls.append(1), passed(*a, **k))[1])
    assert (
        client.post("/api/attribution", json={"model": "dates", "source": "the dog", "text": "a cat"}).status_code
        == 200
    )
    assert calls, "the planted work is seen where it is done"


@pytest.mark.parametrize(("name", "body"), [("models", {}), ("run", {"run": "dates"})])
def test_runs_are_served_while_a_model_is_busy(model_store, monkeypatch, name, body):
    """A model call that does not end blocks neither the list of runs nor the metrics of a run."""
    started, done = threading.Event(), threading.Event()

    def busy(self, ask):
        started.set()
        done.wait(20)
        return {}

    monkeypatch.setattr(AppState, "model_info", busy)
    with running(model_store=model_store) as port, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(post, port, "model_info", {"model": "dates"})
        try:
            assert started.wait(10)
            start = time.monotonic()
            assert b" 200 " in post(port, name, body) and time.monotonic() - start < 1
            assert not slow.done(), "the model is still busy"
        finally:
            done.set()
        assert b" 200 " in slow.result()


def post(port, name, body):
    raw = json.dumps(body).encode()
    return call(port, posting(port, name, len(raw), more="connection: close\r\n") + raw, 20)


# ------------------------------------------------------------------------------------------------ what the page counts


def test_temperature_keeps_every_token(ask):
    """At a low temperature many probabilities underflow, but all tokens are still allowed."""
    vocab = len(build_tiny_model("tiny decoder").tokenizer)
    sent = ask("next_token", model="tiny decoder", text="the cat", temperature=0.01, top_k=7)
    assert [processor["name"] for processor in sent["processors"]] == ["model", "Temperature", "TopK"]
    assert [processor["value"] for processor in sent["processors"]] == [None, 0.01, 7]
    assert sent["num_allowed"] == [vocab, vocab, 7]


def test_tokens_read_and_generated_are_counted_apart(client):
    for model, key in ((BOTH, "source"), ("tiny decoder", "text")):
        answer = client.post("/api/chat", json={"model": model, key: "the cat sat", "max_tokens": 5})
        *printed, last = [json.loads(line) for line in answer.text.splitlines()]
        assert last["completion_tokens"] == len(printed) <= 5
        assert last["prompt_tokens"] == len(build_tiny_model(model).tokenizer.encode("the cat sat"))


# ---------------------------------------------------------------------------------------- which word is explained first


def test_the_least_certain_word_is_explained_first(ask):
    """Of a target: no special token such as <eos>, and of the words the one with the lowest probability."""
    sent = ask("attribution", model=BOTH, source="the dog sat", text="the cat sat on the mat .")
    loaded = build_tiny_model(BOTH)
    ids = torch.tensor([[token["id"] for token in sent["tokens"]]])
    source = torch.tensor([[token["id"] for token in sent["source"]]])
    with torch.no_grad():
        probs = loaded.model(ids, source=source)[0].softmax(-1)
    next_ids = [token["id"] for token in sent["next_tokens"]]
    assert next_ids[-1] == loaded.eos_ids[0], "the last one is <eos>"
    words = [n for n, token in enumerate(sent["next_tokens"][:-1]) if any(map(str.isalnum, token["text"]))]
    assert len(words) < len(next_ids) - 1, "there is punctuation to pass over"
    assert sent["position"] == min(words, key=lambda n: float(probs[n, next_ids[n]]))


def test_a_gap_is_a_word_and_the_next_token_is_next(ask):
    sent = ask("attribution", model="tiny encoder", text=", the cat")
    assert sent["tokens"][sent["position"]]["text"] == "▢" and sent["output"].strip() == "the"
    sent = ask("attribution", model="tiny decoder", text="the cat")
    assert sent["position"] == len(sent["tokens"]) - 1
