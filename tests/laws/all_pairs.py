"""All pairs: the fewest rows (greedily) in which every two values of two different axes meet at least once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]


def all_pairs(axes: Mapping[str, Sequence[str]], fits: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows over the axes. A pair that `fits` refuses in every row it was tried in is left out."""
    names = sorted(axes, key=lambda name: -len(axes[name]))
    open_ = {frozenset({(a, x), (b, y)}) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    rows: list[Row] = []
    used: Counter = Counter()
    for pair in sorted(open_, key=sorted):
        if pair not in open_:
            continue
        row = _filled(dict(pair), names, axes, open_, used, fits)
        if row is not None:
            rows.append(row)
            used.update(row.items())
            open_ -= set(_pairs(row))
    return rows


def _filled(row: Row, names: list, axes: Mapping, open_: set, used: Counter, fits: Callable) -> Row | None:
    """The row with every other axis set to the value that meets most new partners, and of those the least used."""
    if not fits(row):
        return None
    for name in names:
        if name in row:
            continue
        choices = [{**row, name: value} for value in axes[name]]
        choices = [choice for choice in choices if fits(choice)]
        if not choices:
            return None
        met = [sum(frozenset({(name, c[name]), item}) in open_ for item in c.items()) for c in choices]
        best = [choice for choice, partners in zip(choices, met, strict=True) if partners == max(met)]
        row = min(best, key=lambda choice: used[name, choice[name]])
    return row


def _pairs(row: Row) -> list[frozenset]:
    return [frozenset(two) for two in itertools.combinations(row.items(), 2)]
