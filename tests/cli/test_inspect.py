"""headwater inspect: a run inspected from the command line."""

from __future__ import annotations

import json

import pytest
import torch

import headwater
from headwater.cli import main
from headwater.families.builders import decoder
from headwater.text.train import train_tokenizer
from headwater.weights.native import save_native


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A language model of a run's layout, with a byte-level tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_tokenizer(["the cat sat on the mat", "你好 world"] * 20, vocab_size=300)
    torch.manual_seed(0)
    model = decoder(len(tokenizer), d_model=16, heads=2, layers=2, position="rotary", norm_position="pre").build(seed=0)
    save_native(folder / "model", model, {"task": "language-model"})
    tokenizer.save(folder / "model")
    (folder / "config.yaml").write_text("data: {}\n")
    return folder


def test_it_prints_a_summary(run, capsys):
    assert main(["inspect", str(run), "the cat 你好"]) == 0
    out = capsys.readouterr().out
    for words_ in ("decoder-only", "input tokens", "next token after", "perplexity", "notable heads", "--out DIR"):
        assert words_ in out


def test_inspect_writes_a_folder_and_prints_its_path(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEADWATER_LANG", "en")  # which --lang changes, for child processes too
    out = tmp_path / "seen"
    assert (
        main(
            ["inspect", str(run), "the cat", "--out", str(out), "--lang", "zh", "--analyses", "next,attention", "--svg"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "已写出" in printed and "report.html" in printed
    assert {path.name for path in out.iterdir()} == {
        "report.html", "inspection.json", "next.svg", "attention.decoder.self_attn.svg", "attention.npz"
    }  # fmt: skip
    assert "注意力" in (out / "report.html").read_text(encoding="utf-8")


def test_json_has_all_results(run, capsys):
    assert main(["inspect", str(run), "the cat", "--json", "--layer", "1", "--head", "0"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ablation"]["head"] == 0 and [m["layer"] for m in result["attention"]["maps"]] == [1]
    rows = result["attention"]["maps"][0]["weights"][0]
    assert all(sum(row) == pytest.approx(1, abs=1e-4) for row in rows)
    probs = [candidate["prob"] for candidate in result["next"]["candidates"]]
    from headwater.cli.inspect import load_model

    same = headwater.inspection.next_tokens(load_model(str(run)), "the cat")
    assert probs == pytest.approx([candidate.prob for candidate in same.candidates], rel=1e-5), (
        "the same numbers as in Python"
    )


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--analyses", "lense"], 2, "there is no analysis 'lense'; did you mean 'lens'"),
        (["--head", "1"], 2, "--head needs --layer"),
        (["--layer", "7"], 2, "layer must be from 0 to 1, got 7"),
        (["--target", "x"], 3, "only an encoder-decoder has a target"),
        (["--analyses", "alignment"], 3, "the model must be an encoder-decoder"),
    ],
)
def test_an_error_is_one_line(run, capsys, words, code, message):
    assert main(["inspect", str(run), "the cat", *words]) == code
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(("lang", "words"), [("en", "request it by name"), ("zh", "已略过这项分析")])
def test_analyses_skipped_for_length_are_listed(run, capsys, monkeypatch, lang, words):
    monkeypatch.setenv("HEADWATER_LANG", "en")  # which --lang changes
    assert main(["inspect", str(run), "the cat " * 200, "--lang", lang]) == 0
    assert capsys.readouterr().out.count(words) == 2, "attribution and gradients"


def test_control_characters_are_escaped(run, capsys):
    assert main(["inspect", str(run), "the \x1b[31m cat", "--analyses", "losses"]) == 0
    assert "\x1b" not in capsys.readouterr().out
