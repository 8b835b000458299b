"""Contents of the views: formulas, attributions and their scale, counts, lines and exports; and the keyboard."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT = "the cat sat on the mat"


def request_body(architecture):
    return {
        "model": ARCHITECTURES[architecture],
        "text": TEXT,
        **({"source": "the dog sat"} if architecture == "encoder-decoder" else {}),
    }


def saved(page, tmp_path, kind, nth=0):
    with page.expect_download() as waiting:
        page.locator(f"[data-export={kind}]").nth(nth).click()
    waiting.value.save_as(tmp_path / f"saved.{kind}")
    return (tmp_path / f"saved.{kind}").read_bytes()


def size(png):
    return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")


# ------------------------------------------------------------------------------------------------------------ the walk


@pytest.mark.parametrize(("architecture", "layer"), [("encoder-decoder", 0), ("encoder", 1), ("decoder", 2)])
def test_each_step_prints_its_formula_and_every_matrix_in_it(visit, tmp_path, architecture, layer):
    """The page shows the formulas of the server, which the tests of the server evaluate."""
    page = visit().go("walkthrough", **request_body(architecture), layer=layer, head=1)
    page.wait_for_selector(".step canvas")
    steps = json.loads(saved(page, tmp_path, "json"))["steps"]
    known = {one["name"] for step in steps for one in [*step["matrices"], *step["weights"]]}
    assert steps[0]["type"] == ("residual_stream" if layer else "embedding")
    for number, step in enumerate(steps):
        page.wait_for_selector(f".step[data-step='{step['key']}']")
        assert page.inner_text(".step .formula").split("\n") == step["formulas"]
        drawn = set(page.eval_on_selector_all(".step [data-matrix]", "all => all.map(f => f.dataset.matrix)"))
        names = {name for text in step["formulas"] for name in known if name in text.replace("ᵀ", "").split(" ")}
        assert names <= drawn and drawn <= known, step["formulas"]
        if number + 1 < len(steps):
            page.click("#walkthrough-next")


def test_a_walkthrough_is_requested_once(visit):
    page = visit().go("walkthrough", **request_body("decoder"))
    page.wait_for_selector(".step canvas")
    calls = []
    page.on("request", lambda r: calls.append(r.url) if r.url.endswith("/api/walkthrough") else None)
    for _ in range(4):
        page.click("#walkthrough-next")
    page.wait_for_selector(".step[data-step='mask']")
    assert page.evaluate("document.activeElement.id") == "walkthrough-next", "the focus stays on the button"
    assert calls == []
    page.select_option("select[aria-label=layer]", "1")
    page.wait_for_selector(".step[data-step='mask']")
    page.wait_for_function("() => location.hash.includes('layer=1')")
    page.wait_for_timeout(300)
    assert len(calls) == 1


# -------------------------------------------------------------------------------------------------------- why this word

FAINT = {"attributions": [0.004, -0.003], "source_attributions": [0.001, -0.002, 0.0]}


def word(text, number=5):
    return {"id": number, "text": text, "label": text.strip(), "num_pieces": 1}


def explained(page, scores, log_p):
    """Mock the attribution response of the server."""
    tokens, source = [word("<bos>"), word("the"), word("cat")], [word("the"), word("dog"), word("sat")]
    data = {"tokens": tokens, "source": source, "next_tokens": [word("the"), word("cat"), word("<eos>")], **scores}
    data |= {
        "position": 1,
        "output": " cat",
        "method": "integrated_gradients",
        "logprob": log_p,
        "baseline_logprob": -3.0,
    }
    page.route("**/api/attribution", lambda route: route.fulfill(json=data))


def test_it_begins_with_a_word(visit):
    page = visit().go("attribution", model=ARCHITECTURES["encoder-decoder"], source="the dog sat", text=TEXT)
    page.wait_for_selector(".token-attribution .attributed")
    assert page.inner_text(".token-attribution .chip.selected").strip() not in ("<eos>", "next…")
    place = page.get_attribute(".token-attribution", "data-position")
    page.wait_for_selector("[data-ablated] .candidates")
    before = page.locator(".token-attribution .chips").first.locator("button").nth(int(place) - 1).inner_text().strip()
    printed = page.inner_text("[data-ablated] h3")
    assert int(place) == 0 or f"“{before}”" in printed.replace("“ ", "“"), "the ablation is at the same position"


@pytest.mark.parametrize(("log_p", "words"), [(-0.001, "The model is near-certain of this token"), (-2, "No token")])
def test_negligible_attributions_are_pale_and_labelled(visit, log_p, words):
    one = visit()
    explained(one.page, FAINT, log_p)
    page = one.go("attribution", **request_body("encoder-decoder"))
    page.wait_for_selector(".token-attribution .attributed")
    assert words in page.inner_text("#no-attribution")
    assert "−0.10" in page.inner_text(".legend >> nth=0") and "+0.10 nat" in page.inner_text(".legend >> nth=0")
    colours = page.eval_on_selector_all(".attributed", "all => all.map(c => c.style.background)")
    for colour in colours:
        channels = [int(part) for part in colour[4:-1].split(",")]
        assert min(channels) > 225, f"{colour} is no pale colour"


def test_the_scale_is_that_of_the_largest(visit, tmp_path):
    one = visit()
    explained(one.page, {"attributions": [0.8, -0.4], "source_attributions": [-1.6, 0.2, 0.0]}, -1.0)
    page = one.go("attribution", **request_body("encoder-decoder"))
    page.wait_for_selector(".token-attribution .attributed")
    assert page.locator("#no-attribution").count() == 0
    assert "−1.60" in page.inner_text(".legend >> nth=0") and "+1.60 nat" in page.inner_text(".legend >> nth=0")
    picture = ElementTree.fromstring(saved(page, tmp_path, "svg"))
    bars = [part for part in picture.iter() if part.get("data-value") is not None]
    zero = float(next(part for part in picture.iter() if part.get("data-zero")).get("data-zero"))
    assert [float(bar.get("data-value")) for bar in bars] == [-1.6, 0.2, 0.0, 0.8, -0.4]
    max_value = max(float(bar.get("width")) for bar in bars)
    for bar in bars:
        value, x, width = (float(bar.get(name)) for name in ("data-value", "x", "width"))
        assert width == pytest.approx(abs(value) / 1.6 * max_value)
        assert x + width == pytest.approx(zero) if value < 0 else x == pytest.approx(zero)
    fills = {bar.get("fill") for bar in bars if float(bar.get("data-value")) < 0}
    assert len(fills) == 1 and fills.isdisjoint(bar.get("fill") for bar in bars if float(bar.get("data-value")) > 0)
    texts = ["".join(part.itertext()) for part in picture.iter() if part.tag.endswith("}text")]
    assert texts[0].startswith("“cat”, probability 36.8 %") and "−1.600" in texts and "+0.800" in texts


# ------------------------------------------------------------------------------------------------------ attention, next


def test_the_scale_works_in_lines(visit):
    page = visit().go("attention", **request_body("decoder"), layer=1, head=1, plot="lines")
    page.wait_for_selector("svg.lines path", state="attached")
    root = page.eval_on_selector_all("svg.lines path", "all => all.map(p => Number(p.getAttribute('stroke-opacity')))")
    page.click(".segmented button[data-value=linear]")
    page.wait_for_function("() => location.hash.includes('scale=linear')")
    page.wait_for_timeout(300)
    read = "all => all.map(p => [Number(p.dataset.weight), Number(p.getAttribute('stroke-opacity'))])"
    linear = page.eval_on_selector_all("svg.lines path", read)
    assert len(root) > len(linear), "small weights are shown, or not"
    for weight, opacity in linear:
        assert opacity == pytest.approx(min(1, 0.08 + 0.9 * weight), abs=1e-4)


def test_the_value_of_a_line_is_announced(visit):
    page = visit().go("attention", **request_body("decoder"), layer=1, head=1, plot="lines")
    page.wait_for_selector("svg.lines text", state="attached")
    page.locator("svg.lines text").nth(2).hover()
    printed = page.inner_text(".readout.big")
    assert "(2) attends to" in printed
    weights = page.eval_on_selector_all("svg.lines path", "all => all.map(p => Number(p.dataset.weight))")
    assert any(abs(float(printed.split(": ")[-1]) - weight) < 1e-3 for weight in weights)


def test_the_value_under_the_pointer_is_visible(visit):
    long = {"model": ARCHITECTURES["decoder"], "text": " ".join([TEXT] * 5)}
    page = visit(viewport={"width": 1440, "height": 900}).go("attention", **long, layer=1, head=1)
    page.wait_for_selector("canvas.heat")
    page.wait_for_timeout(300)
    x, y = page.evaluate("document.querySelector('.map').heat.cellCenter(0, 0)")
    page.hover("canvas.heat", position={"x": x, "y": y})
    page.wait_for_function("() => /attends to/.test(document.querySelector('.readout.big').textContent)")
    box = page.locator(".readout.big").bounding_box()
    assert box["y"] + box["height"] <= 900


def test_the_picture_of_a_map_is_the_map_and_no_more(visit, tmp_path):
    page = visit().go("attention", **request_body("decoder"), layer=1, head=1)
    page.wait_for_selector(".large[data-drawn] canvas")
    picture = ElementTree.fromstring(saved(page, tmp_path, "svg"))
    width, height = (float(picture.get(side)) for side in ("width", "height"))
    assert size(saved(page, tmp_path, "png")) == (int(2 * width), int(2 * height)), "at twice the size"
    texts = ["".join(part.itertext()) for part in picture.iter() if part.tag.endswith("}text")]
    assert texts[0] == "tiny decoder · decoder · layer 1 · head 1"
    cells = [part for part in picture.iter() if part.tag.endswith("}rect")]
    covered = sum(float(cell.get("width")) * float(cell.get("height")) for cell in cells)
    assert covered > 0.5 * width * height, "most of it is content"


def test_logits_processors_are_described_in_words(visit):
    page = visit().go("next-token", **request_body("decoder"), temperature="0.05", top_k="9")
    page.wait_for_selector(".stage-name")
    names = page.locator(".stage-name").all_inner_texts()
    assert names == ["model: 384 tokens", "temperature 0.05: 384 tokens", "top-k 9: 9 tokens"]


# ------------------------------------------------------------------------------------------------------ talk, keyboard


def test_a_chat_counts_its_tokens_and_its_url_has_the_settings(visit):
    one = visit()
    page = one.go("chat", model=ARCHITECTURES["decoder"])
    page.fill("#max-tokens", "16")
    page.fill("#message", TEXT)
    page.click("#send")
    page.wait_for_selector(".message[data-done]")
    assert "16 completion tokens, 7 prompt tokens" in page.inner_text(".message")
    page.click("#theme")
    assert page.locator(".message").count() == 1, "changing the theme keeps the chat"
    page.reload()
    one.settled()
    assert page.input_value("#message") == TEXT and page.input_value("#max-tokens") == "16"


def test_heads_are_one_stop_of_the_keyboard(visit):
    page = visit().go("attention", **request_body("decoder"))
    page.wait_for_selector(".thumbnail[aria-pressed=true]")
    assert page.locator(".thumbnail[tabindex='0']").count() == 1
    page.focus(".thumbnail[aria-pressed=true]")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".large[data-drawn='decoder.self_attn 1 0']")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".large[data-drawn='decoder.self_attn 1 1']")
    assert page.evaluate("document.activeElement.dataset.head") == "1.1"
    page.focus(".segmented button[data-value=lines]")
    page.keyboard.press("Enter")
    page.wait_for_selector("svg.lines path", state="attached")
    assert page.evaluate("document.activeElement.dataset.value") == "lines", "the focus stays where it was"
