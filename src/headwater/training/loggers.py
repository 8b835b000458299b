"""Loggers of a run, which are callbacks: JSONL files of metrics and samples, and the progress bar (terminal, notebook).

A line of a log is complete once its newline is there.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from headwater.data.step_metrics import MetricMeans
from headwater.i18n import _, language, translated
from headwater.training.state import CheckpointEvent, EvalEvent, Event, FinalEvalEvent, NoteEvent, StepEvent, StopEvent

# ------------------------------------------------------------------------------------------- layout of the progress bar

WIDE_TERMINAL = 112  # columns that show everything
MEDIUM_TERMINAL = 72  # everything but the bar and the elapsed time


class StepStatsColumn(ProgressColumn):
    """The first `count` statistics of a step, separated by two spaces: loss, speed, learning rate, norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def render(self, task: Task) -> Text:
        return Text("  ".join(task.fields["stats"].split("  ")[: self.count]), no_wrap=True)


class TimeLeftColumn(TimeRemainingColumn):
    """The estimated remaining time, in the language in effect when the bar is built: a thread of its own renders it."""

    def __init__(self) -> None:
        super().__init__()
        self.language = language()

    def render(self, task: Task) -> Text:
        remaining = super().render(task)
        text = _("{in_words} left", in_words=remaining.plain)
        return Text(translated(text, self.language), style=remaining.style)


def build_progress_bar(console: Console) -> Progress:
    """Step and time left come first; a narrow terminal shows them and the loss, a wide one everything."""
    step = TextColumn("{task.completed}/{task.total}")
    first = (step, TimeLeftColumn())
    columns: tuple[ProgressColumn, ...]
    if console.width >= WIDE_TERMINAL:
        columns = (SpinnerColumn(), *first, BarColumn(bar_width=16), StepStatsColumn(4), TimeElapsedColumn())
    elif console.width >= MEDIUM_TERMINAL:
        columns = (*first, StepStatsColumn(3))
    else:
        columns = (*first, StepStatsColumn(1))
    return Progress(*columns, console=console, transient=True)


def wrap_markup(markup: str, console: Console, indent: int = 5) -> Text:
    """A line wrapped at words, with indented continuation; one line where the output is no terminal."""
    text = Text.from_markup(markup)
    if not console.is_terminal:
        return text
    first, *rest = text.wrap(console, console.width - indent) or [text]
    return Text("\n" + " " * indent).join([first, *rest])


# -------------------------------------------------------------------------------------------------------- JSONL loggers


class JsonlLogger:
    """Appends JSON lines, each written at once, so that they survive a killed run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    def write(self, **record: Any) -> None:
        text = to_json_line(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # it may have been deleted meanwhile
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(handle, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(handle)


def to_json_line(record: Mapping[str, Any]) -> str:
    return json.dumps({name: _finite_or_none(value) for name, value in record.items()}, ensure_ascii=False) + "\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The entries of a log; a truncated last line, or one that is no entry, is left out."""
    entries = []
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if line.endswith(b"\n") and isinstance(entry, dict) and type(entry.get("step")) is int:
            entries.append(entry)
    return entries


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(value: float) -> float | None:
    """Five significant digits, enough for plots."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


class MetricsLogger(JsonlLogger):
    """Logs every n-th step, each evaluation, notes and the stop reason to metrics.jsonl."""

    def __init__(self, path: Path, every: int) -> None:
        super().__init__(path)
        self.every = every
        self.num_tokens = 0
        self.num_targets = 0
        self.seconds = 0.0
        self.metrics = MetricMeans()

    def __call__(self, event: Event) -> None:
        now = round(time.time(), 3)
        if isinstance(event, StepEvent):
            self.metrics.update(event.metrics)
            self.num_tokens, self.num_targets = self.num_tokens + event.num_tokens, self.num_targets + event.num_targets
            self.seconds += event.seconds
            if event.step % self.every == 0 or event.step == event.total_steps or not event.applied:
                tokens, targets = (round(n / max(self.seconds, 1e-9)) for n in (self.num_tokens, self.num_targets))
                self.write(
                    step=event.step,
                    split="train",
                    epoch=round(event.epoch, 4),
                    loss=event.loss,
                    lr=event.lr,
                    grad_norm=event.grad_norm,
                    tokens_per_second=tokens,
                    targets_per_second=targets,
                    applied=event.applied,
                    **{name: _rounded(value) for name, value in self.metrics.take().items()},
                    time=now,
                    grad_norms={layer: _rounded(norm) for layer, norm in event.layer_grad_norms.items()},
                )
                self.num_tokens = 0
                self.num_targets = 0
                self.seconds = 0.0
        elif isinstance(event, EvalEvent):
            scores = {name: _finite_or_none(value) for name, value in event.metrics.items()}
            self.write(step=event.step, split="valid", **scores, best=event.is_best, time=now)
        elif isinstance(event, FinalEvalEvent):
            scores = {name: _finite_or_none(value) for name, value in event.metrics.items()}
            self.write(step=event.step, split="final", **scores, best=True, num_examples=event.num_examples, time=now)
        elif isinstance(event, NoteEvent):
            self.write(step=event.step, note=event.text, time=now)
        elif isinstance(event, StopEvent):
            self.write(step=event.step, stop_reason=str(event.reason), seconds=round(event.seconds, 1), time=now)


class SampleLogger(JsonlLogger):
    """Logs the samples of each evaluation to samples.jsonl."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, EvalEvent):
            for sample in event.samples:
                self.write(step=event.step, **sample)


