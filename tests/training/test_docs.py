"""The page on training tells of every setting, recipe and objective there is, in both languages."""

from __future__ import annotations

import importlib.util

import pytest

from headwater.training.recipes import RECIPES
from headwater.training.running import TEXTS


def settings_tool(root):
    spec = importlib.util.spec_from_file_location("settings_table", root / "scripts" / "settings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [0, 1], ids=["en", "zh"])
def test_the_table_is_the_settings(root, number):
    tool = settings_tool(root)
    page = tool.PAGES[number]
    assert tool.wanted(page) == page.read_text("utf8"), "run scripts/settings.py --write"


def test_a_setting_that_is_not_told_would_be_seen(root, monkeypatch):
    tool = settings_tool(root)
    monkeypatch.setattr(tool, "LEAVES", {**tool.LEAVES, "unheard_of": tool.LEAVES["lr"]})
    assert tool.wanted(tool.PAGES[0]) != tool.PAGES[0].read_text("utf8")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_recipe_and_objective_is_named(root, language):
    page = (root / "docs" / language / "train.md").read_text("utf8")
    assert [name for name in RECIPES if f"| `{name}` |" not in page] == []
    assert [name for name in TEXTS if name not in page] == []
