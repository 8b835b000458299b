"""InspectionResult, the base of all results (JSON, text, figure, notebook); and tokens grouped by character or word."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.inspection.inputs import Token

MAX_LISTED_ELEMENTS = 1 << 18  # of an array in JSON; a larger one is given by its shape and dtype


class InspectionResult:
    """The base class of all results, which are frozen dataclasses; lines() is the summary of each."""

    def lines(self) -> list[str]:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON data; NaN and infinity become null."""
        data = to_jsonable(self)
        assert isinstance(data, dict)
        return data

    def save(self, path: str | Path) -> Path:
        """Save the figure of the result as .png, .svg or .pdf."""
        from headwater.inspection.figures import save_figure

        return save_figure(self, path)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines()))

    def _repr_html_(self) -> str:
        from headwater.inspection.html import to_notebook_html

        return to_notebook_html(self)


def to_jsonable(value: Any) -> Any:
    """JSON data: dataclasses as objects, arrays as lists, floats with seven digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value) if f.repr}
    if isinstance(value, np.ndarray):
        if value.size > MAX_LISTED_ELEMENTS:
            return {"shape": list(value.shape), "dtype": str(value.dtype), "omitted_values": value.size}
        return to_jsonable(value.tolist())
    if isinstance(value, dict):
        return {str(key): to_jsonable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_jsonable(inner) for inner in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


# ----------------------------------------------------------------------------------------------------- groups of tokens


def group_tokens(tokens: Sequence[Token], by: str = "character") -> list[range]:
    """Ranges of tokens that form one character, or one word: it starts with a space or a Chinese character."""
    if by not in ("character", "word"):
        raise BadSetting(
            _(
                "group_tokens: by must be character or word, got {by!r}; {nearest}",
                by=by,
                nearest=nearest(by, ["character", "word"]),
            )
        )
    starts = [
        n
        for n, token in enumerate(tokens)
        if token.piece_index == 1 and (by == "character" or n == 0 or _starts_word(token))
    ]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def _starts_word(token: Token) -> bool:
    return not token.text[:1].isalnum() or ord(token.text[0]) > 0x2E7F


def group_label(tokens: Sequence[Token], group: range) -> str:
    """The label of a group."""
    text = "".join(tokens[n].text for n in group if tokens[n].piece_index == 1)
    return Token(0, text).label


def pool_by_group(weights: np.ndarray, rows: Sequence[range], columns: Sequence[range]) -> np.ndarray:
    """Weights [Q, S] -> [rows, columns]: the mean over the queries of a group, the sum over its keys."""
    summed = np.stack([weights[:, c.start : c.stop].sum(1) for c in columns], 1)
    return np.stack([summed[r.start : r.stop].mean(0) for r in rows])
