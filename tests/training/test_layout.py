"""A terminal of 40 columns shows the step and the time left; lines break between words, never in one."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from headwater.i18n import use_language
from headwater.training.loggers import ProgressBar
from headwater.training.state import EvalEvent, StepEvent, StopEvent, StopReason

SAMPLE = {"input": "a really long sentence with many words in it", "output": "extraordinarily", "expected": "something"}


def seen(width, *events, terminal=True, lang="en"):
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=terminal,
        color_system=None,
        highlight=False,
        soft_wrap=True,
        legacy_windows=False,
    )
    with use_language(lang):
        show = ProgressBar(console)
        for event in events:
            show(event)
    return [line.rstrip() for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", out.getvalue()))]


def step(number, steps=12_000):
    return StepEvent(number, steps, 0.5, 1.25, 1e-3, 1.0, 100, 50, 0.1, np.arange(2), True)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_step_and_time_left_are_seen_first(width, lang):
    evaluated = EvalEvent(11_000, {"loss": 1.0}, (), False, 1.0)
    lines = seen(width, step(10_999), step(11_000), evaluated, StopEvent(11_000, StopReason.TIME_LIMIT, 1.0), lang=lang)
    bars = [line for line in lines if "/12000" in line]
    left = {"en": r"\S+ left", "zh": r"还剩 \S+"}[lang]
    assert bars and all(len(line) <= width for line in bars)
    assert all(re.match(rf"(\S )?\d+/12000 {left}", line) for line in bars)
    assert any("loss 1.25" in line for line in bars), "and the loss, whole"
    assert any("tok/s" in line or "词元/秒" in line for line in bars) == (width > 60)


@pytest.mark.parametrize("width", [40, 80])
def test_a_sample_is_wrapped_at_words(width):
    lines = seen(width, EvalEvent(5, {"loss": 1.0, "accuracy": 50.0, "macro_f1": 40.0}, (SAMPLE,), True, 1.0))
    words = (
        "step 5 loss 1 accuracy 50 macro_f1 40 best so far ≠ "
        + SAMPLE["input"]
        + " → extraordinarily (expected something)"
    )
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines).split() == words.split(), "no word is broken"


def test_a_file_gets_whole_lines():
    lines = seen(40, EvalEvent(5, {"loss": 1.0}, (SAMPLE,), True, 1.0), terminal=False)
    assert any(line.endswith("(expected something)") and SAMPLE["input"] in line for line in lines)
