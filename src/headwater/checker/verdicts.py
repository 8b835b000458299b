"""Verdicts of the checker, one per law, and the report of all of them; their messages and remedies."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headwater.checker.adapters import ModelAdapter
from headwater.checker.claims import Claim, Violation
from headwater.errors import CheckFailed
from headwater.i18n import Message, _, translated

# ----------------------------------------------------------------------------------------------------------- verdicts

MARKS = {"passed": "✓", "failed": "✗", "warning": "!", "skipped": "-"}


@dataclass(frozen=True)
class Verdict:
    """The verdict on one law. status: passed, failed, warning or skipped. key: the position that was changed."""

    law: str
    status: str
    message: str
    module: str | None = None
    row: int | None = None
    position: int | None = None
    key: int | None = None
    difference: float | None = None
    remedy: str = ""

    def lines(self, width: int, language: str = "en") -> Iterator[str]:
        module = translated(_("module"), language)
        to_do = translated(_("to do "), language)
        yield from _wrap(f"{MARKS[self.status]} {self.law:<10} ", translated(self.message, language), width)
        if self.status == "failed" and self.module is not None:
            itself = translated(_("(the model itself)"), language)
            yield f"{'':13}{module}   {self.module or itself}"
        if self.remedy:
            yield from _wrap(f"{'':13}{to_do}   ", translated(self.remedy, language), width)

    def to_dict(self) -> dict[str, Any]:
        """JSON data, in both languages: message, remedy; message_zh, remedy_zh."""
        data = {name: value for name, value in vars(self).items() if value not in (None, "")}
        return data | {f"{name}_zh": translated(data[name], "zh") for name in ("message", "remedy") if name in data}


@dataclass(frozen=True)
class CheckReport:
    """The verdicts on all laws, and how the model was called."""

    model: str
    call: str
    length: int
    seconds: float
    verdicts: tuple[Verdict, ...]
    forward_passes: int = 0

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "failed")

    def __getitem__(self, law: str) -> Verdict:
        """The verdict on one law; the first where there are several."""
        return next(verdict for verdict in self.verdicts if verdict.law == law)

    def to_dict(self) -> dict[str, Any]:
        head = {
            "model": self.model,
            "call": self.call,
            "summary": self.summary,
            "summary_zh": translated(self.summary, "zh"),
            "length": self.length,
            "ok": self.ok,
            "forward_passes": self.forward_passes,
            "seconds": self.seconds,
        }
        return {**head, "verdicts": [verdict.to_dict() for verdict in self.verdicts]}

    def raise_if_failed(self) -> None:
        """Raise CheckFailed with the first failure, if a law is violated."""
        if not self.ok:
            first = self.failed[0]
            where = _(" in {module}", module=first.module) if first.module else ""
            raise CheckFailed(
                _(
                    "{model}: {law}: {message}{where}; {remedy}",
                    model=self.model,
                    law=first.law,
                    message=first.message,
                    where=where,
                    remedy=first.remedy,
                )
            )

    @property
    def summary(self) -> Message:
        """How the model was called, and the number of forward passes."""
        return _(
            "{model}: called as {call}; rows of {length} random tokens, {passes} forward passes",
            model=self.model,
            call=self.call,
            length=self.length,
            passes=self.forward_passes,
        )

    def lines(self, width: int = 100, language: str = "en") -> Iterator[str]:
        """The report as lines of at most `width` columns."""
        yield from _wrap("", translated(self.summary, language), width)
        for verdict in self.verdicts:
            yield from verdict.lines(width, language)
        count = len({verdict.law for verdict in self.failed})
        broken = _("{count} law{value} broken", count=count, value="s" * (count > 1))
        yield translated(_("all laws hold") if self.ok else broken, language)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines()))


def _wrap(prefix: str, text: str, width: int) -> list[str]:
    """A text in lines of at most `width` columns, indented like its prefix; Chinese characters take two columns."""
    is_chinese = sum(c > "\u2e80" for c in text) * 2 > len(text)
    indent = " " * len(prefix)
    width = len(prefix) + (width - len(prefix)) // 2 if is_chinese else width
    return textwrap.wrap(text, width, initial_indent=prefix, subsequent_indent=indent) or [prefix]


# ----------------------------------------------------------------------------------------------------------- messages

PASSED_MESSAGES = {
    "future": _("no position sees a later one, in evaluation and in training mode"),
    "window": _("no position sees beyond its window"),
    "padding": _("padding is not seen, on either side"),
    "positions": _("padding on the left shifts no position"),
    "documents": _("documents in one row do not see one another"),
    "batch": _("other rows change nothing"),
    "cache": _("decoding with a KV cache gives the logits of the full forward pass"),
    "backend": _("fused attention and the eager formula agree"),
    "patches": _("a patch makes its own vector, and a masked one is not seen"),
    "sizes": _("an image of another size is read, alone as in a batch"),
}
SKIP_REASONS = {
    "future": _("the model may be bidirectional; causal=True makes this a law"),
    "window": _("its attention has no window"),
    "padding": _("no padding mask is known for it; pass call=, with a parameter attention_mask"),
    "positions": _("padding on the left is excluded, or no padding mask is known; pass call=, with attention_mask"),
    "documents": _("it takes no document ids"),
    "cache": _("no cache is known for it; pass step="),
    "patches": _("it reads no images, or its patches overlap"),
    "sizes": _("it reads no images"),
}
REMEDIES = {
    "future": _(
        "Mask later keys before the softmax in every layer. If the model is meant to be bidirectional, "
        "pass causal=False."
    ),
    "window": _("A window of w must mask keys with q - k ≥ w: 0 ≤ q - k < w."),
    "padding": _(
        "Mask padded keys before the softmax in every layer (True = may attend), and average real tokens only."
    ),
    "positions": _(
        "Count positions over real tokens: (attention_mask.cumsum(1) - 1).clamp(min=0), in every position encoding."
    ),
    "documents": _(
        "Let a query attend to a key only if their document ids are equal, and count positions from the "
        "start of the document."
    ),
    "batch": _(
        "Rows must be independent: look for a reshape, transpose or norm that mixes the batch axis (BatchNorm does)."
    ),
    "cache": _(
        "With q new queries and k keys the causal triangle ends at the bottom right: "
        "key ≤ query + (k - q). Keep every earlier token in the cache, and continue the positions after them."
    ),
    "backend": _("Compare the mask, the scale and the dropout of the two back ends."),
    "patches": _("Cut the image row by row, and put the mask token in the place of the vector, before the positions."),
    "sizes": _("Interpolate the positions of the patches for each image, and keep those of the first tokens."),
}
NONFINITE_REMEDY = _(
    "Check what it divides by, and rows that may attend to no key: mask with the smallest number of "
    "the dtype, not with -1e9 or -inf, and set such rows to zero."
)
FUTURE_GRADIENT_REMEDY = _(
    "Mask later keys before the softmax with -inf, not with a number that leaves a small weight."
)
DETACHED_REMEDY = _(
    "Look for .detach(), no_grad, .data or an argmax in its path; or freeze it with requires_grad_(False)."
)
UNUSED_REMEDY = _("Use them, or freeze them with requires_grad_(False).")
INVERTED_MASK_REMEDY = _(
    "The mask is inverted: later positions are visible and earlier ones are masked. Use one "
    "convention, True = may attend."
)
BATCH_STATISTIC_REMEDY = _(
    "A statistic over positions (BatchNorm, a mean) carries the future back: normalise each position alone."
)


def skip_reason(law: str, adapter: ModelAdapter, per_token: bool) -> Message:
    """Why a law does not apply to a model."""
    if law in ("future", "documents", "cache") and not per_token:
        return _("it has one output per row")
    if law == "documents" and "source" in adapter.accepts:
        return _("packed documents are not checked for an encoder-decoder")
    return SKIP_REASONS[law]


def remedy_for(claim: Claim, violations: list[Violation], inverted: bool) -> Message:
    """What to do about a violated claim. inverted: its causal mask looks inverted."""
    if claim.law != "future":
        return REMEDIES[claim.law]
    if inverted:
        return INVERTED_MASK_REMEDY
    if claim.a.training:
        return BATCH_STATISTIC_REMEDY
    distances = [violation.claim.key - column for violation in violations for _, column in violation.positions]  # type: ignore[operator]
    ahead = max(distances)
    if ahead < claim.a.size[1] // 2:
        return _(
            "It sees {ahead} positions ahead, summed over all layers: a mask off by one. Allow key ≤ query: "
            "tril(diagonal=0).",
            ahead=ahead,
        )
    return REMEDIES["future"]


def violation_message(violations: list[Violation], worst: Violation) -> Message:
    """The message of a failed law: the worst position, and the number of others."""
    claim = worst.claim
    num_others = sum(len(violation.positions) for violation in violations) - 1
    text = _(
        "{message}: position {position} of row {row} changes by {difference:.2g} ({relative:.1%} of the largest)",
        message=claim.message,
        position=worst.position,
        row=worst.row,
        difference=worst.difference,
        relative=worst.relative_difference,
    )
    if claim.key is not None:
        text = text + _(" with the token at position {key}", key=claim.key)
    if num_others:
        text = text + _("; so do {more} more positions", more=num_others)
    return text
