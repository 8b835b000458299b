"""Pictures, JSON and the report: of every result, of every shape, with nothing fetched and no text obeyed."""

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
def written(translator, writer, filler, tmp_path_factory):
    """All three shapes, inspected with hostile text: the results and the folder of each."""
    made = {}
    for name, model, target in (("both", translator, HOSTILE), ("decoder", writer, None), ("encoder", filler, None)):
        folder = tmp_path_factory.mktemp(name)
        found = headwater.inspect(model, HOSTILE + " <mask>", target, layer=1, head=2)
        made[name] = found, folder, found.write(folder)
    return made


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_the_report_stands_alone_and_obeys_no_text(written, shape):
    _, folder, _ = written[shape]
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
    assert "<img src=x onerror=alert()>" in "".join(page.text), "it is shown as text"


def test_a_fragment_that_does_not_escape_would_be_seen():
    page = Page(f"<p>{HOSTILE}</p>")
    assert any("onerror" in attributes for _, attributes in page.tags)


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_all_sections_are_there(written, shape):
    found, folder, paths = written[shape]
    expected = set(ANALYSES) - ({"alignment"} if shape != "both" else set())
    assert set(found.results) == expected
    assert not found.skipped
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
        kept = found["attention"].maps
        assert len(weights) == len(kept)
        np.testing.assert_array_equal(weights[f"{kept[0].kind}.{kept[0].layer}"], kept[0].weights)
    assert found["ablation"].head == 2 and found["attention"].maps[0].heads == (2,)


def test_the_words_tell_what_a_reader_asks(written):
    content = str(written["both"][0])
    for said in (
        "next token after",
        "surprise:",
        "notable heads",
        "written ← looked at most",
        "what made it say",
        "without",
    ):
        assert said in content


def test_both_languages(written):
    found = written["decoder"][0]
    chinese = found.html("zh")
    assert "注意力" in chinese and "逐词元的意外程度" in chinese and "Loss of each token" not in chinese
    assert "Loss of each token" in found.html("en")


ENGLISH = (
    "surprise:",
    "least expected",
    "notable heads",
    "looks at",
    "rests on",
    "how many",
    "gradients of",
    "million",
)


@pytest.mark.parametrize("shape", ["both", "decoder", "encoder"])
def test_the_chinese_report_has_no_english_sentence(written, shape):
    found, _, _ = written[shape]
    english, chinese = (" ".join(Page(found.html(language)).text) for language in ("en", "zh"))
    assert [words for words in ENGLISH if words in chinese] == []
    assert sum(words in english for words in ENGLISH) >= 4, "the words looked for are those of the report"


def test_every_result_shows_itself_in_a_notebook(written):
    found = written["both"][0]
    for result in (*found.results.values(), found):
        text = result._repr_html_()
        page = Page(text)
        assert "script" not in {tag for tag, _ in page.tags}
        assert not any("onerror" in attributes for _, attributes in page.tags)
        assert json.dumps(result.to_dict(), allow_nan=False)
        assert str(result)


def test_every_result_saves_itself(written, tmp_path):
    for name, result in written["both"][0].results.items():
        if name != "costs":
            assert result.save(tmp_path / f"{name}.svg").read_text(encoding="utf-8").count("<svg") == 1
    with pytest.raises(BadSetting, match="must end in .png, .svg or .pdf, got 'a.jgp'"):
        result = written["both"][0]["lens"]
        result.save(tmp_path / "a.jgp")
    with pytest.raises(BadFile, match="must be a path that can be written"):
        (tmp_path / "file").write_text("x")
        result.save(tmp_path / "file" / "a.png")
    with pytest.raises(BadSetting, match="there is no picture of a dict"):
        plot({})


def test_what_a_model_cannot_show_is_left_out_with_the_reason(make):
    found = headwater.inspect(make("encoder", head=NoHead()), "hello")
    assert "needs a head that says tokens" in found.skipped["lens"]
    assert {"attention", "heads", "positions", "gradients", "costs"} <= set(found.results)
    with pytest.raises(KeyError, match="needs a head that says tokens"):
        found["lens"]
    with pytest.raises(BadInput, match="needs a head that says tokens"):
        headwater.inspect(make("encoder", head=NoHead()), "hello", analyses=["lens"])
    labelled = make("encoder", head=ClassificationHead(2))
    assert headwater.inspect(labelled, "hello", analyses=["attribution"])["attribution"].output in ("0", "1")
    with pytest.raises(BadSetting, match="there is no analysis 'atention'; did you mean 'attention'"):
        headwater.inspect(labelled, "hello", analyses=["atention"])


