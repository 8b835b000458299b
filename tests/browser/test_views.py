"""Every view on every architecture of model, in both languages, in a real browser."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from headwater.generation.api import generate
from headwater.inspection.attention import attention_maps
from headwater.serving.model_store import build_tiny_model

ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT = "the cat sat on the mat"


def request_body(architecture):
    more = {"source": "the dog sat", "text": TEXT} if architecture == "encoder-decoder" else {"text": TEXT}
    return {"model": ARCHITECTURES[architecture], **more}


DRAWN = {  # view -> selector of an element that is present when it is drawn
    "start": ".model-card .view-link",
    "attention": ".large[data-drawn] canvas",
    "next-token": ".candidates li",
    "attribution": ".token-attribution .attributed",
    "chat": "form, .notice",
    "walkthrough": ".step canvas, .step .candidates",
    "architecture": "svg.diagram .box",
    "compare": ".matrices canvas, .notice",
    "visibility": ".edges[data-drawn] canvas",
    "check": ".laws li",
    "training": ".charts svg",
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_view_is_drawn(visit, architecture):
    one = visit()
    for view, mark in DRAWN.items():
        page = one.go(view, **request_body(architecture))
        page.wait_for_selector(mark)
        assert page.locator(".notice.bad").count() == 0, view
    assert page.evaluate("document.documentElement.lang") == "en"


def test_every_view_in_chinese_dark_and_narrow(visit):
    one = visit(locale="zh-CN", color_scheme="dark", viewport={"width": 390, "height": 800})
    for view, mark in DRAWN.items():
        page = one.go(view, **request_body("encoder-decoder"))
        page.wait_for_selector(mark)
        assert page.evaluate("document.documentElement.scrollWidth") <= 392, f"{view} is wider than a phone"
        assert any("\u4e00" <= c <= "\u9fff" for c in page.inner_text("h1")), view
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_language_and_the_light_are_a_switch_and_stay(visit):
    page = visit().go("attention", **request_body("decoder"))
    page.click("#language")
    page.wait_for_function("() => document.documentElement.lang === 'zh-CN'")
    assert page.inner_text("h1") == "注意力"
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    page.wait_for_selector(".large[data-drawn] canvas")
    assert page.inner_text("h1") == "注意力" and page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.click("#language")
    page.wait_for_function("() => document.documentElement.lang === 'en'")


# ------------------------------------------------------------------------------------------- what is drawn is true

PIXEL = """([rows, columns]) => {
    const ramp = document.querySelector("canvas.colorbar").getContext("2d").getImageData(0, 0, 256, 1).data;
    const all = [...ramp].filter((_, n) => n % 4 < 3);
    const canvas = document.querySelector("canvas.heat"), pen = canvas.getContext("2d");
    const ratio = canvas.width / canvas.clientWidth, map = document.querySelector(".map").heat;
    const pixels = pen.getImageData(0, 0, canvas.width, canvas.height), seen = [];
    for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
        const [x, y] = map.cellCenter(r, c);
        const at = 4 * (Math.floor(y * ratio) * canvas.width + Math.floor(x * ratio));
        seen.push([...pixels.data.slice(at, at + 3)]);
    }
    return [seen, all];
}"""


@pytest.mark.parametrize(
    ("architecture", "scale"), [("encoder-decoder", "sqrt"), ("encoder", "linear"), ("decoder", "sqrt")]
)
def test_the_pixels_of_a_heat_map_are_the_weights(visit, architecture, scale):
    kind = {"encoder-decoder": "decoder.cross_attn", "encoder": "encoder.self_attn", "decoder": "decoder.self_attn"}[
        architecture
    ]
    page = visit().go("attention", **request_body(architecture), kind=kind, layer=1, head=2, scale=scale)
    page.wait_for_selector(f".large[data-drawn='{kind} 1 2']")
    page.wait_for_timeout(400)
    loaded = build_tiny_model(ARCHITECTURES[architecture])
    maps = attention_maps(loaded, *(("the dog sat", TEXT) if architecture == "encoder-decoder" else (TEXT,)))
    weights = maps.get_map(kind, 1).head_weights(2)
    seen, colours = page.evaluate(PIXEL, list(weights.shape))
    colours = np.array(colours).reshape(256, 3)
    prob = (weights / weights.max()) ** (0.5 if scale == "sqrt" else 1)
    expected = np.where(weights > 0, np.clip(np.rint(255 * prob), 1, 255), 0).astype(int).reshape(-1)
    off = np.abs(np.array(seen) - colours[expected]).max(1)
    near = np.minimum(off, np.abs(np.array(seen) - colours[np.clip(expected + 1, 0, 255)]).max(1))
    assert (off <= 1).mean() > 0.95 and near.max() <= 4, "a weight may round to the next of 256 colours, no further"
    wrong = np.abs(np.array(seen) - colours[expected[::-1]]).max(1)
    assert (wrong > 4).any(), "another matrix would be seen"


def test_the_number_under_the_pointer_is_the_weight(visit):
    page = visit().go("attention", **request_body("decoder"), layer=2, head=1)
    page.wait_for_selector("canvas.heat")
    page.focus("canvas.heat")
    for key in ["ArrowDown"] * 4 + ["ArrowRight"] * 2:
        page.keyboard.press(key)
    page.wait_for_function(
        "() => /\\(4\\) attends to .* \\(2\\):/.test(document.querySelector('.readout.big').textContent)"
    )
    weight = (
        attention_maps(build_tiny_model(ARCHITECTURES["decoder"]), TEXT)
        .get_map("decoder.self_attn", 2)
        .head_weights(1)[4, 2]
    )
    displayed = page.inner_text(".readout.big").split(": ")[-1]
    assert float(displayed) == pytest.approx(float(weight), rel=6e-3, abs=1e-4)


@pytest.mark.parametrize("architecture", ["encoder-decoder", "decoder"])
def test_probabilities_are_those_of_python(visit, architecture):
    params = {"temperature": 0.7, "top_k": 12}
    page = visit().go("next-token", **request_body(architecture), **params)
    page.wait_for_selector(".candidates li")
    rows = page.eval_on_selector_all(
        ".candidates button", "all => all.map(b => [b.dataset.id, b.dataset.before, b.dataset.after].map(Number))"
    )
    loaded = build_tiny_model(ARCHITECTURES[architecture])
    begin = (
        {"decoder_start_ids": [loaded.decoder_start_id, *loaded.tokenizer.encode(TEXT, add_special_tokens=False)]}
        if architecture == "encoder-decoder"
        else {}
    )
    prompt = "the dog sat" if architecture == "encoder-decoder" else TEXT
    answer = generate(loaded, prompt, max_tokens=1, trace=True, temperature=0.7, top_k=12, **begin)
    for token, before, after in rows:
        assert before == pytest.approx(float(answer.trace[0][0].probs[int(token)]), abs=2e-6)
        assert after == pytest.approx(float(answer.trace[0][-1].probs[int(token)]), abs=2e-6)
    chosen = page.get_attribute(".candidates li.selected button", "data-id")
    assert int(chosen) == answer.ids[0]


def test_sliders_reshape_and_steps_follow_generate(visit):
    page = visit().go("next-token", **request_body("decoder"))
    page.wait_for_selector(".candidates li")
    page.fill("#top_k", "3")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.candidates button')].filter(b => b.dataset.after > 0).length === 3"
    )
    page.fill("#seed", "5")
    page.wait_for_function("() => location.hash.includes('seed=5')")
    page.wait_for_timeout(300)
    before = page.locator(".chips .chip").count()
    page.click("#next-token-step")
    page.wait_for_function(f"() => document.querySelectorAll('.chips .chip').length === {before + 1}")
    page.click("#next-token-ten")
    page.wait_for_function(f"() => document.querySelectorAll('.chips .chip').length === {before + 11}")
    loaded = build_tiny_model(ARCHITECTURES["decoder"])
    answer = generate(loaded, TEXT, max_tokens=11, temperature=1.0, top_k=3, seed=5)
    ids = page.evaluate(
        "new URLSearchParams(location.hash.split('?')[1]).get('ids').split('.').map(n => parseInt(n, 36))"
    )
    assert ids[before:] == list(answer.ids)


def test_another_token_is_a_branch_and_back_is_back(visit):
    page = visit().go("next-token", **request_body("decoder"))
    page.wait_for_selector(".candidates li")
    first = page.locator(".chips .chip").count()
    page.locator(".candidates button").nth(6).click()
    page.wait_for_function(f"() => document.querySelectorAll('.chips .chip').length === {first + 1}")
    page.go_back()
    page.wait_for_function(f"() => document.querySelectorAll('.chips .chip').length === {first}")
    page.go_forward()
    page.wait_for_function(f"() => document.querySelectorAll('.chips .chip').length === {first + 1}")


def test_a_gap_is_filled_where_one_points(visit):
    page = visit().go("next-token", **request_body("encoder"))
    page.wait_for_selector(".candidates li")
    page.locator(".chips button").nth(3).click()
    page.wait_for_function("() => location.hash.includes('position=3')")
    page.wait_for_selector(".chip.selected")
    loaded = build_tiny_model(ARCHITECTURES["encoder"])
    ids = torch.tensor([loaded.tokenizer.encode(TEXT)])
    ids[0, 3] = loaded.tokenizer.mask_id
    with torch.no_grad():
        best = loaded.model(ids)[0, 3].softmax(-1)
    page.wait_for_function(
        f"() => Number(document.querySelector('.candidates .candidate-row').dataset.id) === {int(best.argmax())}"
    )
    displayed = float(page.get_attribute(".candidates .candidate-row", "data-after"))
    assert displayed == pytest.approx(float(best.max()), abs=1e-6)


# ------------------------------------------------------------------------------------------------ going about in it


def test_refresh_and_back_keep_what_was_seen(visit):
    one = visit()
    page = one.go("attention", **request_body("decoder"))
    page.wait_for_selector(".thumbnail")
    page.click(".thumbnail[data-head='2.3']")
    page.wait_for_selector(".large[data-drawn='decoder.self_attn 2 3']")
    page.click(".segmented button[data-value=lines]")
    page.wait_for_selector("svg.lines path", state="attached")
    page.reload()
    one.settled()
    page.wait_for_selector("svg.lines path", state="attached")
    assert page.get_attribute(".thumbnail[aria-pressed=true]", "data-head") == "2.3"
    page.click("nav a[data-view=architecture]")
    page.wait_for_selector("svg.diagram")
    page.go_back()
    page.wait_for_selector("svg.lines path", state="attached")


def test_a_text_typed_in_is_read(visit):
    page = visit().go("attention", model=ARCHITECTURES["decoder"])
    page.fill("#text", "小河 flows")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".large[data-drawn] canvas")
    assert "text=" in page.url


def test_a_thousand_tokens_are_tiles(visit):
    text = " ".join(["the cat sat on the mat and"] * 150)
    one = visit()
    page = one.go("attention", model=ARCHITECTURES["decoder"], text=text)
    page.wait_for_selector(".large[data-drawn] canvas")
    tokens = page.evaluate("document.querySelector('.map').heat.source.rows.length")
    assert tokens >= 1000
    sizes = []
    page.on("response", lambda r: sizes.append(int(r.headers.get("content-length", 0))) if "tile" in r.url else None)
    start = page.evaluate("performance.now()")
    page.click(".thumbnail[data-head='1.1']")
    page.wait_for_selector(".large[data-drawn='decoder.self_attn 1 1']")
    page.wait_for_function("() => [...document.querySelector('.map').heat.tiles.values()].every(Boolean)")
    assert page.evaluate("performance.now()") - start < 4000
    assert sizes and max(sizes) <= 256 * 256
    slow = page.evaluate("""() => {
        const map = document.querySelector('.map').heat, start = performance.now();
        for (let n = 0; n < 30; n++) map.zoom(n % 2 ? 1.3 : 1 / 1.3, 300, 300);
        return (performance.now() - start) / 30;
    }""")
    assert slow < 40, "drawing takes more than two frames"


def test_a_model_that_is_deleted_meanwhile(visit, folders):
    import shutil

    one = visit()
    page = one.go("attention", model="doomed", source="the cat", text="the dog")
    page.wait_for_selector(".large[data-drawn] canvas")
    one.expected = ("404",)
    shutil.move(folders["doomed"], folders["doomed"].with_name("moved"))
    try:
        page.reload()
        page.wait_for_selector(".notice.bad")
        assert "the files of doomed were deleted while the server was running" in page.inner_text(".notice.bad")
        page.click("text=Back to the start")
        page.wait_for_selector(".model-list")
    finally:
        shutil.move(folders["doomed"].with_name("moved"), folders["doomed"])


def test_a_reply_links_to_its_attention(visit):
    page = visit().go("chat", model=ARCHITECTURES["encoder-decoder"])
    page.fill("#message", "the dog sat")
    page.click("#send")
    page.wait_for_selector(".message[data-done]")
    page.click(".message .view-link")
    page.wait_for_selector(".large[data-drawn='decoder.cross_attn 0 0']")


def test_a_run_with_its_checkpoints(visit):
    evil = '<img src=x onerror="window.hit=1">'
    page = visit().go("training", run=evil)
    page.wait_for_selector(".charts svg")
    page.fill("#checkpoint-text", "the cat sat")
    seen = []
    for step in (0, 1):
        page.fill("#checkpoint", str(step))
        page.wait_for_selector(f".checkpoint-view[data-step='{(20, 40)[step]}'] canvas")
        seen.append(page.evaluate("document.querySelector('.checkpoint-view canvas').toDataURL()"))
    assert seen[0] != seen[1]
    page.reload()
    page.wait_for_selector(".charts svg")


@pytest.mark.parametrize("view", ["attention", "next-token", "architecture"])
def test_the_view_can_be_exported(visit, tmp_path, view):
    page = visit().go(view, **request_body("decoder"))
    page.wait_for_selector(DRAWN[view])
    for kind in ("png", "svg", "json"):
        save_export(page, tmp_path, view, kind)


def save_export(page, tmp_path, view, kind):
    with page.expect_download() as waiting:
        page.locator(f"[data-export={kind}]").first.click()
    path = tmp_path / waiting.value.suggested_filename
    waiting.value.save_as(path)
    content = path.read_bytes()
    if kind == "png":
        assert content.startswith(b"\x89PNG") and len(content) > 1000
    elif kind == "svg":
        from xml.etree import ElementTree

        picture = ElementTree.fromstring(content)
        tags = [part.tag.rpartition("}")[2] for part in picture.iter()]
        assert tags[0] == "svg" and "image" not in tags, "vectors, no picture in a frame"
        assert tags.count("rect") >= 5 and tags.count("text") > 5
    else:
        data = json.loads(content)
        if view == "attention":
            expected = (
                attention_maps(build_tiny_model(ARCHITECTURES["decoder"]), TEXT)
                .get_map("decoder.self_attn", 0)
                .head_weights(0)
            )
            np.testing.assert_allclose(np.array(data["weights"]), expected, atol=1e-6)


READY = """() => {
    const navigation = performance.getEntriesByType("navigation")[0], drawn = performance.getEntriesByName("drawn")[0];
    return [navigation.domContentLoadedEventEnd - navigation.responseStart, drawn.startTime - navigation.responseStart];
}"""


def test_it_is_ready_within_a_second(visit):
    """From the first byte to the document and to a drawn start page; the best of a few tries on a busy machine."""
    one = visit()
    one.go("start")
    durations = []
    while len(durations) < 6 and not any(max(times) < 1000 for times in durations):
        one.page.goto("about:blank")
        one.page.goto(one.address)
        one.settled()
        durations.append(one.page.evaluate(READY))
    if not any(max(times) < 1000 for times in durations) and os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip(f"the machine is too busy to tell: load {os.getloadavg()[0]:.1f}, {durations}")
    assert any(max(times) < 1000 for times in durations), durations


def test_a_live_run_grows_while_one_looks(visit, folders):
    import time

    evil = '<img src=x onerror="window.hit=1">'

    def learn(step):
        with (folders[evil] / "metrics.jsonl").open("a") as file:
            line = {"step": step, "split": "train", "loss": 0.1, "lr": 1e-3, "grad_norm": 1.0, "time": time.time()}
            file.write(json.dumps(line) + "\n")

    learn(41)
    page = visit().go("training", run=evil)
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 41')")
    learn(42)
    page.wait_for_function("() => document.querySelector('[role=status]').textContent.includes('step 42')")
    assert "running" in page.inner_text("[role=status]")
