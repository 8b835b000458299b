"""What a person sees of a run: a bar where there is a terminal, a plain line now and then where there is none."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from headwater.data.telling import Say, english
from headwater.training.events import Evaluated, Event, Kept, Noted, Stepped, Stopped
from headwater.training.layout import progress_bar, wrapped

EVERY = 10.0  # seconds between plain lines
NEWEST = 0.05  # share of the newest step in the loss and speed that are shown


class Show:
    """A listener. Speed and loss are means of the last steps; samples are shown with what was expected."""

    name = "progress"

    def __init__(self, console: Console | None = None, say: Say = english) -> None:
        self.console, self.say = console or Console(highlight=False, soft_wrap=True), say
        self.bar: Progress | None = None
        self.task: Any = None
        self.loss = self.rate = 0.0
        self.said = 0.0
        self.began = time.monotonic()
        self.first_step = self.steps = 0  # the steps since then that were applied

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Evaluated):
            self._evaluated(event)
        elif isinstance(event, Noted):
            self.console.print(f"[yellow]{self.say('note', '注意')}[/yellow] {escape(event.text)}")
        elif isinstance(event, Kept) and self.bar is None and event.seconds > EVERY:
            self.console.print(f"{self.say('saved', '已保存')} {escape(event.path)} ({event.seconds:.1f} s)")
        elif isinstance(event, Stopped) and self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _step(self, event: Stepped) -> None:
        say, rate = self.say, event.tokens / max(event.seconds, 1e-9)
        if not self.first_step:
            self.first_step, self.began = event.step, time.monotonic() - event.seconds
        if event.applied:
            self.steps += 1
            share = max(1 / self.steps, NEWEST)
            self.loss += share * (event.loss - self.loss)
            self.rate += share * (rate - self.rate)
        speed = f"{self.rate:,.0f} {say('tok/s', '词元/秒')}"
        numbers = f"loss {self.loss:.3f}  {speed}  lr {event.lr:.1e}  norm {event.norm:.2f}"
        if self.console.is_terminal:
            self._bar(event).update(self.task, completed=event.step, total=event.steps, numbers=numbers)
        elif time.monotonic() - self.said > EVERY or event.step == event.steps:
            self.said = time.monotonic()
            left = (self.said - self.began) / (event.step - self.first_step + 1) * (event.steps - event.step)
            left_words = say(f"{in_words(left)} left", f"还剩 {in_words(left, say)}")
            place = f"{say('step', '步')} {event.step}/{event.steps}  {say('epoch', '轮')} {event.epoch:.2f}"
            self.console.print(f"{place}  {numbers}  {left_words}")

    def _bar(self, event: Stepped) -> Progress:
        if self.bar is None:
            self.bar = progress_bar(self.console, self.say)
            self.task = self.bar.add_task("train", total=event.steps, completed=event.step - 1, numbers="")
            self.bar.start()
        return self.bar

    def _evaluated(self, event: Evaluated) -> None:
        say, scores = self.say, "  ".join(f"{name} {value:.4g}" for name, value in event.scores.items())
        best = f"  [green]{say('best so far', '目前最好')}[/green]" if event.better else ""
        self.console.print(wrapped(f"[bold]{say('step', '步')} {event.step}[/bold]  {scores}{best}", self.console))
        for sample in event.samples:
            given, said, wanted = (short(sample.get(k, "")) for k in ("input", "output", "expected"))
            right = "[green]=[/green]" if said == wanted else "[red]≠[/red]" if wanted else " "
            tail = "" if said == wanted or not wanted else f"  [dim]({say('expected', '应为')} {escape(wanted)})[/dim]"
            line = f"   {right} {escape(given)}  →  [bold]{escape(said)}[/bold]{tail}"
            self.console.print(wrapped(line, self.console))


def short(text: Any, most: int = 60) -> str:
    """One printable line: control characters that would steer a terminal are shown, not sent."""
    line = "".join(c if c.isprintable() else "·" for c in str(text))
    return line if len(line) <= most else line[: most - 1] + "…"


def in_words(seconds: float, say: Say = english) -> str:
    """
    >>> in_words(42), in_words(200), in_words(9000)
    ('42 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} {say('s', '秒')}"
    if seconds < 6000:
        return f"{seconds / 60:.0f} {say('min', '分钟')}"
    return f"{seconds / 3600:.1f} {say('h', '小时')}"
