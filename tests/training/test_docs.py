"""The page on training names every recipe and objective there is, in both languages."""

from __future__ import annotations

import pytest

from headwater.tasks import OBJECTIVES
from headwater.training.recipes import RECIPES


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_recipe_and_objective_is_named(root, language):
    page = (root / "docs" / language / "train.md").read_text("utf8")
    assert [name for name in RECIPES if f"| `{name}` |" not in page] == []
    assert [name for name in OBJECTIVES if name not in page] == []
