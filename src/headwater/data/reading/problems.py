"""What was wrong with a user's rows: every one counted, the first ones placed, and an end when there are too many."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.errors import BadFile

SHOWN = 5  # places kept for each kind of problem


@dataclass
class Problems:
    limit: int = 1000  # bad rows after which reading stops: the file is then not what it was taken for
    count: int = 0
    repaired: int = 0  # lines kept with U+FFFD in place of wrong bytes
    places: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, path: Path, line: int, reason: str) -> None:
        """Count one bad row; more than the limit ends the reading."""
        self.count += 1
        self.counts[reason] = self.counts.get(reason, 0) + 1
        shown = self.places.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(f"{path.name}:{line}")
        if self.count > self.limit:
            worst = max(self.counts, key=lambda name: self.counts[name])
            raise BadFile(
                f"{path}: more than {self.limit} bad rows, mostly '{worst}' (first at {self.places[worst][0]}); "
                "is it of another layout? mend it, or name its columns or encoding"
            )

    def to_plain(self) -> dict[str, Any]:
        reasons = [{"reason": r, "rows": n, "first": self.places[r]} for r, n in self.counts.items()]
        return {"rows": self.count, "repaired_lines": self.repaired, "reasons": reasons}

    def lines(self) -> list[str]:
        """One readable line for each kind of problem."""
        said = [f"{n} × {reason} ({', '.join(self.places[reason])}{' …' if n > SHOWN else ''})"
                for reason, n in sorted(self.counts.items(), key=lambda item: -item[1])]  # fmt: skip
        return said + ([f"{self.repaired} lines kept with � in place of wrong bytes"] if self.repaired else [])
