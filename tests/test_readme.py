"""The pages tell the truth: the map is the code, the examples run, the links lead somewhere, both languages agree."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headwater import errors

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_map():
    spec = importlib.util.spec_from_file_location("code_map", ROOT / "scripts" / "map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------------- the map


def test_the_map_is_the_code():
    tool = code_map()
    real = {tool.key(path) for _, path, _ in tool.entries()}
    for readme in READMES:
        drawn = tool.read(text(readme))
        assert set(drawn) == real, f"{readme.name}: run `make map`; {set(drawn) ^ real}"
        assert [name for name, words in drawn.items() if not words] == [], f"{readme.name}: a file without words"


def test_the_english_words_are_the_docstrings_own():
    assert code_map().wanted(READMES[0]) == text(READMES[0]), "run `make map`"


def test_a_false_map_would_be_seen():
    tool = code_map()
    false = text(READMES[0]).replace("  errors.py ", "  terrors.py ")
    assert set(tool.read(false)) != {tool.key(path) for _, path, _ in tool.entries()}


# ---------------------------------------------------------------------------------------------------- the examples


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text(page), re.S)


def code(block: str) -> str:
    """A block without its comments: those differ between the languages."""
    return ast.dump(ast.parse(block))


@functools.cache
def first_page() -> dict[str, Path]:
    """Where each piece of code stands first, so that the same code runs once."""
    pages = [(code(block), page) for page in PAGES for block in blocks(page)]
    return dict(reversed(pages))


@every_page
def test_every_python_block_runs(page, tmp_path):
    for block in (block for block in blocks(page) if first_page()[code(block)] == page):
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_both_readmes_show_the_same_code():
    plain = [[re.sub(r" *#.*", "", block) for block in blocks(readme)] for readme in READMES]
    assert plain[0]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.name)
def test_a_readme_opens_with_the_two_commands(readme):
    opening = text(readme).partition("##")[0]
    assert opening.index("make demo") < opening.index("make test")


# ----------------------------------------------------------------------------------------------- links and languages


@every_page
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#\s]+)", text(page)) + re.findall(r'src="([^"]+)"', text(page))
    missing = [t for t in targets if not re.match(r"\w+://|mailto:", t) and not (page.parent / t).exists()]
    assert missing == []


def headings(page: Path) -> list[int]:
    """Levels of the headings, in order; a # inside a block of code is none."""
    plain = re.sub(r"```.*?```", "", text(page), flags=re.S)
    return [len(marks) for marks in re.findall(r"^(#+) ", plain, re.M)]


def twins() -> list[tuple[Path, Path]]:
    english, chinese = ROOT / "docs" / "en", ROOT / "docs" / "zh"
    return [(READMES[0], READMES[1]), *((p, chinese / p.relative_to(english)) for p in sorted(english.rglob("*.md")))]


@pytest.mark.parametrize(("en", "zh"), twins(), ids=lambda p: p.name)
def test_both_languages_have_the_same_headings(en, zh):
    assert zh.is_file(), f"{en.name} has no Chinese twin"
    assert headings(en) == headings(zh)
    assert headings(en)


def test_no_chinese_page_is_without_its_english_twin():
    chinese = [page.relative_to(ROOT / "docs/zh") for page in (ROOT / "docs/zh").rglob("*.md")]
    assert [page for page in chinese if not (ROOT / "docs/en" / page).is_file()] == []


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_table_of_exit_codes_is_complete(lang):
    listed = set(map(int, re.findall(r"^\| (\d+) \|", text(ROOT / "docs" / lang / "index.md"), re.M)))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.Fault)]
    assert listed == {0, 130, *(kind.exit_code for kind in kinds)}