class OrderLogger(JsonlLogger):
    """Logs the examples of each step, in their order."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.write(step=event.step, examples=event.examples.tolist())


# --------------------------------------------------------------------------------------------------------- progress bar

SHOWN_METRICS = ("reward", "kl", "accuracy", "margin")  # of a task on preferences or rewards
LINE_INTERVAL = 10.0  # seconds between plain lines
NEW_STEP_WEIGHT = 0.05  # weight of the newest step in the moving averages


class ProgressBar:
    """Shows steps and evaluations. Speed and loss are moving averages; samples are shown beside their references."""

    name = "progress"

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, force_jupyter=False)
        self.display = select_display(self.console)
        self.loss = 0.0
        self.tokens_per_second = 0.0
        self.steps = 0  # applied
        self.metrics = ""  # of the task, as they were last given

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self._show_step(event)
        elif isinstance(event, EvalEvent):
            self._show_evaluation(event)
        elif isinstance(event, FinalEvalEvent):
            self._show_final_evaluation(event)
        elif isinstance(event, NoteEvent):
            self._print(f"[yellow]{_('note')}[/yellow] {escape(str(event.text))}")
        elif isinstance(event, CheckpointEvent) and event.seconds > LINE_INTERVAL:
            self.display.checkpoint_saved(f"{_('saved')} {escape(event.path)} ({event.seconds:.1f} s)")
        elif isinstance(event, StopEvent):
            self.display.stop()

    def report(self, text: str) -> None:
        """Print lines verbatim; control characters are escaped."""
        self._print(escape("\n".join(shorten_line(line, len(line)) for line in text.splitlines())))

    def _print(self, text: str | Text) -> None:
        self.display.clear()
        self.console.print(text)

    def _show_step(self, event: StepEvent) -> None:
        rate = event.num_tokens / max(event.seconds, 1e-9)
        if event.applied:
            self.steps += 1
            weight = max(1 / self.steps, NEW_STEP_WEIGHT)
            self.loss += weight * (event.loss - self.loss)
            self.tokens_per_second += weight * (rate - self.tokens_per_second)
        metrics = [f"{name} {event.metrics[name]:.3g}  " for name in SHOWN_METRICS if name in event.metrics]
        self.metrics = "".join(metrics) or self.metrics
        speed = f"{self.tokens_per_second:,.0f} {_('tok/s')}"
        self.display.update(
            event, f"loss {self.loss:.3f}  {self.metrics}{speed}  lr {event.lr:.1e}  norm {event.grad_norm:.2f}"
        )

    def _show_final_evaluation(self, event: FinalEvalEvent) -> None:
        scores = "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        what = _("best model (step {step}), {rows:,} validation rows", step=event.step, rows=event.num_examples)
        self._print(wrap_markup(f"[bold]{what}[/bold]  {scores}", self.console))

    def _show_evaluation(self, event: EvalEvent) -> None:
        scores = "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
        best = f"  [green]{_('best so far')}[/green]" if event.is_best else ""
        self._print(wrap_markup(f"[bold]{_('step')} {event.step}[/bold]  {scores}{best}", self.console))
        for sample in event.samples:
            source, output, expected = (shorten_line(sample.get(k, "")) for k in ("input", "output", "expected"))
            mark = " "
            tail = ""
            if output == expected:
                mark = "[green]=[/green]"
            elif expected:
                mark = "[red]≠[/red]"
                tail = f"  [dim]({_('expected')} {escape(expected)})[/dim]"
            line = f"   {mark} {escape(source)}  →  [bold]{escape(output)}[/bold]{tail}"
            self._print(wrap_markup(line, self.console))


# ------------------------------------------------------------------------------------------------------------- displays


class PlainDisplay:
    """No terminal: a line every ten seconds, and at the last step."""

    interval = LINE_INTERVAL

    def __init__(self, console: Console) -> None:
        self.console = console
        self.last_shown = 0.0
        self.start_time = 0.0
        self.first_step = 0  # the first step that was seen

    def update(self, event: StepEvent, stats: str) -> None:
        now = time.monotonic()
        if not self.first_step:
            self.first_step = event.step
            self.start_time = now - event.seconds
        if now - self.last_shown <= self.interval and event.step != event.total_steps:
            return
        self.last_shown = now
        left = (now - self.start_time) / (event.step - self.first_step + 1) * (event.total_steps - event.step)
        left_words = _("{in_words} left", in_words=format_duration(left))
        position = f"{_('step')} {event.step}/{event.total_steps}  {_('epoch')} {event.epoch:.2f}"
        self.write(f"{position}  {stats}  {left_words}")

    def write(self, line: str) -> None:
        self.console.print(line)

    def checkpoint_saved(self, line: str) -> None:
        self.console.print(line)

    def clear(self) -> None:
        """Before another line is printed."""

    def stop(self) -> None:
        """The run has ended."""


class NotebookDisplay(PlainDisplay):
    """A notebook: one line that is rewritten; what is said in between stays above it."""

    interval = 0.5
    width = 0  # characters of the line that is shown

    def write(self, line: str) -> None:
        self.console.file.write("\r" + line.ljust(self.width))
        self.console.file.flush()
        self.width = len(line)

    def checkpoint_saved(self, line: str) -> None:
        """The line continues: a checkpoint is not worth one of its own."""

    def clear(self) -> None:
        if self.width:
            self.console.file.write("\r" + " " * self.width + "\r")
            self.width = 0

    def stop(self) -> None:
        if self.width:
            self.console.file.write("\n")
            self.width = 0


class TerminalDisplay:
    """A terminal: a bar below all that is printed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bar: Progress | None = None
        self.task: Any = None

    def update(self, event: StepEvent, stats: str) -> None:
        if self.bar is None:
            self.bar = build_progress_bar(self.console)
            self.task = self.bar.add_task("train", total=event.total_steps, completed=event.step - 1, stats="")
            self.bar.start()
        self.bar.update(self.task, completed=event.step, total=event.total_steps, stats=stats)

    def checkpoint_saved(self, line: str) -> None:
        """The bar continues: a checkpoint is not worth a line."""

    def clear(self) -> None:
        """The bar stays below what is printed."""

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def select_display(console: Console) -> PlainDisplay | TerminalDisplay:
    if in_notebook():
        return NotebookDisplay(console)
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay(console)


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel: IPython makes get_ipython known to every module; its terminal has a bar."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # Jupyter, Colab


def shorten_line(text: Any, max_chars: int = 60) -> str:
    """One printable line: control characters that would steer a terminal are shown, not sent."""
    line = "".join(c if c.isprintable() else "·" for c in str(text))
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(42), format_duration(200), format_duration(9000)
    ('42 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} {_('s')}"
    if seconds < 6000:
        return f"{seconds / 60:.0f} {_('min')}"
    return f"{seconds / 3600:.1f} {_('h')}"
