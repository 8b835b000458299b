"""headwater check: exit codes, the table, JSON, and a user's own file."""

from __future__ import annotations

import json

import pytest

from headwater import cli

MODELS = '''
import torch
from torch import nn


class Right(nn.Module):
    """Each token by itself: it cannot see any other token."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids):
        return self.out(self.table(ids))


class Wrong(Right):
    def forward(self, ids):
        x = self.table(ids)
        return self.out(x + x.mean(1, keepdim=True))


ready = Right()
number = 3


def broken():
    raise RuntimeError("no such layer")
'''


@pytest.fixture
def run_check(capsys):
    def run(*words):
        code = cli.main(["check", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODELS, encoding="utf-8")
    return path


def test_a_preset_passes(run_check):
    code, out, err = run_check("mini", "--vocab", "50")
    assert (code, err) == (0, "") and "✓ future" in out and "all laws hold" in out


@pytest.mark.parametrize("name", ["Right", "ready"])
def test_a_users_class_or_model(run_check, file, name):
    code, out, _ = run_check(f"{file}:{name}")
    assert code == 0 and "called as model(ids), causal, 11 tokens" in out and "- padding" in out


def test_a_violated_law_is_exit_code_8(run_check, file):
    code, out, err = run_check(f"{file}:Wrong")
    assert (code, err) == (8, "") and "✗ future" in out and "1 law broken" in out
    assert "changes by" in " ".join(out.split()) and "to do    Mask later keys" in out


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_the_terminal(run_check, file, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert max(map(len, run_check(f"{file}:Wrong")[1].splitlines())) <= columns


def test_json_and_flags(run_check, file):
    code, out, _ = run_check(f"{file}:Wrong", "--json", "--only", "future, batch", "--length", "9", "--probes", "2")
    report = json.loads(out)
    assert code == 8 and not report["ok"] and report["length"] == 9
    assert [v["law"] for v in report["verdicts"]] == ["batch", "future"]
    assert report["verdicts"][1]["key"] in (1, 8) and report["verdicts"][1]["difference"] > 0
    assert run_check(f"{file}:Wrong", "--bidirectional")[0] == 0


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("{file}", 2, ":NAME"),
        ("{file}:Rigth", 6, "did you mean 'Right'?"),
        ("{file}:broken", 5, "it raised RuntimeError: no such layer"),
        ("{file}:number", 5, "it raised TypeError"),
        ("{file}x.py:Right", 6, "no such file"),
        ("nonsense", 6, "must be the name of a preset or a model"),
        ("gpt3", 2, "try a smaller one"),
        ("{file}:Right --only futur", 2, "did you mean 'future'?"),
        ("{file}:Right --length 2", 2, "length at least 4"),
        ("{file}:Right --pad top", 2, "invalid choice"),
    ],
)
def test_an_error_is_one_line(run_check, file, name, code, message):
    exit_code, out, err = run_check(*name.format(file=file).split())
    assert (exit_code, out) == (code, "") and message in err and err.count("\n") == 1, err
