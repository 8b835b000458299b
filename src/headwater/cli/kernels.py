"""A warning on stderr, printed once, that the C kernels are missing: the reason, the cost and the remedy."""

from __future__ import annotations

import sys
from typing import NamedTuple

from headwater.i18n import _


class MissingKernels(NamedTuple):
    """Why the C kernels are missing, and the remedy."""

    reason: str
    remedy: str

    def __str__(self) -> str:
        """The figure is that of docs/en/results.md: 24 tokens of SmolLM2-135M in 4 bits, start-up included."""
        text = _(
            "{reason}: running on torch alone, several times slower (quantized models such as smollm2: about 6 x)",
            reason=self.reason,
        )
        return str(text)


def missing_kernels() -> MissingKernels | None:
    """Why the C kernels are missing; None if they are available."""
    from headwater.cpu import build

    reason = build.unavailable_reason()
    if not reason:
        return None
    if reason.startswith("HEADWATER_FAST=0"):
        return MissingKernels(_("HEADWATER_FAST=0 turns the C kernels off"), _("unset HEADWATER_FAST"))
    if "there is no cc" in reason:
        return MissingKernels(_("no C compiler found"), _("install gcc (Debian, Ubuntu: apt install gcc)"))
    return MissingKernels(
        _("the C kernels were not compiled ({reason})", reason=reason),
        _("install another gcc, or name a compiler with CC"),
    )


reported: set[MissingKernels | None] = set()  # empty until a verb runs a model


def warn_missing() -> None:
    """Warn that the C kernels are missing, once per process; called by the verbs that run a model."""
    missing = missing_kernels()
    if missing is not None and missing not in reported:
        line = _("note: {missing}; {remedy}", missing=missing, remedy=missing.remedy)
        print(line, file=sys.stderr, flush=True)
    reported.add(missing)


def warn_compile_failed() -> None:
    """Warn at the end of a command that ran a model: kernels are compiled on first use, which may have failed."""
    if reported:
        warn_missing()
