"""What a person sees of a run: a bar in a terminal, one line in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import builtins
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.text import Text

from headwater.data.telling import Say, english
from headwater.training.events import Evaluated, Event, FinalEvaluated, Kept, Noted, Stepped, Stopped
from headwater.training.layout import progress_bar, wrapped

EVERY = 10.0  # seconds between plain lines
NEWEST = 0.05  # share of the newest step in the loss and speed that are shown


class Show:
    """A listener. Speed and loss are means of the last steps; samples are shown with what was expected."""

    name = "progress"

    def __init__(self, console: Console | None = None, say: Say = english) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, force_jupyter=False)
        self.say, self.display = say, display_for(self.console, say)
        self.loss = self.rate = 0.0
        self.steps = 0  # that were applied

    def __call__(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Evaluated):
            self._evaluated(event)
        elif isinstance(event, FinalEvaluated):
            self._final(event)
        elif isinstance(event, Noted):
            self._print(f"[yellow]{self.say('note', '注意')}[/yellow] {escape(self.say(event.text))}")
        elif isinstance(event, Kept) and event.seconds > EVERY:
            self.display.saved(f"{self.say('saved', '已保存')} {escape(event.path)} ({event.seconds:.1f} s)")
        elif isinstance(event, Stopped):
            self.display.stop()

    def report(self, text: str) -> None:
        """Some lines as they are; control characters are shown, not sent."""
        self._print(escape("\n".join(short(line, len(line)) for line in text.splitlines())))

    def _print(self, text: str | Text) -> None:
        self.display.clear()
        self.console.print(text)

    def _step(self, event: Stepped) -> None:
        rate = event.tokens / max(event.seconds, 1e-9)
        if event.applied:
            self.steps += 1
            share = max(1 / self.steps, NEWEST)
            self.loss += share * (event.loss - self.loss)
            self.rate += share * (rate - self.rate)
        speed = f"{self.rate:,.0f} {self.say('tok/s', '词元/秒')}"
        self.display.update(event, f"loss {self.loss:.3f}  {speed}  lr {event.lr:.1e}  norm {event.norm:.2f}")

    def _final(self, event: FinalEvaluated) -> None:
        scores = "  ".join(f"{name} {value:.4g}" for name, value in event.scores.items())
        what = self.say(
            f"best model (step {event.step}), {event.rows:,} validation rows",
            f"最好的模型（第 {event.step} 步），{event.rows:,} 行验证数据",
        )
        self._print(wrapped(f"[bold]{what}[/bold]  {scores}", self.console))

    def _evaluated(self, event: Evaluated) -> None:
        say, scores = self.say, "  ".join(f"{name} {value:.4g}" for name, value in event.scores.items())
        best = f"  [green]{say('best so far', '目前最好')}[/green]" if event.better else ""
        self._print(wrapped(f"[bold]{say('step', '步')} {event.step}[/bold]  {scores}{best}", self.console))
        for sample in event.samples:
            given, said, wanted = (short(sample.get(k, "")) for k in ("input", "output", "expected"))
            right = "[green]=[/green]" if said == wanted else "[red]≠[/red]" if wanted else " "
            tail = "" if said == wanted or not wanted else f"  [dim]({say('expected', '应为')} {escape(wanted)})[/dim]"
            line = f"   {right} {escape(given)}  →  [bold]{escape(said)}[/bold]{tail}"
            self._print(wrapped(line, self.console))


# ------------------------------------------------------------------------------------------------ where it is shown


class Lines:
    """No terminal: a line every ten seconds, and at the last step."""

    every = EVERY

    def __init__(self, console: Console, say: Say) -> None:
        self.console, self.say = console, say
        self.shown = self.began = 0.0
        self.first = 0  # the first step that was seen

    def update(self, event: Stepped, numbers: str) -> None:
        now = time.monotonic()
        if not self.first:
            self.first, self.began = event.step, now - event.seconds
        if now - self.shown <= self.every and event.step != event.steps:
            return
        self.shown = now
        left = (now - self.began) / (event.step - self.first + 1) * (event.steps - event.step)
        left_words = self.say(f"{in_words(left)} left", f"还剩 {in_words(left, self.say)}")
        position = f"{self.say('step', '步')} {event.step}/{event.steps}  {self.say('epoch', '轮')} {event.epoch:.2f}"
        self.write(f"{position}  {numbers}  {left_words}")

    def write(self, line: str) -> None:
        self.console.print(line)

    def saved(self, line: str) -> None:
        self.console.print(line)

    def clear(self) -> None:
        """Before another line is printed."""

    def stop(self) -> None:
        """The run has ended."""


class NotebookLine(Lines):
    """A notebook: one line that is rewritten; what is said in between stays above it."""

    every = 0.5
    width = 0  # characters of the line that is shown

    def write(self, line: str) -> None:
        self.console.file.write("\r" + line.ljust(self.width))
        self.console.file.flush()
        self.width = len(line)

    def saved(self, line: str) -> None:
        """The line goes on: a checkpoint is not worth one of its own."""

    def clear(self) -> None:
        if self.width:
            self.console.file.write("\r" + " " * self.width + "\r")
            self.width = 0

    def stop(self) -> None:
        if self.width:
            self.console.file.write("\n")
            self.width = 0


class Bar:
    """A terminal: a bar below all that is printed."""

    def __init__(self, console: Console, say: Say) -> None:
        self.console, self.say = console, say
        self.bar: Progress | None = None
        self.task: Any = None

    def update(self, event: Stepped, numbers: str) -> None:
        if self.bar is None:
            self.bar = progress_bar(self.console, self.say)
            self.task = self.bar.add_task("train", total=event.steps, completed=event.step - 1, numbers="")
            self.bar.start()
        self.bar.update(self.task, completed=event.step, total=event.steps, numbers=numbers)

    def saved(self, line: str) -> None:
        """The bar goes on: a checkpoint is not worth a line."""

    def clear(self) -> None:
        """The bar makes room by itself."""

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def display_for(console: Console, say: Say) -> Lines | Bar:
    if in_notebook():
        return NotebookLine(console, say)
    return Bar(console, say) if console.is_terminal else Lines(console, say)


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel: IPython makes get_ipython known to every module; its terminal has a bar."""
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return type(shell).__name__ in ("ZMQInteractiveShell", "Shell")  # Jupyter, Colab


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
