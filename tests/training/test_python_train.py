"""headwater.train in Python: it shows what it does, and tells help() and editors of every setting."""

from __future__ import annotations

import builtins
import inspect
import io
import pydoc
import re
from pathlib import Path
from typing import get_type_hints

import pytest
from rich.console import Console
from tests.training.test_progress import step

import headwater
from headwater.data.dates import dates
from headwater.data.telling import english
from headwater.i18n import translate
from headwater.training import progress
from headwater.training.events import Evaluated, FinalEvaluated, Noted, Stopped
from headwater.training.progress import Bar, Lines, NotebookLine, Show
from headwater.training.settings import LEAVES, Time

TINY = {"size": "xs", "max_steps": 3, "batch_tokens": 300, "eval_rows": 4, "eval_every": 2}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates("train", 400)))
    return path


def test_it_shows_the_plan_and_the_steps(pairs, tmp_path, capsys):
    headwater.train(pairs, out=tmp_path / "run", **TINY)
    said = capsys.readouterr().out
    for words in ("task       text-to-text", "training   3 steps", "evaluation every 2 steps, 4 of", "step 3/3  epoch",
                  "step 2  loss", "best so far"):  # fmt: skip
        assert words in said, words
    headwater.resume(tmp_path / "run", max_steps=4)
    assert "step 4/4" in capsys.readouterr().out


def test_quiet_is_silent(pairs, tmp_path, capsys):
    headwater.train(pairs, out=tmp_path / "run", quiet=True, **TINY)
    headwater.resume(tmp_path / "run", quiet=True, max_steps=4)
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------- where it is shown


class ZMQInteractiveShell:
    """What IPython calls the shell of a notebook."""


class TerminalInteractiveShell:
    """And that of a terminal."""


@pytest.mark.parametrize(
    ("shell", "terminal", "kind"),
    [
        (None, False, Lines),
        (None, True, Bar),
        (ZMQInteractiveShell, False, NotebookLine),
        (TerminalInteractiveShell, True, Bar),
        (TerminalInteractiveShell, False, Lines),
    ],
)
def test_each_place_has_its_display(monkeypatch, shell, terminal, kind):
    if shell:
        monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    show = Show(Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False))
    assert type(show.display) is kind


def screen(written):
    """What a notebook shows of a stream: a carriage return goes back to the start of the line."""
    lines = []
    for line in written.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def test_a_notebook_has_one_line_that_changes(monkeypatch):
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    show = Show(Console(file=out, width=200, highlight=False, force_jupyter=False))
    show(step(1, 5.0))
    show(step(2, 4.0))
    assert len(screen(out.getvalue())) == 1 and screen(out.getvalue())[0].startswith("step 2/10")
    show(Noted(2, "short"))
    show(step(3, 3.0))
    show(Evaluated(3, {"loss": 1.0}, (), True, 1.0))
    show(step(10, 2.0))
    show(FinalEvaluated(3, 400, {"loss": 0.5}, 1.0))
    show(Stopped(10, "finished", 1.0))
    lines = [line for line in screen(out.getvalue()) if line]
    assert lines == ["note short", "step 3  loss 1  best so far", "best model (step 3), 400 validation rows  loss 0.5"]
    show(step(10, 2.0))
    show(Stopped(10, "finished", 1.0))
    assert [line for line in screen(out.getvalue()) if line][-1].startswith("step 10/10"), "the last line stays"
    assert "\x1b" not in out.getvalue()


def test_a_note_is_said_in_the_language_it_is_asked_for_in():
    def chinese(en, zh=None):
        return translate(en, "zh") if zh is None else zh

    for say, words in ((english, "note resumed at step 7"), (chinese, "注意 从第 7 步接着训练")):
        out = io.StringIO()
        Show(Console(file=out, width=200), say)(Noted(1, "resumed at step 7"))
        assert out.getvalue().strip() == words


# ------------------------------------------------------------------------------------------------- help and completion


@pytest.mark.parametrize("function", [headwater.train, headwater.resume])
def test_help_lists_every_setting_with_type_default_and_meaning(function):
    lines = [line.strip(" |") for line in pydoc.plain(pydoc.render_doc(function)).splitlines()]
    for name, leaf in LEAVES.items():
        if name != "paths":
            (line,) = (line for line in lines if line.startswith(f"{name} ("))
            kind = re.escape(line[len(name) + 2 :].split(", default ")[0])
            assert re.fullmatch(f"{name} \\({kind}, default {re.escape(repr(leaf.default))}\\): .+", line), line
            assert line.endswith(leaf.words[0])


@pytest.mark.parametrize("function", [headwater.train, headwater.resume])
def test_every_setting_can_be_completed(function):
    """Notebooks ask for the signature."""
    parameters = inspect.signature(function).parameters
    assert not [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name, leaf in LEAVES.items():
        if name != "paths":
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and parameters[name].default == leaf.default


def test_editors_know_every_setting_and_its_type():
    """The TypedDict is written out, since editors do not run code; it must agree with settings.py."""
    from headwater.training.keywords import TrainSettings

    kinds = {Time: str | float, list[str]: str | list[str], dict[str, str]: str | dict[str, str]}
    wanted = {name: leaf.kind for name, leaf in LEAVES.items() if name != "paths"}
    found = get_type_hints(TrainSettings)
    assert list(found) == list(wanted)
    for name, kind in wanted.items():
        words = isinstance(kind, type) and issubclass(kind, str)
        assert found[name] in ((str, str | Path) if words else (kinds.get(kind, kind),)), name
