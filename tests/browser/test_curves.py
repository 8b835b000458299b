"""The training curves equal metrics.jsonl: plotted, smoothed, hovered, compared and exported."""

from __future__ import annotations

import json
import math
import re
from xml.etree import ElementTree

import pytest

from headwater.serving.model_store import StoredModel

EVIL = '<img src=x onerror="window.hit=1">'

CURVES = """() => {
    const chart = document.querySelector("svg.chart"), box = chart.viewBox.baseVal;
    const at = (nodes, name, side) => [...nodes].map(n => [Number(n.dataset[name]), Number(n.getAttribute(side))]);
    const line = ([[a, pa], [b, pb]]) => p => a + (p - pa) * (b - a) / (pb - pa);
    const x = line(at(chart.querySelectorAll("[data-step]"), "step", "x").slice(-2));
    const y = line(at(chart.querySelectorAll("[data-tick]"), "tick", "y").slice(-2));
    const points = path => path.getAttribute("d").slice(1).split("L").map(p => p.split(",").map(Number));
    return Object.fromEntries([...chart.querySelectorAll("path")].map(path => [
        path.dataset.curve,
        {points: points(path).map(([px, py]) => [x(px), y(py)]), opacity: Number(path.getAttribute("stroke-opacity"))},
    ]));
}"""


def measured(folder, split):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line.get("split") == split]


def same(drawn, expected):
    assert [round(step) for step, _ in drawn] == [step for step, _ in expected]
    assert [loss for _, loss in drawn] == pytest.approx([loss for _, loss in expected], abs=0.01)


def smoothed(points, weight):
    """TensorBoard's: a moving average divided by the sum of its weights."""
    connections, built = 0.0, []
    for n, (step, loss) in enumerate(points, 1):
        connections = weight * connections + (1 - weight) * loss
        built.append((step, connections / (1 - weight**n)))
    return built


def test_the_main_line_is_what_was_measured(visit, folders):
    page = visit().go("training", run=EVIL)
    page.wait_for_selector(".charts svg")
    drawn = page.evaluate(CURVES)
    assert list(drawn) == ["training", "validation"] and drawn["training"]["opacity"] == 1
    same(drawn["training"]["points"], measured(folders[EVIL], "train"))
    same(drawn["validation"]["points"], measured(folders[EVIL], "valid"))


def test_smoothing_is_optional_and_unbiased(visit, folders):
    page = visit().go("training", run=EVIL)
    page.wait_for_selector(".charts svg")
    page.fill("#smoothing", "0.9")
    page.wait_for_function("() => document.querySelectorAll('svg.chart')[0].querySelectorAll('path').length === 3")
    assert "smoothing=0.9" in page.url
    drawn, expected = page.evaluate(CURVES), measured(folders[EVIL], "train")
    same(drawn["training"]["points"], expected)
    same(drawn["training, smoothed"]["points"], smoothed(expected, 0.9))
    assert drawn["training"]["opacity"] < drawn["training, smoothed"]["opacity"]
    assert smoothed(expected, 0.9)[0] == pytest.approx(expected[0]), "the first point is itself"


def test_under_the_pointer_stand_both(visit, folders):
    page = visit().go("training", run=EVIL, smoothing="0.5")
    page.wait_for_selector(".charts svg")
    chart = page.locator("svg.chart").first
    box = chart.bounding_box()
    chart.hover(position={"x": box["width"] * 0.55, "y": 100})
    printed = page.locator(".chart-box .readout").first.inner_text()
    match = re.fullmatch(
        r"step (\d+) · training ([\d.]+) · training, smoothed ([\d.]+) · validation ([\d.]+).*", printed
    )
    assert match, printed
    step, raw = int(match[1]), dict(measured(folders[EVIL], "train"))
    assert float(match[2]) == pytest.approx(raw[step], abs=1e-3)
    assert float(match[3]) == pytest.approx(dict(smoothed(list(raw.items()), 0.5))[step], abs=1e-3)
    valid = dict(measured(folders[EVIL], "valid"))
    near = min(valid, key=lambda at: abs(at - step))
    assert float(match[4]) == pytest.approx(valid[near], abs=1e-3)
    assert near == step or f"(step {near})" in printed


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory, start_server):
    root = tmp_path_factory.mktemp("two")
    for number, name in enumerate(("one", "two")):
        (root / name).mkdir()
        (root / name / "config.yaml").write_text("task: seq2seq\n")
        train = [{"step": n, "split": "train", "loss": 5 / (n + number), "lr": 1e-3, "grad_norm": 1.0, "time": 1.0}
                 for n in range(1, 31)]  # fmt: skip
        valid = [{"step": n, "split": "valid", "loss": 4 / (n + number), "bleu": n, "time": 1.0} for n in (10, 30)]
        lines = "".join(json.dumps(line) + "\n" for line in [*train, *valid])
        (root / name / "metrics.jsonl").write_text(lines)
    with start_server([StoredModel(name, "run", root / name) for name in ("one", "two")]) as address:
        yield root, address


def test_the_other_run_has_its_validation_too(visit, two_runs):
    root, address = two_runs
    one = visit()
    one.address = address
    page = one.go("training", run="one", compare="two")
    page.wait_for_function("() => document.querySelectorAll('svg.chart')[0].querySelectorAll('path').length === 4")
    drawn = page.evaluate(CURVES)
    same(drawn["two · training"]["points"], measured(root / "two", "train"))
    same(drawn["two · validation"]["points"], measured(root / "two", "valid"))


def test_a_run_that_is_not_there_is_not_found(visit):
    one = visit()
    one.expected = ("404",)
    page = one.go("training", run="run1")
    page.wait_for_selector(".notice.bad")
    assert "Not found" in page.inner_text(".notice.bad") and "run1" in page.inner_text(".notice.bad")
    assert page.locator("svg.chart").count() == 0


def test_all_charts_are_saved_with_their_names(visit, two_runs, tmp_path):
    _, address = two_runs
    one = visit()
    one.address = address
    page = one.go("training", run="one", compare="two")
    page.wait_for_function("() => document.querySelectorAll('svg.chart')[0].querySelectorAll('path').length === 4")
    displayed = page.locator("svg.chart").count()
    picture = ElementTree.fromstring(saved(page, tmp_path, "svg"))
    charts = [part for part in picture.iter() if "chart" in (part.get("class") or "").split()]
    assert len(charts) == displayed >= 4
    texts = ["".join(part.itertext()) for part in picture.iter() if part.tag.endswith("}text")]
    for text in ("Training · one", "Loss (nats per token)", "bleu", "Learning rate", "Gradient norm", "training"):
        assert text in texts, text
    assert {"validation", "two · training", "two · validation"} <= set(texts)
    assert texts.count("step") == displayed, "every chart names its axis"
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    assert size(saved(page, tmp_path, "png")) == (math.floor(2 * width), math.floor(2 * height))


def saved(page, tmp_path, kind, nth=0):
    with page.expect_download() as waiting:
        page.locator(f"[data-export={kind}]").nth(nth).click()
    waiting.value.save_as(tmp_path / f"saved.{kind}")
    return (tmp_path / f"saved.{kind}").read_bytes()


def size(png):
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
