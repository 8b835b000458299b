"""What differs between the settings a run was begun with and those it is resumed with."""

from __future__ import annotations

from typing import Any, NamedTuple

from headwater.errors import BadSetting
from headwater.training.settings import LEAVES, Settings


class Change(NamedTuple):
    name: str
    before: Any
    now: Any


FILES = ("paths", "valid", "synonyms")  # files may lie elsewhere now: what is in them is compared, by its hash


def differences(before: Settings, now: Settings) -> list[Change]:
    return [Change(n, getattr(before, n), getattr(now, n)) for n in LEAVES if getattr(before, n) != getattr(now, n)]


def check_written(written: Settings, before: Settings, where: str, checkpoint: str) -> None:
    """config.yaml must say what the checkpoint was made with, but for what may change in a resumed run."""
    for change in differences(before, written):
        if not LEAVES[change.name].free and change.name not in FILES:
            raise BadSetting(
                f"{where}: {change.name} must be {change.before!r}, as it was when {checkpoint} was saved, it is "
                f"{change.now!r} now; bring it back, or begin a new run"
            )


def changes(before: Settings, now: Settings) -> list[Change]:
    """What differs. A leaf that would make it another run is refused; the others are for showing."""
    found = differences(before, now)
    for change in found:
        if not LEAVES[change.name].free:
            raise BadSetting(
                f"{change.name} is fixed in a resumed run: it was {change.before!r}, got {change.now!r}; "
                "leave it out, or begin a new run"
            )
    return found
