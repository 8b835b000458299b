"""Whether guessing pays for a row, told by how its guesses fared.

A step that reads five or more tokens takes about as long as three that read one. So guesses pay while two or more come
true a step; where fewer do, none are asked for one step, then for two, four … up to 32: a text that cannot be guessed
loses next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

PAYS, LONGEST = 2, 32


@dataclass
class Trust:
    """drafted: tokens that were guessed; accepted: those of them that came true."""

    drafted: int = 0
    accepted: int = 0
    wait: int = 0
    pause: int = 0

    def granted(self) -> bool:
        """Whether the next step may read guesses; asked once a step."""
        self.wait = max(0, self.wait - 1)
        return not self.wait

    def learn(self, drafted: int, accepted: int) -> None:
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        if drafted:
            paid = accepted >= min(PAYS, drafted)
            self.pause = 0 if paid else min(LONGEST, max(1, 2 * self.pause))
            self.wait = self.pause + 1

    @property
    def acceptance(self) -> float:
        """The share of guesses that came true."""
        return self.accepted / max(1, self.drafted)
