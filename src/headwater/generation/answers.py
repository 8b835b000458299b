"""An answer: it prints as its text, and knows its tokens, how sure the model was of each, and why it ended."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import BadInput
from headwater.generation.requests import Row


@dataclass(frozen=True)
class Answer:
    """stopped: end (the model ended it), stop (a stop string), length, time or cancelled.

    ids: every chosen token, an end token included (which text does not show). logprobs: what the model gave each
    before any chooser. score: of beam search. acceptance: the share of guesses that came true, of speculative
    decoding.
    """

    text: str
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    stopped: str
    prompt: tuple[int, ...] = field(default=(), repr=False)
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = field(default=(), repr=False)
    trace: tuple[tuple[Any, ...], ...] = field(default=(), repr=False)
    score: float | None = None
    acceptance: float | None = None

    @classmethod
    def of(cls, row: Row, score: float | None = None, acceptance: float | None = None) -> Answer:
        if row.fault is not None:
            raise row.fault
        events = row.events
        return cls(
            text=row.text,
            ids=tuple(row.new),
            logprobs=tuple(event.logprob for event in events),
            stopped=row.stopped or "running",
            prompt=row.request.prompt,
            alternatives=tuple(event.alternatives for event in events) if row.request.alternatives else (),
            trace=tuple(event.stages for event in events) if row.request.trace else (),
            score=score,
            acceptance=acceptance,
        )

    def __str__(self) -> str:
        return self.text

    def plain(self) -> dict[str, Any]:
        """Ready for JSON, in which there is no infinity: a token that was impossible has null."""
        said = {"text": self.text, "ids": list(self.ids), "stopped": self.stopped, "logprobs": _finite(self.logprobs)}
        if self.alternatives:
            said["alternatives"] = [[[i, *_finite([p])] for i, p in step] for step in self.alternatives]
        return said | {k: v for k, v in (("score", self.score), ("acceptance", self.acceptance)) if v is not None}

    def why(self, tokenizer: Any = None, top: int = 5) -> str:
        """The trace as a table: at each step the most probable tokens, before and after each chooser."""
        if self.ids and not self.trace:
            raise BadInput("Answer: why() needs a trace, got none; generate(..., trace=True)")
        name = tokenizer.piece if tokenizer is not None else str
        lines = []
        for number, (token, stages) in enumerate(zip(self.ids, self.trace, strict=True), 1):
            lines.append(f"step {number}: chosen {name(token)!r}")
            for stage in stages:
                shown = "  ".join(f"{name(i)!r} {share:.3f}" for i, share in stage.top(top))
                lines.append(f"  {stage.by:<24} {int((stage.shares > 0).sum()):>6} left   {shown}")
        return "\n".join(lines)


def _finite(numbers: Any) -> list[float | None]:
    return [number if math.isfinite(number) else None for number in numbers]
