"""What every result of an inspection can do: become plain data, words, a picture, a part of a notebook."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

MOST_NUMBERS = 1 << 18  # of one array that JSON lists; a longer one is described


class Result:
    """The base of all results. They are frozen dataclasses; `lines` is what each says in words."""

    def lines(self) -> list[str]:
        raise NotImplementedError

    def to_plain(self) -> dict[str, Any]:
        """Ready for JSON, in which there is neither NaN nor infinity: null stands for them."""
        made = plain(self)
        assert isinstance(made, dict)
        return made

    def save(self, path: str | Path) -> Path:
        """As a picture; the end of the name (.png, .svg, .pdf) says which kind."""
        from headwater.inspection.pictures import save

        return save(self, path)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        from headwater.inspection.booklet import fragment

        return fragment(self)


def plain(value: Any) -> Any:
    """Dataclasses as tables, arrays as lists. Numbers keep seven digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f for f in dataclasses.fields(value) if f.repr]
        return {f.name: plain(getattr(value, f.name)) for f in shown}
    if isinstance(value, np.ndarray):
        if value.size > MOST_NUMBERS:
            return {"shape": list(value.shape), "dtype": str(value.dtype), "left_out": f"{value.size} numbers"}
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
