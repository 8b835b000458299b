"""The pages tell the truth: the map is the code, the examples run, the links lead somewhere, both languages agree."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from headwater import errors

ROOT = Path(__file__).resolve().parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
MAPS = [ROOT / "docs" / language / "architecture.md" for language in ("en", "zh")]
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
    for page in MAPS:
        drawn = tool.parse(text(page))
        assert set(drawn) == real, f"{page}: run `make map`; {set(drawn) ^ real}"
        assert [name for name, words in drawn.items() if not words] == [], f"{page}: a file without words"


def test_the_english_words_are_the_docstrings_own():
    assert code_map().updated_page(MAPS[0]) == text(MAPS[0]), "run `make map`"


def test_a_false_map_would_be_seen():
    tool = code_map()
    false = text(MAPS[0]).replace("  errors.py ", "  terrors.py ")
    assert set(tool.parse(false)) != {tool.key(path) for _, path, _ in tool.entries()}


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
def test_every_python_block_runs(page, tmp_path, forks):
    for block in (block for block in blocks(page) if first_page()[code(block)] == page):
        done = forks.run([sys.executable, "-c", block], text=True, cwd=tmp_path)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


@pytest.mark.parametrize(
    ("block", "status"), [("1 / 0", 1), ("exit(3)", 3), ("exit('no')", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_block_that_fails_would_be_seen(block, status, forks):
    assert forks.run([sys.executable, "-c", block]).returncode == status


def test_both_readmes_show_the_same_code():
    plain = [[re.sub(r" *#.*", "", block) for block in blocks(readme)] for readme in READMES]
    assert plain[0]
    assert plain[0] == plain[1]


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.name)
def test_a_readme_is_short(readme):
    assert len(text(readme).splitlines()) <= 150


@pytest.mark.parametrize("readme", READMES, ids=lambda p: p.name)
def test_a_readme_opens_with_the_two_commands(readme):
    opening = text(readme).partition("##")[0]
    assert opening.index("make demo") < opening.index("make test")


# ----------------------------------------------------------------------------------------------- links and languages


@every_page
def test_links_lead_somewhere(page):
    assert broken_links(page, text(page)) == []


def broken_links(page: Path, content: str) -> list[str]:
    """Relative links and pictures whose file, or whose heading after #, is not there."""
    targets = re.findall(r"\]\(([^)\s]+)\)", content) + re.findall(r'src="([^"]+)"', content)
    broken = []
    for target in targets:
        if re.match(r"\w+://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(text(file) if path else content)):
            broken.append(target)
    return broken


def anchors(content: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, - for a space."""
    plain = re.sub(r"```.*?```", "", content, flags=re.S)
    titles = re.findall(r"^#+ (.+)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_a_broken_link_would_be_seen():
    content = (
        "# One title\n[a](#one-title) [b](#two) [c](docs/en/index.md) [d](docs/en/nowhere.md) [e](https://example.org)"
    )
    assert broken_links(READMES[0], content) == ["#two", "docs/en/nowhere.md"]


@pytest.mark.parametrize("page", [p for p in PAGES if "docs" in p.parts], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_opens_with_what_it_is_for_and_a_command(page):
    opening = re.split(r"^## ", text(page), maxsplit=1, flags=re.M)[0]
    paragraphs = opening.split("\n\n")
    assert paragraphs[0].startswith("# ")
    assert paragraphs[1].startswith("["), "the links to the twin and to the index come second"
    assert re.match(r"[^\s`#|!\[-]", paragraphs[2]) or paragraphs[2].startswith("`"), "then a sentence"
    assert "```" in opening, "then a command"


# Words and turns of a private dialect that no page may have again.
DIALECT = re.compile(
    r"\b(?:lessons?|exams?|choosers?|culprits?|mishaps?|booklet|shelf|optimisers?)\b"
    r"|on the way back|worked out|machine/"
)


@every_page
def test_the_pages_speak_the_words_of_the_field(page):
    if page.name == "CHANGELOG.md" or page.parent.name == "reference":  # history; words of the code itself
        return
    without_map = re.sub(r"<!-- map -->.*<!-- /map -->", "", text(page), flags=re.S)  # names of files
    assert DIALECT.findall(without_map) == []


def test_an_old_word_would_be_seen():
    assert DIALECT.findall("The optimiser and its choosers; an example.") == ["optimiser", "choosers"]


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
