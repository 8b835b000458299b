"""Faults: every kind has its own exit code and HTTP code, the drawing tells the truth, and hints are near."""

from __future__ import annotations

import re

import pytest

from headwater import errors
from headwater.errors import Fault, nearest


def kinds() -> list[type[Fault]]:
    found, waiting = [], [Fault]
    while waiting:
        kind = waiting.pop()
        found += [kind] if kind.__module__ == "headwater.errors" else []
        waiting += kind.__subclasses__()
    return found


def test_every_kind_has_its_own_exit_code():
    codes = [kind.exit_code for kind in kinds()]
    assert sorted(codes) == sorted(set(codes))
    assert 0 not in codes


def test_the_drawing_in_the_docstring_is_true():
    drawn = re.findall(r"(\w+) .*?exit (\d+) +HTTP (\d+)", errors.__doc__)
    assert {(n, int(e), int(h)) for n, e, h in drawn} == {(k.__name__, k.exit_code, k.http_code) for k in kinds()}


@pytest.mark.parametrize("kind", kinds(), ids=lambda k: k.__name__)
def test_http_codes_blame_the_request(kind):
    assert 400 <= kind.http_code < 500 or kind is errors.Unavailable


def test_nearest_names_the_nearest_or_lists_what_is_known():
    assert nearest("rmsnrom", ["rmsnorm", "layernorm"]) == "did you mean 'rmsnorm'?"
    assert nearest("zebra", ["b", "a"]) == "known: a, b"
    assert nearest("zzz", map(str, range(30))).endswith("…")
