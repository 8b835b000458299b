"""Figures, JSON and the HTML report of every result and architecture: self-contained, all text escaped."""

from __future__ import annotations

import html.parser
import json
import re

import numpy as np
import pytest

import headwater
from headwater.core import ClassificationHead, NoHead
from headwater.errors import BadFile, BadInput, BadSetting
from headwater.inspection import plot, plot_style, save_figure
from headwater.inspection.ablation import ablate
from headwater.inspection.api import ANALYSES
from headwater.inspection.attention import attention_maps
from headwater.inspection.inputs import Token
from headwater.inspection.position_plots import position_effects

HOSTILE = "<img src=x onerror=alert()>$\\frac{</style>你"


class Page(html.parser.HTMLParser):
    """Every tag with its attributes, and the text between."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def inspections(encoder_decoder, causal_lm, masked_lm, tmp_path_factory):
    """All three architectures, inspected with hostile text: the inspection, its folder and its files."""
    inspections_by_name = {}
    for name, model, target in (
        ("both", encoder_decoder, HOSTILE),
        ("decoder", causal_lm, None),
        ("encoder", masked_lm, None),
    ):
        folder = tmp_path_factory.mktemp(name)
        inspection = headwater.inspect(model, HOSTILE + " <mask>", target, layer=1, head=2)
        inspections_by_name[name] = inspection, folder, inspection.write(folder)
    return inspections_by_name


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_the_report_is_self_contained_and_escapes_all_text(inspections, shape):
    _, folder, _ = inspections[shape]
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form", "svg"}
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        for name in ("src", "href"):
            assert attributes.get(name, "#").startswith(("#", "data:image/png;base64,")), attributes[name][:80]
    assert not re.search(r"url\(|@import|https?://", text)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "<img src=x onerror=alert()>" in "".join(page.text), "shown as text"


def test_unescaped_html_would_be_detected():
    page = Page(f"<p>{HOSTILE}</p>")
    assert any("onerror" in attributes for _, attributes in page.tags)


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_the_report_has_all_sections(inspections, shape):
    inspection, folder, paths = inspections[shape]
    expected = set(ANALYSES) - ({"alignment"} if shape != "both" else set())
    assert set(inspection.results) == expected
    assert not inspection.skipped
    ids = {
        a.get("id") for tag, a in Page((folder / "report.html").read_text(encoding="utf-8")).tags if tag == "section"
    }
    assert ids == expected
    content = json.loads((folder / "inspection.json").read_text(encoding="utf-8"))
    assert expected <= set(content) and content["nonfinite"] is None
    assert all(path.is_file() and path.stat().st_size for path in paths)
    pictures = [path for path in paths if path.suffix == ".png"]
    assert len(pictures) >= 9 and all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    with np.load(folder / "attention.npz") as weights:
        maps = inspection["attention"].maps
        assert len(weights) == len(maps)
        np.testing.assert_array_equal(weights[f"{maps[0].kind}.{maps[0].layer}"], maps[0].weights)
    assert inspection["ablation"].head == 2 and inspection["attention"].maps[0].heads == (2,)


def test_the_summary_has_a_line_for_each_analysis(inspections):
    content = str(inspections["both"][0])
    for words in (
        "next token after",
        "loss:",
        "notable heads",
        "target ← source with the highest weight",
        "attribution of",
        "without",
    ):
        assert words in content


def test_both_languages(inspections):
    inspection = inspections["decoder"][0]
    chinese = inspection.html("zh")
    assert "注意力" in chinese and "各词元的损失" in chinese and "Loss of each token" not in chinese
    assert "Loss of each token" in inspection.html("en")


ENGLISH = (
    "nats per token",
    "highest loss",
    "notable heads",
    "attends to",
    "attention sink",
    "number of heads",
    "gradients of",
    "million",
)


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_the_chinese_report_has_no_english_sentence(inspections, shape):
    inspection, _, _ = inspections[shape]
    english, chinese = (" ".join(Page(inspection.html(language)).text) for language in ("en", "zh"))
    assert [words for words in ENGLISH if words in chinese] == []
    assert sum(words in english for words in ENGLISH) >= 4, "the words are those of the report"


def test_every_result_has_notebook_html(inspections):
    inspection = inspections["both"][0]
    for result in (*inspection.results.values(), inspection):
        text = result._repr_html_()
        page = Page(text)
        assert "script" not in {tag for tag, _ in page.tags}
        assert not any("onerror" in attributes for _, attributes in page.tags)
        assert json.dumps(result.to_dict(), allow_nan=False)
        assert str(result)


def test_every_result_saves_a_figure(inspections, tmp_path):
    for name, result in inspections["both"][0].results.items():
        if name != "costs":
            assert result.save(tmp_path / f"{name}.svg").read_text(encoding="utf-8").count("<svg") == 1
    with pytest.raises(BadSetting, match="must be a .png, .svg or .pdf file, got 'a.jgp'"):
        result = inspections["both"][0]["lens"]
        result.save(tmp_path / "a.jgp")
    with pytest.raises(BadFile, match="must be a path that can be written"):
        (tmp_path / "file").write_text("x")
        result.save(tmp_path / "file" / "a.png")
    with pytest.raises(BadSetting, match="there is no figure of a dict"):
        plot({})


def test_unsupported_analyses_are_skipped_with_the_reason(make_model):
    inspection = headwater.inspect(make_model("encoder", head=NoHead()), "hello")
    assert "needs a language-modeling head" in inspection.skipped["lens"]
    assert {"attention", "heads", "positions", "gradients", "costs"} <= set(inspection.results)
    with pytest.raises(KeyError, match="needs a language-modeling head"):
        inspection["lens"]
    with pytest.raises(BadInput, match="needs a language-modeling head"):
        headwater.inspect(make_model("encoder", head=NoHead()), "hello", analyses=["lens"])
    labelled = make_model("encoder", head=ClassificationHead(2))
    assert headwater.inspect(labelled, "hello", analyses=["attribution"])["attribution"].output in ("0", "1")
    with pytest.raises(BadSetting, match="there is no analysis 'atention'; did you mean 'attention'"):
        headwater.inspect(labelled, "hello", analyses=["atention"])


def test_a_long_text_skips_gradients_unless_requested(causal_lm):
    inspection = headwater.inspect(causal_lm, "long " * 60)
    assert "a text of 300 tokens" in inspection.skipped["gradients"]
    assert inspection.too_long == ("attribution", "gradients")
    assert len(inspection["lens"].positions) == 24
    assert headwater.inspect(causal_lm, "long " * 60, analyses=["gradients"])["gradients"].total_norm > 0


def test_a_broken_model_is_still_reported(make_model):
    model = make_model("decoder")
    model.model.decoder.layers[1].ffn.up.weight.data[0] = float("nan")
    inspection = headwater.inspect(model, "hello", analyses=["attention", "next", "losses"])
    assert (
        inspection.nonfinite.path == "decoder.layers.1.ffn.up"
        and "NaN or infinity first appears in decoder.layers.1.ffn.up" in str(inspection)
    )
    assert json.dumps(inspection.to_dict(), allow_nan=False)
    assert "decoder.layers.1.ffn.up" in inspection.html()


# ------------------------------------------------------------------------------------------------------------- pictures


def test_labels_are_thinned_when_there_are_many():
    few, many = [str(n) for n in range(60)], [str(n) for n in range(2000)]
    assert plot_style.thin_labels(few) == (list(range(60)), few)
    indices, labels = plot_style.thin_labels(many)
    assert len(indices) <= 60 and labels[1] == f"{indices[1]} {indices[1]}"
    assert plot_style.thin_labels(["x" * 40])[1] == ["x" * 13 + "…"]


def test_a_dollar_sign_in_a_token_is_not_a_formula(causal_lm, tmp_path):
    inspection = attention_maps(causal_lm, "$\\frac{1$ $$ \\undefined{")
    save_figure(inspection, tmp_path / "a.png", kind="decoder.self_attn", layer=0, head=0)
    assert Token(0, "$x$").label == "$x$"


def test_a_missing_font_is_reported(monkeypatch):
    monkeypatch.setattr(plot_style, "font_families", lambda: ("DejaVu Sans",))
    assert plot_style.missing_font_notice(["abc"]) == ""
    assert "install fonts-noto-cjk" in plot_style.missing_font_notice(["a", "你"])
    monkeypatch.setattr(plot_style, "font_families", lambda: ("DejaVu Sans", "Noto Sans CJK SC"))
    assert plot_style.missing_font_notice(["你"]) == ""


def test_a_long_text_has_a_figure(causal_lm, tmp_path):
    inspection = attention_maps(causal_lm, "long " * 60, layers=[0], heads=[0], max_bytes=300 * 300 // 4)
    assert inspection.maps[0].pool_size == 2
    figure = plot(inspection, layer=0, head=0)
    ticks = figure.axes[0].get_xticklabels()
    assert 30 <= len(ticks) <= 60
    assert save_figure(inspection, tmp_path / "a.png", layer=0, head=0).stat().st_size > 1000


def test_the_figure_shows_the_weights(causal_lm):
    inspection = attention_maps(causal_lm, "hello")
    figure = plot(inspection, layer=2, head=1)
    np.testing.assert_allclose(
        figure.axes[0].images[0].get_array(), inspection.get_map("decoder.self_attn", 2).head_weights(1), atol=1e-6
    )
    grid = plot(inspection)
    tiles = np.asarray(grid.axes[0].images[0].get_array())
    size = len(inspection.tokens) + 1  # and the gap
    part = tiles[size : 2 * size - 1, size : 2 * size - 1]
    np.testing.assert_array_equal(part, inspection.get_map("decoder.self_attn", 1).tile(1))


@pytest.mark.parametrize("style", ["pre", "post", "sandwich", "alibi", "relative", "xl"])
def test_every_position_encoding_has_a_figure(make_model, style, tmp_path):
    assert position_effects(make_model("decoder", style)).save(tmp_path / "p.png").stat().st_size > 1000


def test_ablation_of_a_named_head(causal_lm):
    assert "without decoder.self_attn 1.2" in str(ablate(causal_lm, "hello", 1, 2))
