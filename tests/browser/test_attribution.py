"""Attribution, head ablation, model comparison, gradient norms by layer; and errors in Chinese."""

from __future__ import annotations

import pytest

from headwater.inspection.ablation import ablate, head_importance
from headwater.serving.model_store import build_tiny_model

ARCHITECTURES = {"encoder-decoder": "tiny encoder-decoder", "encoder": "tiny encoder", "decoder": "tiny decoder"}
TEXT = "the cat sat on the mat"
EVIL = '<img src=x onerror="window.hit=1">'


def request_body(architecture):
    return {
        "model": ARCHITECTURES[architecture],
        "text": TEXT,
        **({"source": "the dog sat"} if architecture == "encoder-decoder" else {}),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_word_is_explained_where_one_points(visit, architecture):
    page = visit().go("attribution", **request_body(architecture))
    page.wait_for_selector(".token-attribution .attributed")
    page.locator(".token-attribution .chips button").nth(2).click()
    page.wait_for_selector(".token-attribution[data-position='2']")
    assert "position=2" in page.url
    scores = page.eval_on_selector_all(".token-attribution .attributed", "all => all.map(x => Number(x.dataset.score))")
    assert any(score != 0 for score in scores) and len(scores) >= 3
    page.reload()
    page.wait_for_selector(".token-attribution[data-position='2']")


def test_a_head_switched_off_is_that_of_python(visit):
    page = visit().go("attribution", **request_body("decoder"))
    page.wait_for_selector("[data-complete]")
    displayed = page.eval_on_selector_all(".cell", "all => all.map(c => Number(c.dataset.change))")
    expected = head_importance(build_tiny_model(ARCHITECTURES["decoder"]), TEXT).loss_change
    assert displayed == pytest.approx(list(expected.reshape(-1)), abs=1e-5)
    page.click(".cell[data-head='2.1']")
    page.wait_for_selector("[data-ablated='decoder.self_attn 2 1'] .candidates")
    after = page.eval_on_selector_all(
        "[data-ablated] .candidate-row", "all => all.map(r => [r.dataset.id, r.dataset.after])"
    )
    python = {
        c.token.id: c.ablated_prob for c in ablate(build_tiny_model(ARCHITECTURES["decoder"]), TEXT, 2, 1).candidates
    }
    for token, prob in after:
        assert float(prob) == pytest.approx(python[int(token)], abs=1e-6)


def test_heads_are_reached_by_keyboard(visit):
    page = visit().go("attribution", **request_body("decoder"))
    page.wait_for_selector("[data-complete]")
    page.focus(".cell[data-head='1.2']")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-ablated='decoder.self_attn 1 2'] .candidates")
    assert page.evaluate("document.activeElement.dataset.head") == "1.2", "the focus stays where it was"


def test_two_checkpoints_side_by_side(visit):
    page = visit().go("compare", model=f"{EVIL}@20", compare=f"{EVIL}@40", source="the cat", text="the dog")
    page.wait_for_selector(".matrices canvas")
    assert page.locator(".matrices canvas").count() == 3, "each, and their difference"
    losses = page.eval_on_selector_all(".mean", "all => all.map(m => Number(m.dataset.loss))")
    assert len(losses) == 2 and losses[0] != losses[1]
    page.select_option("select[aria-label=head]", "2")
    page.wait_for_function("() => location.hash.includes('head=2')")
    page.wait_for_selector(".matrices canvas")


def test_models_of_different_shapes_are_compared_as_far_as_they_can(visit):
    page = visit().go("compare", model=ARCHITECTURES["decoder"], compare=ARCHITECTURES["encoder"], text=TEXT)
    page.wait_for_selector(".comparison")
    assert "Different architectures" in page.inner_text(".view")


def test_gradients_of_every_layer_are_a_strip(visit):
    page = visit().go("training", run=EVIL)
    page.wait_for_selector(".grad-norms canvas")
    assert "frozen" in page.inner_text(".grad-norms .notice"), "a layer without gradient is named"
    page.hover(".grad-norms canvas", position={"x": 160, "y": 40})
    printed = page.inner_text(".grad-norms .readout")
    name, _, value = printed.partition(": ")
    layer, step = name.split(" · ")
    norms = {"encoder.layers.0": 0.5, "decoder.layers.0": 0.25, "frozen": 0.0}
    assert float(value) == pytest.approx(norms[layer] / int(step), rel=0.02)


def test_a_checkpoint_opens_as_a_model(visit):
    page = visit().go("attention", model=f"{EVIL}@20", source="the cat", text="the dog")
    page.wait_for_selector(".large[data-drawn] canvas")
    assert page.input_value("#model") == f"{EVIL}@20"


def test_errors_and_laws_are_translated(visit):
    one = visit(locale="zh-CN")
    page = one.go("check", model=ARCHITECTURES["decoder"])
    page.wait_for_selector(".laws li")
    for printed in page.locator(".laws li p").all_inner_texts():
        assert any("\u4e00" <= c <= "\u9fff" for c in printed), printed
    one.expected = ("404",)
    page = one.go("attention", model="nobody", text="a")
    page.wait_for_selector(".notice.bad")
    assert "本服务启动时没有给它" in page.inner_text(".notice.bad")
