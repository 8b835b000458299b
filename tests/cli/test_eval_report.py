"""The tables of headwater eval fit the terminal, however many classes there are and however long their names."""

from __future__ import annotations

import random

import pytest

from headwater.cli.eval import MAX_CLASSES, display_width, report_lines
from headwater.data.metrics import classification_report


def report_of(names, rows=400):
    draw = random.Random(0)
    references = draw.choices(names, k=rows)
    outputs = [draw.choice(names) if n % 3 else name for n, name in enumerate(references)]
    return classification_report(outputs, references)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "names",
    [["neg", "pos"], [f"class {n}" for n in range(12)], ["好评", "差评", "中评"], ["x" * 300, "x" * 299 + "y"],
     [f"a rather long name {n}" for n in range(9)], [str(n) for n in range(2000)], ["red\x1b[31m", "two\nlines"]],
    ids=["two", "twelve", "chinese", "long", "long names", "many", "unsafe"],
)  # fmt: skip
def test_every_line_fits(names, width):
    lines = list(report_lines(report_of(names), width))
    table = [line for line in lines if not line.startswith(("baseline", "confusion", "most"))]
    assert max(map(display_width, table)) <= max(width, 70)
    assert not any("\x1b" in line for line in lines)
    assert len(lines) <= MAX_CLASSES + 50


def test_the_matrix_is_the_counts():
    report = report_of(["neg", "pos", "neu"])
    lines = list(report_lines(report, 80))
    start = next(n for n, line in enumerate(lines) if line.startswith("confusion matrix"))
    heads = lines[start + 1].split()
    for line in lines[start + 2 :]:
        label, *counts = line.split()
        assert dict(zip(heads, map(int, counts), strict=True)) == {
            h: report["confusion"][label].get(h, 0) for h in heads
        }
    assert heads == list(report["classes"]) and len(lines) == start + 5


def test_names_give_way_to_numbers_and_those_to_the_worst_pairs():
    long = list(report_lines(report_of([f"a rather long name {n}" for n in range(9)]), 80))
    assert any(line.split()[:2] == ["1", "2"] for line in long)
    many = list(report_lines(report_of([str(n) for n in range(100)]), 80))
    assert not any(line.startswith("confusion matrix") for line in many)
    assert sum("→" in line for line in many) == 11 and any("70 more" in line for line in many)
