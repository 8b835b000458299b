"""The code map in docs/*/architecture.md: every file of the package, with the first sentence of its docstring.

    python scripts/map.py            check that the maps are up to date (exit 1 if not)
    python scripts/map.py --write    update them

In the Chinese map a file keeps its translated line; a new file is listed in English until it is translated there.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
PAGES = [ROOT / "docs" / language / "architecture.md" for language in ("en", "zh")]
BLOCK = re.compile(r"(<!-- map -->\n```text\n)(.*?)(```\n<!-- /map -->)", re.S)
CHINESE = re.compile("[\u4e00-\u9fff]")
LINE = re.compile(r"^( *)(\S+)(?: +(.*))?$")


def summary_line(path: Path) -> str:
    """The first line of the docstring, up to its first full stop or semicolon."""
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    line = re.sub(r"^\d+\. ", "", doc.partition("\n")[0].strip())  # reference/ numbers its pages
    return re.split(r"[.;](?= |$)", line, maxsplit=1)[0].replace("`", "")


def entries(folder: Path = PACKAGE, depth: int = 0) -> list[tuple[int, Path, str]]:
    """(depth, path, description), files before folders; a folder has the description of its __init__.py."""
    result = []
    files = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py" or depth == 0)
    for path in files:
        result.append((depth, path, summary_line(path)))
    for path in sorted(p for p in folder.iterdir() if p.is_dir() and next(p.rglob("*.py"), None)):
        init = path / "__init__.py"
        result.append((depth, path, summary_line(init) if init.is_file() else ""))
        result += entries(path, depth + 1)
    return result


def render(descriptions: Mapping[str, str] = MappingProxyType({})) -> str:
    """The map as text; descriptions: path -> description, instead of the one in the file."""
    lines = ["src/headwater/"]
    for depth, path, text in entries():
        name = "  " * (depth + 1) + path.name + ("/" if path.is_dir() else "")
        lines.append(f"{name:<24} {descriptions.get(key(path), text)}".rstrip())
    return "\n".join(lines) + "\n"


def key(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def parse(text: str) -> dict[str, str]:
    """path -> description of a map written by render. Raises SystemExit if the page has no map."""
    descriptions = {}
    folders = [""]
    match = BLOCK.search(text)
    if not match:
        raise SystemExit("error: the page must have a block between <!-- map --> and <!-- /map -->")
    for line in match[2].splitlines()[1:]:
        indent, name, description = LINE.match(line).groups()
        depth = len(indent) // 2
        path = folders[depth - 1] + name.rstrip("/")
        descriptions[path] = description or ""
        folders[depth:] = [path + "/"]
    return descriptions


def updated_page(page: Path) -> str:
    """The text of the page with an up-to-date map."""
    text = page.read_text(encoding="utf-8")
    old = parse(text) if page.parent.name == "zh" else {}
    body = render({path: line for path, line in old.items() if CHINESE.search(line)})
    return BLOCK.sub(lambda match: match[1] + body + match[3], text)


def main() -> int:
    write = "--write" in sys.argv
    stale = [page for page in PAGES if updated_page(page) != page.read_text("utf-8")]
    for page in stale:
        if write:
            page.write_text(updated_page(page), encoding="utf-8")
        name = page.relative_to(ROOT)
        print(f"{name}: the map {'was updated' if write else 'is out of date; run scripts/map.py --write'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
