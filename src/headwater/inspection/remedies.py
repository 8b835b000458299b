"""The words of the checker: what a broken law means, and what to do about it."""

from __future__ import annotations

from headwater.inspection.calling import Calling
from headwater.inspection.claims import Broken, Claim

KEPT = {
    "future": "no place sees a later one, in evaluation and in training mode",
    "window": "no place sees beyond its window",
    "padding": "padding is not seen, on either side",
    "positions": "padding on the left moves no place",
    "documents": "documents in one row do not see one another",
    "batch": "other rows change nothing",
    "cache": "piece by piece through a cache answers as the whole",
    "back end": "fused attention and the plain formula agree",
}
SKIPPED = {
    "future": "it may look both ways; causal=True makes it a law",
    "window": "its attention has no window",
    "padding": "no padding mask is known for it; pass call=, with a parameter keep",
    "positions": "padding on the left is not asked about, or no padding mask is known; pass call=, with keep",
    "documents": "it takes no document numbers",
    "cache": "no cache is known for it; pass step=",
}
REMEDIES = {
    "future": "Hide later keys before the softmax in every layer. If it is meant to look both ways, pass causal=False.",
    "window": "Let a window of w hide keys with q - k ≥ w: 0 ≤ q - k < w.",
    "padding": "Hide padded keys before the softmax in every layer (True = may attend), and average real tokens only.",
    "positions": "Count places over real tokens: (keep.cumsum(1) - 1).clamp(min=0), and use them in every position.",
    "documents": "Let a query see a key only where document numbers are equal, and count places from its start.",
    "batch": "Keep rows apart: look for a reshape, transpose or norm that mixes the batch axis (BatchNorm does).",
    "cache": "With q new queries and k keys the triangle ends at the bottom right: key ≤ query + (k - q). Keep every "
    "token that was read, and count places on from them.",
    "back end": "Compare the mask, the scale and the dropout that each back end is given.",
}
NUMBERS = (
    "Look at what it divides by, and at rows that may attend to nothing: hide with the dtype's smallest number, not "
)
NUMBERS += "with -1e9 or -inf, and set such rows to zero."
LATE = "Hide later keys before the softmax with -inf, not with a number that leaves a small weight."
CUT = "Look for .detach(), no_grad, .data or an argmax on the way; or freeze it with requires_grad_(False)."
UNUSED = "Use them, or freeze them with requires_grad_(False)."


def why_skipped(law: str, how: Calling, per_token: bool) -> str:
    if law in ("future", "documents", "cache") and not per_token:
        return "it answers once a row"
    if law == "documents" and "source" in how.takes:
        return "it reads a source, for which packed documents are not asked about"
    return SKIPPED[law]


def remedy(claim: Claim, alike: list[Broken], inverted: bool) -> str:
    if claim.law != "future":
        return REMEDIES[claim.law]
    if inverted:
        return "The mask is inverted: it shows the future and hides the past. Use one convention, True = may attend."
    if claim.a.training:
        return "A statistic over places (BatchNorm, a mean) carries the future back: normalise each place alone."
    ahead = max(found.claim.key - place for found in alike for _, place in found.places)  # type: ignore[operator]
    if ahead < claim.a.size[1] // 2:
        return f"It sees {ahead} ahead, in all layers together: a mask off by one. Show key ≤ query: tril(diagonal=0)."
    return REMEDIES["future"]


def sentence(alike: list[Broken], worst: Broken) -> str:
    """What was seen, at the worst place, and how often."""
    claim = worst.claim
    seen = f"place {worst.place} of row {worst.row}"
    seen += f" changes by {worst.gap:.2g} ({worst.share:.1%} of the largest)"
    seen += f" with the token at place {claim.key}" if claim.key is not None else ""
    more = sum(len(found.places) for found in alike) - 1
    return f"{claim.says}: {seen}" + (f"; {more} more places do" if more else "")
