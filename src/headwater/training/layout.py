"""How the progress of a run is laid out in a terminal of any width: columns of the bar, lines wrapped at words."""

from __future__ import annotations

from rich.console import Console
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

from headwater.data.telling import Say

WIDE, MIDDLE = 112, 72  # columns of a terminal with room for all, and for all but the bar and the time that has passed


class Numbers(ProgressColumn):
    """The first `count` of the numbers of a step, which stand two spaces apart: loss, speed, learning rate, norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def render(self, task: Task) -> Text:
        return Text("  ".join(task.fields["numbers"].split("  ")[: self.count]), no_wrap=True)


def progress_bar(console: Console, say: Say) -> Progress:
    """Step and time left come first; a narrow terminal shows them and the loss, a wide one everything."""
    step = TextColumn("{task.completed}/{task.total}")
    left = (TimeRemainingColumn(), TextColumn(say("left", "还剩")))
    first = (step, *(left if say("en", "zh") == "en" else reversed(left)))
    if console.width >= WIDE:
        columns = (SpinnerColumn(), *first, BarColumn(bar_width=16), Numbers(4), TimeElapsedColumn())
    elif console.width >= MIDDLE:
        columns = (*first, Numbers(3))
    else:
        columns = (*first, Numbers(1))
    return Progress(*columns, console=console, transient=True)


def wrapped(markup: str, console: Console, indent: int = 5) -> Text:
    """A line wrapped at words, what follows indented. Where nobody looks (a file, a pipe) it stays one line."""
    text = Text.from_markup(markup)
    if not console.is_terminal:
        return text
    first, *rest = text.wrap(console, console.width - indent) or [text]
    return Text("\n" + " " * indent).join([first, *rest])
