"""What the checker found: one verdict a law, and all of them together, as data and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.errors import CheckFailed

MARKS = {"kept": "✓", "broken": "✗", "noted": "!", "skipped": "-"}


@dataclass(frozen=True)
class Verdict:
    """One law. state: kept, broken, noted (worth a look, no fault) or skipped. key: the place that was changed."""

    law: str
    state: str
    says: str
    module: str | None = None
    row: int | None = None
    place: int | None = None
    key: int | None = None
    amount: float | None = None
    remedy: str = ""

    def lines(self, width: int) -> Iterator[str]:
        yield from _wrapped(f"{MARKS[self.state]} {self.law:<10} ", self.says, width)
        if self.state == "broken" and self.module is not None:
            yield f"{'':13}module   {self.module or '(the model itself)'}"
        if self.remedy:
            yield from _wrapped(f"{'':13}to do    ", self.remedy, width)


@dataclass(frozen=True)
class Report:
    model: str
    called: str
    length: int
    seconds: float
    verdicts: tuple[Verdict, ...]

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.state == "broken")

    def __getitem__(self, law: str) -> Verdict:
        """The verdict on one law; the first where there are several."""
        return next(verdict for verdict in self.verdicts if verdict.law == law)

    def plain(self) -> dict[str, Any]:
        head = {
            "model": self.model,
            "called": self.called,
            "length": self.length,
            "ok": self.ok,
            "seconds": self.seconds,
        }
        filled = [{k: v for k, v in vars(verdict).items() if v not in (None, "")} for verdict in self.verdicts]
        return {**head, "verdicts": filled}

    def raise_if_broken(self) -> None:
        if not self.ok:
            first = self.broken[0]
            where = f" in {first.module}" if first.module else ""
            raise CheckFailed(f"{self.model}: {first.law}: {first.says}{where}; {first.remedy}")

    def lines(self, width: int = 100) -> Iterator[str]:
        """As plain text, at most so many characters wide."""
        yield from _wrapped("", f"{self.model}: called as {self.called}; rows of {self.length} tokens", width)
        for verdict in self.verdicts:
            yield from verdict.lines(width)
        count = len({verdict.law for verdict in self.broken})
        yield "all laws kept" if self.ok else f"{count} law{'s' if count > 1 else ''} broken"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    indent = " " * len(lead)
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=indent) or [lead]
