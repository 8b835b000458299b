"""At most one idea a line (one value, one conditional expression, one statement), and no vague names.

scripts/density.py counts them, and reports the fraction of comment lines.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def load_script():
    spec = importlib.util.spec_from_file_location("density", ROOT / "scripts" / "density.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["density"] = module
    spec.loader.exec_module(module)
    return module


density = load_script()
density.dense_lines = functools.cache(density.dense_lines)  # of all files, for several tests
density.vague_names = functools.cache(density.vague_names)


@pytest.mark.parametrize(
    "count", [density.count_dense_lines, density.count_vague_names], ids=["dense lines", "vague names"]
)
def test_no_package_has_any(count):
    packages = {package: number for package, number in count().items() if number}
    assert packages == {}, f"`python scripts/density.py {' '.join(packages)}` lists the places"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("a, b = 1, 2", "assigns several values"),
        ("self.a, self.b = a, b", "assigns several values"),
        ("a = b = 0", "assigns several values"),
        ("x = f(1 if a else 2, 3 if b else 4)", "has several conditional expressions"),
        ("x = 1 if a else 2 if b else 3", "has several conditional expressions"),
        ("x = (1 if a else\n     2 if b else 3)", "has several conditional expressions"),
        ("x = [y for z in w if (y := f(z))]", "assigns inside a comprehension"),
        ("a = 1; b = 2", "has several statements"),
        ("if a: b()", "has several statements"),
        ("def f(): return 1", "has several statements"),
    ],
)
def test_a_dense_line_is_found(line, reason):
    assert reason in {dense.reason for dense in density.dense_lines(line)}


@pytest.mark.parametrize(
    "line",
    [
        "a, b = b, a",
        "left, right = right, left ^ key",
        "a, b = f()",
        "x = 1 if a else 2",
        "x = [\n    1 if a else 2,\n    3 if b else 4,\n]",
        "if (match := f(x)):\n    pass",
        "def f() -> int: ...",
    ],
)
def test_a_line_with_one_idea_is_left_alone(line):
    assert density.dense_lines(line) == []


@pytest.mark.parametrize(
    "source", ["found = f()", "def f(given): ...", "for said in x:\n    pass", "f(lambda told: 1)"]
)
def test_a_vague_name_is_found(source):
    assert len(density.vague_names(source)) == 1


def test_a_name_that_contains_a_vague_word_is_left_alone():
    assert density.vague_names("stop_found = made_by(given=1)") == []


def test_the_comment_fraction_of_every_package_is_reported(capsys):
    density.main([])
    fractions = density.comment_fractions()
    table = capsys.readouterr().out
    assert all(f"{package:<14}" in table for package in fractions)
    assert all(0 <= fraction < 0.5 for fraction in fractions.values())
