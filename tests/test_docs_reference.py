"""docs/*/reference is what scripts/reference.py writes: the flags, settings and public names of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import headwater
from headwater.training.config import FIELDS

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("page", ["cli", "settings", "api"])
def test_the_reference_is_up_to_date(tool, page, language):
    written = tool.page_path(page, language).read_text(encoding="utf-8")
    assert tool.generate(page, language) == written, "run `make reference`"


def test_a_setting_that_is_missing_would_be_seen(tool, monkeypatch):
    monkeypatch.setattr(tool, "FIELDS", {**FIELDS, "unheard_of": FIELDS["lr"]})
    assert "`unheard_of`" in tool.generate("settings", "en")


def test_a_flag_that_is_missing_would_be_seen(tool, monkeypatch):
    real = tool.build_parser

    def with_one_more(verb):
        parser = real(verb)
        parser.add_argument("--unheard-of", help="new")
        return parser

    monkeypatch.setattr(tool, "build_parser", with_one_more)
    assert "`--unheard-of UNHEARD_OF` | new" in tool.generate("cli", "en")


def test_every_public_name_is_in_the_reference(tool):
    page = tool.page_path("api", "en").read_text(encoding="utf-8")
    missing = [name for name in headwater.__all__ if name not in page and not name.startswith("__")]
    assert missing == []
