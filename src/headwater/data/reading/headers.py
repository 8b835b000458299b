"""Whether the first row of a table names its columns: by known names, or because it differs from the rows below."""

from __future__ import annotations

import re
from collections.abc import Sequence

from headwater.data.metrics.units import units
from headwater.data.reading.names import is_known

NAME = re.compile(r"[^\W\d][^\d.!?…。！？,;:\"]{0,39}")  # a short name: no digit, no end of a sentence
FEWEST_ROWS = 5  # below this only known names count
LABEL_ROWS, LABEL_SHARE, LABEL_LENGTH = 20, 0.2, 30  # a column of labels: few different short values in many rows


def has_header(rows: Sequence[Sequence[str]]) -> bool:
    """Whether rows[0] is a header.

    >>> has_header([["id", "english", "german"], ["1", "Good morning.", "Guten Morgen."]])
    True
    >>> has_header([["Hi.", "Hallo."], ["Good morning.", "Guten Morgen."]])
    False
    """
    first = [cell.strip() for cell in rows[0]]
    lower = [cell.lower() for cell in first]
    if len(set(lower)) < len(lower) or max(map(len, first)) > 40:
        return False
    rest = [row for row in rows[1:] if len(row) == len(first)]
    if any(row[column].strip() == cell for row in rest for column, cell in enumerate(first) if cell):
        return False  # a name does not stand among the values
    if sum(map(is_known, lower)) >= min(2, len(lower)):
        return True
    if len(rest) < max(FEWEST_ROWS, (len(rows) - 1) / 2) or not all(map(NAME.fullmatch, first)):
        return False
    votes = [_vote(cell, [row[column].strip() for row in rest]) for column, cell in enumerate(first)]
    return sum(votes) >= 2 or all(votes)


def _vote(name: str, values: Sequence[str]) -> int:
    """How much a column's values differ from `name`: 2 all have digits, 1 labels or longer texts, 0 they do not."""
    if all(any(c.isdigit() for c in value) for value in values):  # numbers, dates, identifiers
        return 2
    different = len(set(values)) / len(values)
    mean_length = sum(map(len, values)) / len(values)
    if len(values) >= LABEL_ROWS and different <= LABEL_SHARE and mean_length <= LABEL_LENGTH:
        return 1
    words = len(units(name.replace("_", "")))
    longer = sum(len(units(value)) >= max(3, 2 * words) for value in values)
    return int(longer >= 0.9 * len(values))


def column_names(first: Sequence[str]) -> tuple[str, ...]:
    """The names in a header; a cell without one is named by its number, as pandas leaves its index.

    >>> column_names(["", "text ", "label"])
    ('1', 'text', 'label')
    """
    return tuple(cell.strip() or str(number) for number, cell in enumerate(first, 1))
