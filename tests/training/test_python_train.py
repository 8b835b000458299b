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
from headwater.data.dates import dates_dataset
from headwater.i18n import _, use_language
from headwater.training import loggers
from headwater.training.config import FIELDS, ResumeKwargs, TrainKwargs
from headwater.training.loggers import NotebookDisplay, PlainDisplay, ProgressBar, TerminalDisplay
from headwater.training.run_dir import RunDir
from headwater.training.state import EvalEvent, FinalEvalEvent, NoteEvent, StopEvent, StopReason

TINY = {"size": "xs", "max_steps": 3, "batch_tokens": 300, "eval_examples": 4, "eval_every": 2}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in dates_dataset("train", 400)))
    return path


def test_it_shows_the_plan_and_the_steps(pairs, tmp_path, capsys):
    headwater.train(pairs, out=tmp_path / "run", **TINY)
    said = capsys.readouterr().out
    for words in ("task       seq2seq", "training   3 steps", "evaluation every 2 steps, 4 of", "step 3/3  epoch",
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
        (None, False, PlainDisplay),
        (None, True, TerminalDisplay),
        (ZMQInteractiveShell, False, NotebookDisplay),
        (TerminalInteractiveShell, True, TerminalDisplay),
        (TerminalInteractiveShell, False, PlainDisplay),
    ],
)
def test_each_place_has_its_display(monkeypatch, shell, terminal, kind):
    if shell:
        monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    show = ProgressBar(Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False))
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
    monkeypatch.setattr(loggers.time, "monotonic", lambda: float(next(clock)))
    out = io.StringIO()
    show = ProgressBar(Console(file=out, width=200, highlight=False, force_jupyter=False))
    show(step(1, 5.0))
    show(step(2, 4.0))
    assert len(screen(out.getvalue())) == 1 and screen(out.getvalue())[0].startswith("step 2/10")
    show(NoteEvent(2, "short"))
    show(step(3, 3.0))
    show(EvalEvent(3, {"loss": 1.0}, (), True, 1.0))
    show(step(10, 2.0))
    show(FinalEvalEvent(3, 400, {"loss": 0.5}, 1.0))
    show(StopEvent(10, StopReason.FINISHED, 1.0))
    lines = [line for line in screen(out.getvalue()) if line]
    assert lines == ["note short", "step 3  loss 1  best so far", "best model (step 3), 400 validation rows  loss 0.5"]
    show(step(10, 2.0))
    show(StopEvent(10, StopReason.FINISHED, 1.0))
    assert [line for line in screen(out.getvalue()) if line][-1].startswith("step 10/10"), "the last line stays"
    assert "\x1b" not in out.getvalue()


def test_a_note_is_said_in_the_language_it_is_asked_for_in():
    note = _("resumed at step {step}", step=7)
    for name, words in (("en", "note resumed at step 7"), ("zh", "注意 从第 7 步接着训练")):
        out = io.StringIO()
        with use_language(name):
            ProgressBar(Console(file=out, width=200))(NoteEvent(1, note))
        assert out.getvalue().strip() == words


# ------------------------------------------------------------------------------------------------- help and completion


KEYWORDS = [(headwater.train, TrainKwargs), (headwater.resume, ResumeKwargs)]


@pytest.mark.parametrize(("function", "kwargs"), KEYWORDS)
def test_help_lists_every_setting_with_type_default_and_meaning(function, kwargs):
    lines = [line.strip(" |") for line in pydoc.plain(pydoc.render_doc(function)).splitlines()]
    for name, leaf in FIELDS.items():
        if name in get_type_hints(kwargs):
            (line,) = (line for line in lines if line.startswith(f"{name} ("))
            kind = re.escape(line[len(name) + 2 :].split(", default ")[0])
            assert re.fullmatch(f"{name} \\({kind}, default {re.escape(repr(leaf.default))}\\): .+", line), line
            assert line.endswith(leaf.description)


@pytest.mark.parametrize(("function", "kwargs"), KEYWORDS)
def test_every_setting_can_be_completed(function, kwargs):
    """Notebooks ask for the signature."""
    parameters = inspect.signature(function).parameters
    assert not [p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name, leaf in FIELDS.items():
        if name in get_type_hints(kwargs):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY and parameters[name].default == leaf.default


def test_editors_know_every_setting_and_its_type():
    """The TypedDicts are written out, since editors do not run code; they must agree with the settings."""
    types = {"N": int, "X": float, "TIME": str | float, "yes|no": bool, "yes|no|auto": str}
    types |= {"FILE": str | list[str], "A=B": str | dict[str, str]}
    found = get_type_hints(TrainKwargs)
    assert set(found) == set(FIELDS) - {"paths"}
    assert set(get_type_hints(ResumeKwargs)) == {name for name, field in FIELDS.items() if field.mutable}
    for name, hint in found.items():
        metavar = FIELDS[name].type.metavar
        assert hint in ((str, str | Path) if metavar == "NAME" else (types[metavar],)), name


def test_a_config_may_be_given_as_an_object(pairs, tmp_path):
    config = headwater.TrainConfig(**TINY)
    trained = headwater.train(pairs, out=tmp_path / "run", config=config, max_steps=2, quiet=True)
    assert trained.result.state.step == 2 and RunDir.open(tmp_path / "run").load_config().size == config.size
