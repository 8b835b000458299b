"""Who keeps the others waiting: one slow process makes the whole team slow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOW = 1.5  # times the others
FIRST, AGAIN = 20, 500  # steps until it may be said, and until it may be said again
SMOOTH = 0.9


class Pace:
    def __init__(self) -> None:
        self.usual: list[float] = []
        self.steps, self.quiet_until = 0, FIRST

    def heard(self, seconds: Sequence[float]) -> str:
        """What to say of a step in which each process worked so long; mostly nothing."""
        before = self.usual or list(seconds)
        self.usual = [SMOOTH * old + (1 - SMOOTH) * new for old, new in zip(before, seconds, strict=True)]
        self.steps += 1
        if len(seconds) < 2 or self.steps < self.quiet_until:
            return ""
        slowest = max(range(len(self.usual)), key=self.usual.__getitem__)
        others = median(t for rank, t in enumerate(self.usual) if rank != slowest)
        ratio = self.usual[slowest] / max(others, 1e-9)
        if ratio < SLOW:
            return ""
        self.quiet_until = self.steps + AGAIN
        return f"process {slowest} takes {ratio:.1f} times as long as the others, who wait for it"
