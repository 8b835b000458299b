"""Without the C kernels every verb that runs a model warns once, with the cost and the remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

import headwater.training.evaluate  # noqa: F401 - before load_run is replaced
from headwater import cli
from headwater.cli import kernels
from headwater.cpu import build
from headwater.i18n import use_language

SOURCE = str(Path(build.__file__).parents[2])


@pytest.fixture
def without(monkeypatch):
    """A machine without a compiler, or with the kernels turned off."""

    def plant(why):
        monkeypatch.setattr(build, "unavailable_reason", lambda: why)
        kernels.reported.clear()

    yield plant
    kernels.reported.clear()


NO_COMPILER = "it needs a C compiler, and there is no cc, gcc or clang; install one (apt-get install gcc)"
OFF = "HEADWATER_FAST=0 turns it off"


@pytest.mark.parametrize(
    ("why", "lang", "words"),
    [
        (NO_COMPILER, "en", ["no C compiler found: running on torch alone, several times", "6 x", "install gcc"]),
        (NO_COMPILER, "zh", ["找不到 C 编译器：只用 torch 运行，慢数倍", "约慢 6 倍", "请安装 gcc"]),
        (OFF, "en", ["HEADWATER_FAST=0 turns the C kernels off: running on torch alone", "unset HEADWATER_FAST"]),
        (OFF, "zh", ["HEADWATER_FAST=0 关闭了 C 内核", "请取消 HEADWATER_FAST"]),
        ("the compiler refused step.c", "en", ["not compiled (the compiler refused step.c): running on torch alone"]),
        ("the compiler refused step.c", "zh", ["C 内核没有编译成功（the compiler refused step.c）：只用 torch"]),
    ],
)  # fmt: skip
def test_missing_kernels_are_warned_of_once(without, capsys, monkeypatch, why, lang, words):
    monkeypatch.setenv("HEADWATER_LANG", lang)
    without(why)
    with use_language(lang):
        for _ in range(3):
            kernels.warn_missing()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and all(word in captured.err for word in words)
    assert cli.main(["doctor", "--no-speed"]) in (0, 7)
    printed = capsys.readouterr().out
    assert ("C kernels" in printed or "C 内核" in printed) and all(word in printed for word in words)


def test_no_warning_where_kernels_are_available(without, capsys):
    without("")
    kernels.warn_missing()
    assert capsys.readouterr().err == ""
    cli.main(["doctor", "--no-speed", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["backends"]["C kernels"] is True and not any(
        "torch alone" in f["message"] for f in report["findings"]
    )


def test_the_words_are_those_of_the_build(monkeypatch, tmp_path):
    """The planted reasons are those of the build, without a compiler and with HEADWATER_FAST=0."""
    script = "from headwater.cpu.build import unavailable_reason; from headwater.cli.kernels import missing_kernels; "
    script += "print(unavailable_reason(), missing_kernels().reason, sep='|')"
    for more, why in (
        ({"PATH": str(tmp_path)}, "no C compiler found"),
        ({"HEADWATER_FAST": "0"}, "HEADWATER_FAST=0 turns"),
    ):
        settings = {name: value for name, value in os.environ.items() if name not in ("CC", "HEADWATER_FAST")}
        settings |= {"PYTHONPATH": SOURCE, **more}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=settings, check=True)
        assert done.stdout.split("|")[1].startswith(why)


@pytest.mark.parametrize(
    "words",
    [["generate", "any", "ab"], ["chat", "any"], ["classify", "RUN", "ab"], ["translate", "RUN", "ab"],
     ["tag", "RUN", "ab"], ["eval", "RUN", "nowhere.tsv"], ["embed", "any", "ab"]],
    ids=lambda words: words[0],
)  # fmt: skip
def test_verbs_that_run_a_model_warn_of_missing_kernels(without, capsys, monkeypatch, words):
    class Announced(Exception):
        pass

    def stop():
        raise Announced

    class Run:
        columns = MappingProxyType({})
        task = {"classify": "classification", "translate": "seq2seq", "tag": "token-classification"}.get(words[0])

    monkeypatch.setattr("headwater.families.load.load", lambda name: None)
    monkeypatch.setattr("headwater.training.predict.load_run", lambda folder: Run())
    monkeypatch.setattr(kernels, "warn_missing", stop)
    with pytest.raises(Announced):
        cli.main(words)


def test_train_warns_of_missing_kernels_in_its_report(without, capsys, tmp_path):
    (tmp_path / "pairs.tsv").write_text("".join(f"number {n}\t{n}\n" for n in range(60)))
    without(NO_COMPILER)
    assert cli.main(["train", str(tmp_path / "pairs.tsv"), "--dry-run", "--size", "xs", "--max-steps", "2"]) == 0
    assert capsys.readouterr().err.count("no C compiler found") == 1


def test_a_failed_compilation_is_reported_at_the_end(without, capsys, monkeypatch):
    """Kernels are compiled on first use; a failure is known only afterwards."""
    without("")

    def fails(*args, **how):
        monkeypatch.setattr(build, "unavailable_reason", lambda: "fast could not be compiled: cc says error")
        return type("Answer", (), {"text": "x"})()

    monkeypatch.setattr("headwater.families.load.load", lambda name: None)
    monkeypatch.setattr("headwater.generation.api.generate", fails)
    assert cli.main(["generate", "any", "ab", "--no-stream"]) == 0
    assert capsys.readouterr().err.count("C kernels were not compiled (fast could not be compiled: cc says error)") == 1
