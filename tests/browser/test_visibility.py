"""Who sees whom: what is drawn is what was measured, in both languages, with the pointer and the keyboard."""

from __future__ import annotations

import numpy as np
import pytest

import headwater
from headwater.inspection.visibility import Edge, layer_attentions, measure_edges, measure_row
from headwater.serving.model_store import StoredModel, build_tiny_model
from headwater.weights.native import save_native

MODELS = {
    "longformer": ("encoder", "longformer:window=8", "masked-lm"),
    "bigbird": ("encoder", "bigbird:block=4,random=1", "masked-lm"),
    "xl": ("decoder", "xl:memory=12", "language-model"),
}
COLORS = """() => {
    const canvas = document.querySelectorAll(".edges-grid")[1], pen = canvas.getContext("2d");
    const ratio = canvas.width / canvas.clientWidth, cell = canvas.clientWidth / 32, seen = [];
    for (let r = 0; r < 32; r++) for (let c = 0; c < 32; c++) {
        const at = [Math.floor((c + 0.5) * cell * ratio), Math.floor((r + 0.5) * cell * ratio)];
        seen.push([...pen.getImageData(...at, 1, 1).data.slice(0, 3)].join(" "));
    }
    return seen;
}"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("sparse"), build_tiny_model("tiny decoder").tokenizer
    built = {}
    for name, (kind, attention, task) in MODELS.items():
        spec = getattr(headwater, kind)(len(tokenizer), d_model=16, heads=2, layers=2, attention=attention)
        built[name] = spec.build(seed=0).eval()
        save_native(root / name, built[name], {"task": task})
        tokenizer.save(root / name)
    return root, built


@pytest.fixture(scope="module")
def address(models, start_server):
    root, built = models
    with start_server([StoredModel(name, "model", root / name) for name in built]) as url:
        yield url


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert not errors


def go(page, address, **params):
    query = "&".join(f"{name}={value}" for name, value in params.items())
    page.goto(f"{address}#/visibility?{query}")
    page.wait_for_selector(f".edges[data-drawn='{params['layer']} {params['length']} {params['position']}']")


@pytest.mark.parametrize("name", MODELS)
def test_squares_and_words_are_what_was_measured(name, models, address, page):
    go(page, address, model=name, layer=1, length=32, position=13)
    edges = measure_edges(layer_attentions(models[1][name])[1], 32)
    drawn = page.evaluate(COLORS)
    by_color = {}
    for color, edge in zip(drawn, edges.ravel().tolist(), strict=True):
        by_color.setdefault(color, set()).add(edge)
    assert sorted(map(tuple, by_color.values())) == [(edge,) for edge in np.unique(edges)], "one color for each edge"
    for edge in set(edges[13].tolist()) - {0}:
        line = page.locator(f"tr[data-edge={Edge(edge).name.lower()}]")
        assert line.locator(".num").inner_text() == str((edges[13] == edge).sum())
    assert page.locator("tr[data-edge]").count() == len(set(edges[13].tolist()) - {0})


def test_a_click_and_the_slider_choose_a_position(models, address, page):
    go(page, address, model="longformer", layer=0, length=64, position=20)
    box = page.locator(".edges-grid").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 40.5 / 64, box["y"] + box["height"] / 2)
    page.wait_for_selector(".edges[data-drawn='0 64 40']")
    assert "position=40" in page.url
    page.focus("#position")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".edges[data-drawn='0 64 41']")
    assert page.evaluate("document.activeElement.id") == "position", "the slider keeps the keyboard"
    page.select_option("#visibility-layer", "1")
    page.wait_for_selector(".edges[data-drawn='1 64 41']")


def test_a_long_text_has_the_row_of_its_position_in_chinese(models, address, browser):
    page = browser.new_page(locale="zh-CN", viewport={"width": 390, "height": 800})
    go(page, address, model="longformer", layer=0, length=1024, position=500)
    row = measure_row(layer_attentions(models[1]["longformer"])[0], 1024, 500)
    assert page.inner_text("h1") == "谁看到谁" and f"看得到 {(row > 0).sum()} 个" in page.inner_text(".edges h2")
    assert page.locator(".edges-grid").count() == 1
    assert page.inner_text("tr[data-edge=near] td:last-child") == "496–504"
    assert page.evaluate("document.documentElement.scrollWidth") <= 392
    page.close()


def test_a_layer_that_is_not_there_is_refused_in_words(address, page):
    page.goto(f"{address}#/visibility?model=longformer&layer=9")
    page.wait_for_selector(".notice.bad")
    assert "layer must be below 2, got 9; choose another" in page.inner_text(".notice.bad")
