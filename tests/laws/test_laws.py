"""Every law on every combination of parts to which it applies."""

from __future__ import annotations

import itertools

import pytest
from combinations import AXES, CASES, ROWS, fits
from law_kit import APPLIES, LAWS

TRIALS = [(law, case) for law in LAWS for case in CASES if APPLIES[law](case)]


@pytest.mark.parametrize(("law", "case"), TRIALS, ids=lambda value: getattr(value, "name", value))
def test_law(law, case):
    LAWS[law](case)


def test_every_two_choices_meet():
    met = {frozenset(two) for row in ROWS for two in itertools.combinations(row.items(), 2)}
    for a, b in itertools.combinations(AXES, 2):
        for x, y in itertools.product(AXES[a], AXES[b]):
            assert frozenset({(a, x), (b, y)}) in met or not fits({a: x, b: y}), f"{a} {x} never meets {b} {y}"


@pytest.mark.parametrize("law", LAWS)
def test_every_law_applies_somewhere(law):
    assert sum(APPLIES[law](case) for case in CASES) >= 20
