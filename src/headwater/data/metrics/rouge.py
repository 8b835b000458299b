"""ROUGE-1, -2 and -L, in units that work for Chinese and Japanese as well as for spaced scripts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from headwater.data.metrics.units import same_count, units


def rouge(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """The mean F1 of each, 0 to 100."""
    same_count(outputs, references)
    totals = {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}
    for output, reference in zip(outputs, references, strict=True):
        said, wanted = units(output), units(reference)
        totals["rouge1"] += overlap(said, wanted, 1)
        totals["rouge2"] += overlap(said, wanted, 2)
        totals["rougeL"] += f1(longest_common(said, wanted), len(said), len(wanted))
    return {name: 100 * total / len(outputs) for name, total in totals.items()}


def overlap(said: Sequence[str], wanted: Sequence[str], size: int) -> float:
    """F1 of the runs of `size` units two texts share, each counted as often as both have it."""
    left, right = (Counter(zip(*(text[i:] for i in range(size)), strict=False)) for text in (said, wanted))
    return f1((left & right).total(), left.total(), right.total())


def f1(shared: float, said: float, wanted: float) -> float:
    """2 shared / (said + wanted); two empty sides agree."""
    return 2 * shared / (said + wanted) if said + wanted else 1.0


def longest_common(left: Sequence[str], right: Sequence[str]) -> int:
    """The length of the longest common subsequence, a row of the table at a time in the bits of one integer.

    >>> longest_common("abcbdab", "bdcaba")
    4
    """
    places: dict[str, int] = {}
    for i, unit in enumerate(left):
        places[unit] = places.get(unit, 0) | 1 << i
    row = (1 << len(left)) - 1  # bit i is 0 where the length grows at i
    for unit in right:
        met = row & places.get(unit, 0)
        row = (row + met) | (row - met)
    return len(left) - (row & ((1 << len(left)) - 1)).bit_count()
