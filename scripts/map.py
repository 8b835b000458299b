"""The code map in docs/*/architecture.md: every file of the package, with the first words of its docstring.

    python scripts/map.py            say whether the maps are true (exit 1 if not)
    python scripts/map.py --write    make them true

In the Chinese map a file keeps the line it has; a new file comes in English until somebody translates it there.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
PAGES = [ROOT / "docs" / language / "architecture.md" for language in ("en", "zh")]
BLOCK = re.compile(r"(<!-- map -->\n```text\n)(.*?)(```\n<!-- /map -->)", re.S)
CHINESE = re.compile("[\u4e00-\u9fff]")
LINE = re.compile(r"^( *)(\S+)(?: +(.*))?$")


def first_words(path: Path) -> str:
    """The first line of the docstring, up to its first full stop or semicolon."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = re.sub(r"^\d+\. ", "", doc.partition("\n")[0].strip())  # reference/ numbers its pages
    return re.split(r"[.;](?= |$)", line, maxsplit=1)[0].replace("`", "")


def entries(folder: Path = PACKAGE, depth: int = 0) -> list[tuple[int, Path, str]]:
    """(depth, path, words), files before folders; a folder's words are those of its __init__.py."""
    found = []
    files = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py" or depth == 0)
    for path in files:
        found.append((depth, path, first_words(path)))
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and next(p.rglob("*.py"), None)):
        opening = path / "__init__.py"
        found.append((depth, path, first_words(opening) if opening.is_file() else ""))
        found += entries(path, depth + 1)
    return found


def render(words: dict[str, str] | None = None) -> str:
    """The map as text; words gives other descriptions by path."""
    words, lines = words or {}, ["src/headwater/"]
    for depth, path, text in entries():
        name = "  " * (depth + 1) + path.name + ("/" if path.is_dir() else "")
        lines.append(f"{name:<24} {words.get(key(path), text)}".rstrip())
    return "\n".join(lines) + "\n"


def key(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def read(text: str) -> dict[str, str]:
    """Path -> words of a map written by render. Raises if the page has no map."""
    found, folders = {}, [""]
    match = BLOCK.search(text)
    if not match:
        raise SystemExit("error: the page must hold a block between <!-- map --> and <!-- /map -->")
    for line in match[2].splitlines()[1:]:
        spaces, name, words = LINE.match(line).groups()
        depth = len(spaces) // 2
        path = folders[depth - 1] + name.rstrip("/")
        found[path] = words or ""
        folders[depth:] = [path + "/"]
    return found


def with_true_map(page: Path) -> str:
    """The page with a true map in it."""
    text = page.read_text(encoding="utf-8")
    words = read(text) if page.parent.name == "zh" else {}
    body = render({path: line for path, line in words.items() if CHINESE.search(line)})
    return BLOCK.sub(lambda match: match[1] + body + match[3], text)


def main() -> int:
    write = "--write" in sys.argv
    stale = [page for page in PAGES if with_true_map(page) != page.read_text("utf-8")]
    for page in stale:
        if write:
            page.write_text(with_true_map(page), encoding="utf-8")
        name = page.relative_to(ROOT)
        print(f"{name}: the map {'is now true' if write else 'is not true; run scripts/map.py --write'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
