"""Each law can fail: every planted fault is seen by the laws that must see it."""

from __future__ import annotations

import combinations as cases
import pytest
from law_kit import APPLIES, LAWS
from planted_faults import FAULTS


def seen(law: str, tried: list) -> bool:
    for case in tried:
        try:
            LAWS[law](case)
        except AssertionError:
            return True
    return False


def trials():
    return [(name, law) for name, (_, laws, _) in FAULTS.items() for law in laws]


@pytest.mark.parametrize(("name", "law"), trials())
def test_the_law_sees(name, law, monkeypatch):
    plant, _, choices = FAULTS[name]
    tried = [case for case in cases.some(**choices) if APPLIES[law](case)][:5]
    assert tried, "no case has these choices"
    plant(monkeypatch)
    try:
        assert seen(law, tried), f"{law} does not see: {name}"
    finally:
        cases.built.cache_clear()


def test_every_law_has_a_fault_it_must_see():
    assert {law for _, laws, _ in FAULTS.values() for law in laws} == set(LAWS)
