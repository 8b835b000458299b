"""headwater show: the table at 80 and 120 columns, JSON, and invalid arguments."""

from __future__ import annotations

import json

import pytest

from headwater import cli
from headwater.families import builders
from headwater.families.presets import PRESETS
from headwater.parts import to_dict


@pytest.fixture
def run_show(capsys, monkeypatch):
    def run(*words, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        code = cli.main(["show", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.parametrize("columns", [80, 120])
def test_base_fits_the_terminal(run_show, columns):
    code, out, err = run_show("base", columns=columns)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= columns
    for words in ("63,082,496", "layers ×6", "4·d_model² + 4·d_model", "37000×512  = encoder.embed.tokens",
                  "d_model 512 · d_ff 2,048", "KV cache", "batch 1, length 1024, fp32", "FLOP"):  # fmt: skip
        assert words in out


def test_every_level_of_the_tree_is_drawn_and_can_be_cut(run_show):
    full, two, none = (run_show("gpt2", *depth)[1] for depth in ((), ("--depth", "2"), ("--depth", "0")))
    assert "│  │  │  ├─ q" in full and "self_attn" in full
    assert "layers ×12" in two and "self_attn" not in two
    assert "decoder  " not in none.partition("parameters  ")[0].splitlines()[-1]
    assert all("124,439,808" in out for out in (full, two, none))


def test_batch_length_and_dtype_change_the_bytes(run_show):
    _, out, _ = run_show("llama-70b", "--batch", "4", "--length", "4096", "--dtype", "bf16")
    assert "batch 4, length 4096, bf16" in out and "138 GB" in out and "5.37 GB" in out


def test_json_has_the_same_values(run_show):
    code, out, _ = run_show("base", "--json", "--vocab", "32000")
    report = json.loads(out)
    assert code == 0 and report["parameters"] == 63_082_496 - 5_000 * 512 == sum(report["groups"].values())
    assert report["tree"]["children"][0]["path"] == "encoder" and report["symbols"]["vocab"] == [32_000]
    assert set(report["bytes"]) == {"weights", "gradients", "optimizer", "activations", "kv_cache"}
    assert report["settings"] == {"batch": 1, "length": 1024, "dtype": "fp32"}


def test_without_a_name_all_presets_are_listed(run_show):
    code, out, _ = run_show()
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(PRESETS)
    assert json.loads(run_show("--json")[1])["gpt2"] == 124_439_808


def test_a_spec_in_a_file(run_show, tmp_path):
    spec = builders.decoder(100, d_model=32, heads=4, layers=2)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(to_dict(spec)), encoding="utf-8")
    code, out, _ = run_show(str(path), "--json")
    assert code == 0 and json.loads(out)["parameters"] == sum(p.numel() for p in spec.build(seed=0).parameters())


def test_chinese(run_show):
    _, out, _ = run_show("mini", "--lang", "zh")
    assert "参数量" in out and "KV 缓存" in out and "1,205,376" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("gpt-2",), 6, "did you mean 'gpt2'?"),
        (("base", "--dtype", "int8"), 2, "dtype must be one of fp32, bf16, fp16, got 'int8'"),
        (("base", "--depth", "-1"), 2, "--depth must be at least 0"),
        (("base", "--batch", "0"), 2, "at least 1"),
        (("gpt2", "--length", "4096"), 4, "has 1024 positions, got 4096"),
        (("base", "--vocab", "0"), 2, "vocab must be at least 1"),
        (("base", "--vocab", "many"), 2, "invalid int"),
        (("base", "--leng", "5"), 2, "--length"),
    ],
)
def test_an_error_is_one_line(run_show, words, code, message):
    exit_code, out, err = run_show(*words)
    assert (exit_code, out) == (code, "") and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must hold a JSON object"),
        ('{"kind": "LayerNorm"}', "must hold a Model, it holds a LayerNorm"),
        ('{"kind": "Modle"}', "did you mean 'Model'?"),
        ('{"kind": "Model", "decoder": {"kind": "Stack", "d_model": 9}}', "Stack cannot be built"),
        ('{"kind": "Model", "a": 1, "a": 2}', "written twice"),
    ],
)
def test_an_invalid_file_is_one_line(run_show, tmp_path, text, message):
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="utf-8")
    code, out, err = run_show(str(path))
    assert code in (2, 5) and out == "" and message in err and err.count("\n") == 1


def test_a_folder_and_a_huge_file_are_rejected(run_show, tmp_path):
    assert "must have a config.json, it has none" in run_show(str(tmp_path))[2]
    path = tmp_path / "weights.json"
    with path.open("wb") as file:
        file.truncate(20 * 2**20)
    assert "is it weights?" in run_show(str(path))[2]
    assert "change it in the file" in run_show(str(path), "--vocab", "5")[2]