def test_a_long_text_skips_gradients_unless_requested(writer):
    found = headwater.inspect(writer, "long " * 60)
    assert "left out for 300 tokens" in found.skipped["gradients"]
    assert len(found["lens"].positions) == 24
    assert headwater.inspect(writer, "long " * 60, analyses=["gradients"])["gradients"].total_norm > 0


def test_a_broken_model_is_still_reported(make):
    model = make("decoder")
    model.model.decoder.layers[1].ffn.up.weight.data[0] = float("nan")
    found = headwater.inspect(model, "hello", analyses=["attention", "next", "losses"])
    assert (
        found.nonfinite.path == "decoder.layers.1.ffn.up"
        and "NaN or inf arises first in decoder.layers.1.ffn.up" in str(found)
    )
    assert json.dumps(found.to_dict(), allow_nan=False)
    assert "decoder.layers.1.ffn.up" in found.html()


# ------------------------------------------------------------------------------------------------------------- pictures


def test_labels_are_thinned_when_there_are_many():
    few, many = [str(n) for n in range(60)], [str(n) for n in range(2000)]
    assert plot_style.thin_labels(few) == (list(range(60)), few)
    at, shown = plot_style.thin_labels(many)
    assert len(at) <= 60 and shown[1] == f"{at[1]} {at[1]}"
    assert plot_style.thin_labels(["x" * 40])[1] == ["x" * 13 + "…"]


def test_a_formula_in_a_token_is_no_formula(writer, tmp_path):
    found = attention_maps(writer, "$\\frac{1$ $$ \\undefined{")
    save_figure(found, tmp_path / "a.png", kind="decoder.self_attn", layer=0, head=0)
    assert Token(0, "$x$").label == "$x$"


def test_a_missing_font_is_reported(monkeypatch):
    monkeypatch.setattr(plot_style, "font_families", lambda: ("DejaVu Sans",))
    assert plot_style.missing_font_notice(["abc"]) == ""
    assert "install fonts-noto-cjk" in plot_style.missing_font_notice(["a", "你"])
    monkeypatch.setattr(plot_style, "font_families", lambda: ("DejaVu Sans", "Noto Sans CJK SC"))
    assert plot_style.missing_font_notice(["你"]) == ""


def test_a_long_text_has_a_picture(writer, tmp_path):
    found = attention_maps(writer, "long " * 60, layers=[0], heads=[0], max_bytes=300 * 300 // 4)
    assert found.maps[0].pool_size == 2
    figure = plot(found, layer=0, head=0)
    ticks = figure.axes[0].get_xticklabels()
    assert 30 <= len(ticks) <= 60
    assert save_figure(found, tmp_path / "a.png", layer=0, head=0).stat().st_size > 1000


def test_what_the_picture_shows_is_the_weights(writer):
    found = attention_maps(writer, "hello")
    figure = plot(found, layer=2, head=1)
    np.testing.assert_allclose(
        figure.axes[0].images[0].get_array(), found.get_map("decoder.self_attn", 2).head_weights(1), atol=1e-6
    )
    grid = plot(found)
    tiles = np.asarray(grid.axes[0].images[0].get_array())
    size = len(found.tokens) + 1  # and the gap
    part = tiles[size : 2 * size - 1, size : 2 * size - 1]
    np.testing.assert_array_equal(part, found.get_map("decoder.self_attn", 1).tile(1))


@pytest.mark.parametrize("style", ["pre", "post", "sandwich", "alibi", "relative", "xl"])
def test_every_position_has_a_picture(make, style, tmp_path):
    assert position_effects(make("decoder", style)).save(tmp_path / "p.png").stat().st_size > 1000


def test_ablation_of_a_named_head(writer):
    assert "without decoder.self_attn 1.2" in str(ablate(writer, "hello", 1, 2))
