"""The families page lists every family and its head types, in both languages."""

from __future__ import annotations

import re

import pytest

from headwater.families import FAMILIES


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_family_is_in_the_table(language, root):
    page = (root / "docs" / language / "families.md").read_text("utf8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.split("\n") if line.startswith("| ")]
    named = {name: set(row[2].split()) for row in rows if len(row) == 5 for name in re.findall(r"`([\w-]+)`", row[1])}
    named.pop("model_type", None)
    assert named == {name: set(family.head_names) for name, family in FAMILIES.items()}


def test_a_missing_family_would_be_seen(root, monkeypatch):
    monkeypatch.setitem(FAMILIES, "unlisted", FAMILIES["bert"])
    with pytest.raises(AssertionError):
        test_every_family_is_in_the_table("en", root)
    monkeypatch.delitem(FAMILIES, "unlisted")
