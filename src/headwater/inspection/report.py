"""What the checker found: one verdict a law, and all of them together, as data and as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.errors import CheckFailed
from headwater.inspection.words import Both, chinese, spoken

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

    def lines(self, width: int, language: str = "en") -> Iterator[str]:
        module, to_do = ("模块  ", "怎么办") if language == "zh" else ("module", "to do ")
        yield from _wrapped(f"{MARKS[self.state]} {self.law:<10} ", spoken(self.says, language), width)
        if self.state == "broken" and self.module is not None:
            itself = spoken(Both("(the model itself)", "（模型本身）"), language)
            yield f"{'':13}{module}   {self.module or itself}"
        if self.remedy:
            yield from _wrapped(f"{'':13}{to_do}   ", spoken(self.remedy, language), width)

    def plain(self) -> dict[str, Any]:
        """What is said is said in both languages: says, remedy; says_zh, remedy_zh."""
        told = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return told | {f"{name}_zh": chinese(told[name]) for name in ("says", "remedy") if name in told}


@dataclass(frozen=True)
class Report:
    model: str
    called: str
    length: int
    seconds: float
    verdicts: tuple[Verdict, ...]
    passes: int = 0

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
            "asked": self.asked,
            "asked_zh": self.asked.zh,
            "length": self.length,
            "ok": self.ok,
            "passes": self.passes,
            "seconds": self.seconds,
        }
        return {**head, "verdicts": [verdict.plain() for verdict in self.verdicts]}

    def raise_if_broken(self) -> None:
        if not self.ok:
            first = self.broken[0]
            where = f" in {first.module}" if first.module else ""
            raise CheckFailed(f"{self.model}: {first.law}: {first.says}{where}; {first.remedy}")

    @property
    def asked(self) -> Both:
        """What was probed, and how often."""
        return Both(
            f"{self.model}: called as {self.called}; rows of {self.length} random tokens, {self.passes} passes",
            f"{self.model}：调用方式 {chinese(self.called)}；每行 {self.length} 个随机词元，共跑 {self.passes} 遍",
        )

    def lines(self, width: int = 100, language: str = "en") -> Iterator[str]:
        """As plain text, at most so many columns wide."""
        yield from _wrapped("", spoken(self.asked, language), width)
        for verdict in self.verdicts:
            yield from verdict.lines(width, language)
        count = len({verdict.law for verdict in self.broken})
        kept = Both("all laws kept", "规则全部守住")
        yield spoken(
            kept if self.ok else Both(f"{count} law{'s' * (count > 1)} broken", f"违反了 {count} 条规则"), language
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    """Chinese characters take two columns."""
    wide = sum(c > "\u2e80" for c in text) * 2 > len(text)
    indent = " " * len(lead)
    width = len(lead) + (width - len(lead)) // 2 if wide else width
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=indent) or [lead]
