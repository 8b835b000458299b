"""Tokens that belong together: the bytes of a character, the pieces of a word; and matrices with such tokens joined."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.errors import BadSetting, nearest
from headwater.inspection.subjects import Token


def groups(tokens: Sequence[Token], by: str = "character") -> list[range]:
    """Runs of tokens that make one character, or one word: it begins with a space, or where Chinese does."""
    if by not in ("character", "word"):
        raise BadSetting(
            f"groups: tokens are joined by character or word, got {by!r}; {nearest(by, ['character', 'word'])}"
        )
    starts = [
        n for n, token in enumerate(tokens) if token.part == 1 and (by == "character" or n == 0 or _begins(token))
    ]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def _begins(token: Token) -> bool:
    return not token.text[:1].isalnum() or ord(token.text[0]) > 0x2E7F


def visible(tokens: Sequence[Token], group: range) -> str:
    """The label of a group."""
    text = "".join(tokens[n].text for n in group if tokens[n].part == 1)
    return Token(0, text).label


def grouped(weights: np.ndarray, rows: Sequence[range], columns: Sequence[range]) -> np.ndarray:
    """[Q, S] -> [rows, columns]: what a group pays is the mean over its rows, what it gets the sum over its columns."""
    summed = np.stack([weights[:, c.start : c.stop].sum(1) for c in columns], 1)
    return np.stack([summed[r.start : r.stop].mean(0) for r in rows])
