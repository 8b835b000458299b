"""The view of an image: upload, heads, a patch that looks, attribution; views of texts say what they are for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from headwater.core import Attention, Block, ClassificationHead, FeedForward, LayerNorm, Model, Pooled, Stack, pre
from headwater.families.load import save
from headwater.serving.model_store import StoredModel
from headwater.variants.patches import Patches
from headwater.vision.processor import ImageProcessor


@pytest.fixture(scope="module")
def address(tmp_path_factory, start_server):
    folder = tmp_path_factory.mktemp("vit") / "vit"
    norm = LayerNorm(1e-6)
    block = Block((pre(norm, self_attn=Attention(2, bias="qkvo")), pre(norm, ffn=FeedForward(32, "gelu"))))
    spec = Model(encoder=Stack(16, Patches((16, 16), (4, 4)), (block,) * 2, norm), head=ClassificationHead(3, Pooled()))
    save(spec.build(seed=0), folder, layout="transformers")
    labels = {"0": "cat", "1": "dog", "2": "<b>car</b>"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": labels}))
    ImageProcessor(size=(16, 16)).save(folder)
    with start_server([StoredModel("vit", "model", folder)]) as where:
        yield where


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)  # noise: more than a request may hold, so the page makes it smaller
    return path


@pytest.mark.parametrize("locale", ["en-US", "zh-CN"])
def test_an_image_is_shown_patch_by_patch(visit, photo, locale):
    one = visit(locale=locale, viewport={"width": 390, "height": 800})
    page = one.go("image", model="vit")
    page.set_input_files("#image-file", photo)
    page.wait_for_selector("[data-drawn=rollout] canvas.picture")
    assert page.locator(".image-labels li").count() == 3 and page.locator(".notice.bad").count() == 0
    assert page.locator(".image-head").count() == 4

    # a head, then what a patch attends to
    page.locator("[data-head='1.1']").click()
    page.wait_for_selector("[data-drawn='1.1']")
    box = page.locator("canvas.picture").bounding_box()
    page.locator("canvas.picture").click(position={"x": box["width"] * 0.6, "y": box["height"] * 0.1})
    page.wait_for_selector("[data-patch='2']")  # row 1, column 3 of 4
    assert "3" in page.inner_text("#image-from")
    page.locator("canvas.picture").press("ArrowDown")
    page.wait_for_selector("[data-patch='6']")
    page.locator("[data-value=attribution]").click()
    page.wait_for_selector("[data-drawn=attribution]")
    page.locator("#all-patches").click()
    page.wait_for_selector("#all-patches", state="detached")
    assert page.evaluate("document.documentElement.scrollWidth") <= 392


def test_views_of_texts_lead_to_that_of_images(visit):
    one = visit()
    page = one.go("attention", model="vit")
    assert page.locator(".notice a").get_attribute("href").startswith("#/image")
    page = one.go("image", model="tiny decoder")
    assert page.locator(".notice a").get_attribute("href").startswith("#/attention")
    for view, mark in (("start", ".view-link"), ("architecture", "svg.diagram .box"), ("check", ".verdict.good")):
        page = one.go(view, model="vit")
        page.wait_for_selector(mark)
        assert page.locator(".notice.bad").count() == 0, view
