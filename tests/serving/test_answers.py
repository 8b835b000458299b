"""What the page is sent equals what Python says: weights, probabilities, choices, counts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headwater.generation.ask import generate
from headwater.inspection.maps import attention
from headwater.serving.shelf import Item, Shelf
from headwater.serving.tiny import made
from headwater.serving.tracing import KEPT, Trace, as_bytes

SHAPES = {"both": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT, SOURCE = "the cat sat on the mat", "the dog 小河"


def asked(shape):
    return {"model": SHAPES[shape], "text": TEXT, **({"source": SOURCE} if shape == "both" else {})}


@pytest.fixture(scope="module")
def python():
    """The same models, loaded without a server."""
    return {shape: made(name) for shape, name in SHAPES.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_inspection(ask, python, shape):
    sent = ask("attention", **asked(shape))
    found = attention(python[shape], SOURCE if shape == "both" else TEXT, TEXT if shape == "both" else None)
    assert list(sent["kinds"]) == list(found.kinds)
    for kind, facts in sent["kinds"].items():
        rows, columns = facts["queries"], facts["keys"]
        for layer in range(facts["layers"]):
            for head in (0, facts["heads"] - 1, -1):
                where = {"trace": sent["trace"], "kind": kind, "layer": layer, "head": head}
                raw = ask("block", **where, rows=[0, rows], columns=[0, columns])
                got = np.frombuffer(raw, "<f4").reshape(rows, columns)
                want = found.map(kind, layer).of(None if head == -1 else head)
                np.testing.assert_allclose(got, want, atol=1e-6)
                raw = ask("tile", **where, level=0, row=0, column=0, power=0.5)
                tile = np.frombuffer(raw, np.uint8).reshape(rows, columns)
                assert np.array_equal(tile, as_bytes(torch.tensor(got.copy()), float(got.max()), 0.5).numpy())
                assert np.array_equal(tile == 0, got == 0), "only what is nothing is drawn as nothing"


def test_tiles_of_a_long_text_are_the_largest_of_their_squares(ask):
    ids = [5 + n % 300 for n in range(600)]
    sent = ask("attention", model=SHAPES["decoder"], ids=ids)
    where = {"trace": sent["trace"], "kind": "decoder.self_attn", "layer": 1, "head": 2}
    rows = [np.frombuffer(ask("block", **where, rows=[r, r + 60], columns=[0, 600]), "<f4") for r in range(0, 600, 60)]
    whole = np.concatenate(rows).reshape(600, 600)
    tile = np.frombuffer(ask("tile", **where, level=1, row=0, column=0, power=1.0), np.uint8).reshape(256, 256)
    pooled = whole[:512, :512].reshape(256, 2, 256, 2).max((1, 3))
    assert np.array_equal(tile, as_bytes(torch.tensor(pooled), float(whole.max()), 1.0).numpy())
    edge = np.frombuffer(ask("tile", **where, level=1, row=1, column=1, power=1.0), np.uint8)
    assert edge.size == 44 * 44


def test_a_layer_that_was_let_go_comes_back_the_same(client, shelf, monkeypatch):
    from headwater.inspection.subjects import read

    monkeypatch.setattr("headwater.serving.tracing.KEPT", 4 * 4 * 40 * 40)  # one layer
    trace = Trace("x", read(made(SHAPES["decoder"]), list(range(5, 45))))
    assert len(trace.held) == 1 and KEPT > 1 << 20
    again = [trace.layer("decoder.self_attn", n).clone() for n in (0, 1, 2, 0)]
    assert torch.equal(again[0], again[3]) and not torch.equal(again[0], again[1]) and len(trace.held) == 1


@pytest.mark.parametrize("shape", ["both", "decoder"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}])
def test_probabilities_and_choices_are_those_of_generate(ask, python, shape, how):
    loaded = python[shape]
    prompt = SOURCE if shape == "both" else TEXT
    begin = {"begin": [loaded.start, *loaded.tokenizer.encode(TEXT, special=False)]} if shape == "both" else {}
    answer = generate(loaded, prompt, max_tokens=4, trace=True, seed=3, **begin, **how)
    ids = list(begin.get("begin", answer.prompt))
    more = {"source": SOURCE} if shape == "both" else {}
    for step, token in enumerate(answer.ids):
        sent = ask("next", model=SHAPES[shape], ids=ids, new=step, seed=3, **more, **how)
        assert sent["token"] == token
        for row in sent["rows"]:
            want = [float(stage.shares[row["id"]]) for stage in answer.trace[step]]
            assert row["shares"] == pytest.approx(want, abs=2e-6)
        ids.append(token)


@pytest.mark.parametrize("shape", ["both", "decoder"])
def test_the_shares_of_the_text_are_those_of_the_model(ask, python, shape):
    sent = ask("next", **asked(shape))
    ids = torch.tensor([[token["id"] for token in sent["tokens"]]])
    source = {"source": torch.tensor([[t["id"] for t in sent["source"]]])} if shape == "both" else {}
    with torch.no_grad():
        shares = python[shape].model(ids, **source)[0].softmax(-1)
    want = [float(shares[n, token]) for n, token in enumerate(ids[0, 1:].tolist())]
    assert sent["shares"][0] is None and sent["shares"][1:] == pytest.approx(want, abs=1e-6)


def test_a_gap_is_filled_as_the_model_fills_it(ask, python):
    sent = ask("hidden", model=SHAPES["encoder"], text=TEXT, place=2)
    loaded = python["encoder"]
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    ids[0, 2] = loaded.tokenizer.mask
    with torch.no_grad():
        shares = loaded.model(ids)[0, 2].softmax(-1)
    assert [row["shares"][0] for row in sent["rows"]] == pytest.approx(
        [float(shares[row["id"]]) for row in sent["rows"]]
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_lens_ends_where_the_model_does(ask, python, shape):
    sent = ask("lens", **asked(shape))
    assert len(sent["cells"]) == 4 and sent["layers"][0] == "embedding"
    if shape != "encoder":
        last = ask("next", **asked(shape))["rows"][0]
        assert sent["cells"][-1][-1][0]["share"] == pytest.approx(last["shares"][0], abs=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_walk_uses_the_models_own_numbers(ask, shape):
    body = {**asked(shape), "text": "the cat sat"}
    sent = ask("walk", **body, layer=1, head=2)
    steps = {step["key"]: step for step in sent["steps"]}
    trace = ask("attention", **body)
    kind = "encoder.self_attn" if shape == "encoder" else "decoder.self_attn"
    size = len(sent["tokens"])
    raw = ask("block", trace=trace["trace"], kind=kind, layer=1, head=2, rows=[0, size], columns=[0, size])
    weights = np.array(steps["softmax"]["tables"][0]["values"])
    np.testing.assert_allclose(weights, np.frombuffer(raw, "<f4").reshape(size, size), atol=1e-5)
    assert ("cross" in steps) is (shape == "both")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_checker_finds_nothing_in_a_sound_model(ask, shape):
    sent = ask("check", model=SHAPES[shape])
    assert sent["ok"] and sent["sight"]["late"] == []
    moved = np.array(sent["sight"]["moved"])
    assert (np.triu(moved, 1) > 0).any() == (shape == "encoder")


def test_a_leak_is_seen_on_the_matrix():
    """The planted fault: a decoder whose mask lets everyone see everyone."""
    from headwater.core.masks import Everyone, Past
    from headwater.inspection.subjects import Subject
    from headwater.parts import swap
    from headwater.serving.checking import sight
    from headwater.serving.shelf import Opened

    loaded = made(SHAPES["decoder"])
    loaded.model = swap(loaded.model.spec, Past, lambda past: Everyone()).build(seed=0).eval()
    found = sight(Opened(Item("x", "made"), (), Subject.of(loaded), loaded))
    assert len(found["late"]) == 13 * 12 // 2


@pytest.mark.parametrize("shape", SHAPES)
def test_the_anatomy_is_the_count(ask, python, shape):
    sent = ask("anatomy", model=SHAPES[shape])
    assert sent["count"]["parameters"] == sum(p.numel() for p in python[shape].model.parameters())
    assert (
        list(sent["stacks"]) == {"both": ["encoder", "decoder"], "encoder": ["encoder"], "decoder": ["decoder"]}[shape]
    )
    assert ask("positions", model=SHAPES[shape])["drawn"]
    tokens = ask("tokens", **asked(shape))
    assert "".join(t["text"] for t in tokens["tokens"] if t["text"] != "<bos>").strip() == TEXT
    assert bytes.fromhex(tokens["tokens"][-1]["bytes"]).decode().strip() == tokens["tokens"][-1]["text"].strip()


@pytest.mark.parametrize("shape", ["both", "decoder"])
def test_talk_says_what_generate_says(client, python, shape):
    key = "source" if shape == "both" else "text"
    answer = client.post("/api/talk", json={"model": SHAPES[shape], key: SOURCE, "tokens": 6})
    lines = [json.loads(line) for line in answer.text.splitlines()]
    said = generate(python[shape], SOURCE, max_tokens=6)
    assert [line["token"] for line in lines[:-1]] == list(said.ids) and "".join(
        x["text"] for x in lines[:-1]
    ) == said.text
    assert lines[-1]["done"] == said.stopped
    looked = client.post(
        "/api/attention",
        json={
            "model": SHAPES[shape],
            "ids": lines[-1]["ids"],
            **({"source_ids": lines[-1]["source_ids"]} if shape == "both" else {}),
        },
    )
    assert looked.status_code == 200


def test_a_run_is_read_from_its_files(ask, run_folder):
    sent = ask("run", run="dates")
    assert sent["state"] == "finished" and sent["step"] == 40 and sent["checkpoints"] == [20, 40]
    assert len(sent["lines"]) == 43 and ask("run", run="dates", after=40)["lines"][0]["line"] == 41
    assert [sample["output"] for sample in sent["samples"]] == ["said at 20", "said at 40"]
    assert ask("about", model="dates")["task"] == "text-to-text"


def test_a_checkpoint_is_the_model_as_it_was(ask):
    body = {
        "run": "dates",
        "source": "the cat sat",
        "text": "the dog",
        "kind": "decoder.cross_attn",
        "layer": 0,
        "head": 1,
    }
    early, late = (np.array(ask("scrub", checkpoint=step, **body)["weights"]) for step in (20, 40))
    assert early.shape == late.shape and not np.allclose(early, late)
    assert np.allclose(early.sum(1), 1, atol=1e-4)


def test_a_checkpoint_that_is_gone_is_told(client):
    answer = client.post("/api/scrub", json={"run": "dates", "checkpoint": 30, "source": "a"})
    assert answer.status_code == 404 and "no checkpoint of step 30" in answer.text


def test_a_model_that_is_deleted_meanwhile(tmp_path):
    import shutil

    from starlette.testclient import TestClient

    from headwater.serving.app import app
    from headwater.serving.gate import Guard
    from headwater.weights.native import save_model

    tiny = made(SHAPES["both"])
    save_model(tmp_path / "m", tiny.model, {"task": "text-to-text"})
    tiny.tokenizer.save(tmp_path / "m")
    client = TestClient(
        app(Shelf([Item("m", "model", tmp_path / "m")]), Guard("127.0.0.1", 8017)), base_url="http://127.0.0.1:8017"
    )
    assert client.post("/api/about", json={"model": "m"}).status_code == 200
    shutil.rmtree(tmp_path / "m")
    answer = client.post("/api/about", json={"model": "m"})
    assert answer.status_code == 404 and "is gone now; put it back, or choose another" in answer.text
    assert str(tmp_path) not in answer.text


@pytest.mark.parametrize("each_token", [False, True])
def test_labels_are_those_of_the_head(each_token):
    from headwater.core.heads import ClassHead, TokenHead
    from headwater.core.shapes import encoder
    from headwater.inspection.subjects import Subject
    from headwater.serving.asking import Talk
    from headwater.serving.shelf import Opened
    from headwater.serving.talking import talk

    loaded = made(SHAPES["encoder"])
    head = TokenHead(3) if each_token else ClassHead(3)
    loaded.model = encoder(len(loaded.tokenizer), head=head, d_model=32, heads=4, layers=1).build(seed=0).eval()
    loaded.labels = ["one", "two", "<b>three"]
    (said,) = talk(Opened(Item("x", "made"), (), Subject.of(loaded), loaded), Talk(model="x", text=TEXT))
    with torch.no_grad():
        shares = loaded.model(torch.tensor([said["ids"]]))[0].softmax(-1)
    if each_token:
        assert [name for name, _ in said["tags"]] == [loaded.labels[n] for n in shares.argmax(-1).tolist()]
    else:
        assert dict(said["labels"]) == pytest.approx(dict(zip(loaded.labels, shares.tolist(), strict=True)), abs=1e-6)


def test_laws_may_be_asked_one_by_one(ask, client):
    laws = ask("about", model=SHAPES["decoder"])["laws"]
    parts = [ask("check", model=SHAPES["decoder"], only=[law]) for law in laws]
    whole = ask("check", model=SHAPES["decoder"])
    assert [(v["law"], v["state"]) for part in parts for v in part["verdicts"]] == [
        (v["law"], v["state"]) for v in whole["verdicts"]
    ]
    assert [part["sight"] is not None for part in parts].count(True) == 1
    unknown = client.post("/api/check", json={"model": SHAPES["decoder"], "only": ["futur"]})
    assert unknown.status_code == 422 and "did you mean 'future'" in unknown.text
