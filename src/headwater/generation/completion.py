"""Completion: the output of generate(), with its tokens, log-probabilities, finish reason and trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from headwater.errors import BadInput
from headwater.generation.request import FinishReason, SequenceState
from headwater.generation.sampling import ProcessorTrace
from headwater.i18n import _


@dataclass(frozen=True)
class Completion:
    """The completion of a prompt; str() gives its text.

    ids: every output token, an end-of-sequence token included (which text does not show). logprobs: the model's own,
    before any logits processor. finish_reason: eos, stop (a stop string), length, timeout or cancelled. score: of beam
    search. acceptance_rate: the fraction of drafted tokens that were accepted, in speculative decoding.
    """

    text: str
    ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    finish_reason: FinishReason
    prompt_ids: tuple[int, ...] = field(default=(), repr=False)
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = field(default=(), repr=False)
    trace: tuple[tuple[ProcessorTrace, ...], ...] = field(default=(), repr=False)
    score: float | None = None
    acceptance_rate: float | None = None

    @classmethod
    def from_sequence(
        cls, sequence: SequenceState, score: float | None = None, acceptance_rate: float | None = None
    ) -> Completion:
        """The completion of a sequence that has ended; raises the fault that ended it."""
        if sequence.fault is not None:
            raise sequence.fault
        assert sequence.finish_reason is not None
        request = sequence.request
        events = sequence.events
        return cls(
            text=sequence.text,
            ids=tuple(sequence.output_ids),
            logprobs=tuple(event.logprob for event in events),
            finish_reason=sequence.finish_reason,
            prompt_ids=request.prompt_ids,
            top_logprobs=tuple(event.top_logprobs for event in events) if request.top_logprobs else (),
            trace=tuple(event.trace for event in events) if request.trace else (),
            score=score,
            acceptance_rate=acceptance_rate,
        )

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """A dictionary ready for JSON, which has no infinity: an impossible token has the log-probability null."""
        fields: dict[str, Any] = {
            "text": self.text,
            "ids": list(self.ids),
            "finish_reason": self.finish_reason,
            "logprobs": [_finite_or_none(logprob) for logprob in self.logprobs],
        }
        if self.top_logprobs:
            fields["top_logprobs"] = [
                [[token, _finite_or_none(logprob)] for token, logprob in step] for step in self.top_logprobs
            ]
        if self.score is not None:
            fields["score"] = self.score
        if self.acceptance_rate is not None:
            fields["acceptance_rate"] = self.acceptance_rate
        return fields

    def explain(self, tokenizer: Any = None, top_k: int = 5) -> str:
        """The trace as a table: at each step the most probable tokens, before and after each logits processor."""
        if self.ids and not self.trace:
            raise BadInput(_("Completion: explain() needs a trace, got none; generate(..., trace=True)"))
        to_text = tokenizer.piece if tokenizer is not None else str
        lines = []
        for number, (token, stages) in enumerate(zip(self.ids, self.trace, strict=True), 1):
            lines.append(f"step {number}: chosen {to_text(token)!r}")
            for stage in stages:
                num_left = int((stage.probs > 0).sum())
                top = "  ".join(_format_tokens(stage.top(top_k), to_text))
                lines.append(f"  {stage.name:<24} {num_left:>6} left   {top}")
        return "\n".join(lines)


def _format_tokens(tokens: Iterable[tuple[int, float]], to_text: Any) -> list[str]:
    return [f"{to_text(token)!r} {prob:.3f}" for token, prob in tokens]


def _finite_or_none(number: float) -> float | None:
    return number if math.isfinite(number) else None
