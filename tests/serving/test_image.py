"""Image models on the server: maps and labels of an uploaded image, and what is refused."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from headwater.core import Attention, Block, ClassificationHead, FeedForward, LayerNorm, Model, Pooled, Stack, pre
from headwater.families.load import load, save
from headwater.inspection.image_maps import image_maps
from headwater.serving.app import create_app
from headwater.serving.model_store import ModelStore, StoredModel
from headwater.serving.security import AccessPolicy
from headwater.variants.patches import Patches
from headwater.vision.processor import ImageProcessor

HOST = "127.0.0.1:8017"
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    norm = LayerNorm(1e-6)
    block = Block((pre(norm, self_attn=Attention(2, bias="qkvo")), pre(norm, ffn=FeedForward(32, "gelu"))))
    spec = Model(encoder=Stack(16, Patches((12, 16), (4, 4)), (block,) * 2, norm), head=ClassificationHead(3, Pooled()))
    folder = save(spec.build(seed=0), tmp_path_factory.mktemp("vit") / "vit", layout="transformers")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "cat", "1": "dog", "2": "car"}}))
    ImageProcessor(size=(12, 16)).save(folder)
    return folder


@pytest.fixture(scope="module")
def ask(folder):
    policy = AccessPolicy("127.0.0.1", 8017)
    client = TestClient(create_app(ModelStore([StoredModel("vit", "model", folder)]), policy), f"http://{HOST}")

    def call(name, **body):
        answer = client.post(f"/api/{name}", json={"model": "vit", **body})
        return answer.status_code, answer.json()

    return call


def encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def png() -> str:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return encode(buffer.getvalue())


@pytest.mark.parametrize("patch", [None, 5])
def test_the_maps_are_those_of_inspection(ask, folder, patch):
    status, found = ask("image", image=png(), patch=patch)
    assert status == 200
    loaded = load(folder)
    maps = image_maps(loaded.model, loaded.processor([PIXELS]), patch)
    assert np.allclose(found["attention"], maps.attention, atol=1e-5)
    assert np.allclose(found["rollout"], maps.rollout, atol=1e-5)
    assert np.allclose(found["attribution"], maps.attribution, atol=1e-5)
    seen = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["image"]))))
    assert np.array_equal(seen, loaded.processor.resize(PIXELS))
    assert found["best"] == found["labels"][0]["label"]
    assert sum(row["probability"] for row in found["labels"]) == pytest.approx(1, abs=1e-4)


def test_what_is_no_image_is_refused_in_one_line(ask):
    for image, words in (("%%%", "must be a file in base64"), (encode(b"no image"), "cannot be read as an image")):
        status, answer = ask("image", image=image)
        assert 400 <= status < 500 and words in answer["error"]["message"]
    status, answer = ask("image", image=png(), patch=12)
    assert status == 422 and "patch must be from 0 to 11" in answer["error"]["message"]


def test_the_other_views_of_an_image_model(ask):
    status, info = ask("model_info")
    assert status == 200 and info["input"] == "image" and info["layers"] == [2] and "patches" in info["laws"]
    assert ask("model_structure")[0] == 200
    status, report = ask("check")
    assert status == 200 and report["ok"] and report["dependencies"] is None
