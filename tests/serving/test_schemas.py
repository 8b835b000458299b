"""Request validation: any other request gets a typed, short error without paths, never a 500."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadInput, Fault
from headwater.serving import schemas
from headwater.serving.app import ROUTES
from headwater.serving.errors import error_body
from headwater.serving.schemas import parse_request


def send(client, name, raw):
    return client.post(f"/api/{name}", content=raw, headers={"content-type": "application/json"})


BAD = {
    "not JSON": b"{",
    "not an object": b"[]",
    "NaN": b'{"model": "tiny decoder", "text": "a", "temperature": NaN}',
    "infinity": b'{"model": "tiny decoder", "text": "a", "temperature": 1e400}',
    "a key twice": b'{"model": "tiny decoder", "model": "tiny encoder", "text": "a"}',
    "deep": b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "unknown field": b'{"model": "tiny decoder", "text": "a", "path": "x"}',
    "wrong type": b'{"model": "tiny decoder", "text": 5}',
    "huge number": b'{"model": "tiny decoder", "text": "a", "seed": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"model": "tiny decoder", "text": "\\ud800"}',
    "not UTF-8": b'{"model": "tiny decoder", "text": "\xff"}',
    "negative": b'{"model": "tiny decoder", "text": "a", "top_k": -1}',
    "ids beyond": b'{"model": "tiny decoder", "ids": [99999999]}',
    "no model": b'{"text": "a"}',
    "two stacks without a source": b'{"model": "tiny encoder-decoder", "ids": [1]}',
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("route", ["next_token", "attention"])
def test_invalid_requests_are_reported(client, route, name):
    answer = send(client, route, BAD[name])
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["type"] and 0 < len(error["message"]) <= 400
    assert "Traceback" not in answer.text and "site-packages" not in answer.text


@pytest.mark.parametrize(
    "name",
    [
        "tiny decoder "[:-1] + "s",
        "../runs/dates",
        "/etc/passwd",
        "dates/../dates",
        "C:\\x",
        "a" * 120,
        "<img src=x onerror=alert(1)>",
        "\u202egnp.exe",
        "%2e%2e",
    ],
)
@pytest.mark.parametrize("route", ["model_info", "model_structure", "check", "attention", "chat"])
def test_models_come_from_the_shelf_alone(client, route, name):
    answer = client.post(f"/api/{route}", json={"model": name})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "NotFound"


@pytest.mark.parametrize("name", ["tiny decoder", "nothing", "../dates"])
def test_runs_come_from_the_shelf_alone(client, name):
    assert client.post("/api/run", json={"run": name}).status_code == 404


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_cut_off(client, declared):
    raw = b'{"model": "' + b"a" * (schemas.MAX_BODY_BYTES + 1) + b'"}'
    content = raw if declared else iter([raw[: 1 << 19], raw[1 << 19 :]])
    answer = client.post("/api/model_info", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_too_many_tokens_are_refused(client):
    answer = client.post("/api/attention", json={"model": "tiny decoder", "ids": [5] * (schemas.MAX_INPUT_TOKENS + 1)})
    assert answer.status_code == 422


def test_an_evicted_trace_is_reported_as_expired(client):
    body = {"trace_id": "0" * 20, "kind": "decoder.self_attn", "layer": 0, "head": 0, "level": 0, "row": 0, "column": 0}
    answer = client.post("/api/attention_tile", json=body)
    assert answer.status_code == 410 and answer.json()["error"]["type"] == "Expired"


def test_an_error_of_ours_has_a_number_and_no_words(client, monkeypatch, caplog):
    monkeypatch.setattr("headwater.serving.handlers.model.model_info", lambda opened: 1 / 0)
    answer = client.post("/api/model_info", json={"model": "tiny decoder"})
    assert answer.status_code == 500 and "division" not in answer.text and "terminal" in answer.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("path", ["/srv/models/x/config.json", "C:\\models\\x\\config.json", "/srv/a/b/c/config.json"])
def test_folders_are_cut_from_messages(path):
    message = error_body(Fault(f"{path}: not valid JSON; fix it"))["error"]["message"]
    assert message == "config.json: not valid JSON; fix it"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(ROUTES)),
    st.dictionaries(st.sampled_from(["model", "text", "ids", "layer", "head", "trace_id", "kind", "run", "x"]), values),
)
def test_any_object_is_parsed_or_refused(name, body):
    try:
        parse_request(ROUTES[name], json.dumps(body).encode())
    except BadInput as fault:
        assert "\n" not in str(fault)


@settings(max_examples=60)
@given(st.binary())
def test_any_bytes_are_parsed_or_refused(raw):
    with contextlib.suppress(BadInput):
        parse_request(schemas.ApiRequest, raw)
