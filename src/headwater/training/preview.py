"""What a run on answers learns, before it begins: the count of answer tokens, and one example as the model sees it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from headwater.data.summary import LABEL_WIDTH, summary_line
from headwater.i18n import _
from headwater.tasks import TaskData

LEARNED_STYLE = "bold green"
MAX_SPAN_CHARACTERS = 400  # of a span in the example; its middle is left out


def learned_lines(task_data: TaskData) -> Iterator[str]:
    """A line of the plan: how many tokens are learned."""
    if task_data.num_learned:
        text = _(
            "{learned:,} of {tokens:,} tokens are learned ({percent:.0f} %): answers and their end",
            learned=task_data.num_learned,
            tokens=task_data.num_tokens,
            percent=100 * task_data.num_learned / max(1, task_data.num_tokens),
        )
        yield summary_line(_("answers"), text)


def print_preview(task_data: TaskData, console: Console | None = None) -> None:
    """Print one example; what is learned of it is green, and stands in «» where there are no colours."""
    if not task_data.preview:
        return
    console = console or Console(highlight=False, soft_wrap=True, force_jupyter=False)
    console.print(preview_text(task_data.preview, console.is_terminal))


def preview_text(spans: tuple[tuple[str, bool], ...], has_colours: bool) -> Text:
    """The example with its learned spans marked, indented like the lines of the plan."""
    text = Text()
    for span, learned in spans:
        line = _shorten(span)
        if learned and not has_colours:
            line = f"«{line}»"
        text.append(line, style=LEARNED_STYLE if learned else "dim")
    hint = _("green") if has_colours else "«»"
    heading = Text(
        summary_line(_("example"), _("one example as the model sees it; what is learned: {hint}", hint=hint))
    )
    indent = " " * LABEL_WIDTH
    body = Text("\n").join([Text(indent) + line for line in text.split("\n")])
    return Text("\n").join([heading, body])


def _shorten(span: str) -> str:
    """Printable text; control characters that would steer a terminal are shown as dots."""
    clean = "".join(c if c.isprintable() or c == "\n" else "·" for c in span)
    if len(clean) <= MAX_SPAN_CHARACTERS:
        return clean
    half = MAX_SPAN_CHARACTERS // 2
    return f"{clean[:half]} … {clean[-half:]}"
