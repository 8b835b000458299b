"""The table of training settings in docs/en/train.md and docs/zh/train.md, from the settings themselves.

python3 scripts/settings.py            says whether the pages agree with the code
python3 scripts/settings.py --write    makes them agree
"""

from __future__ import annotations

import sys
from pathlib import Path

from headwater.cli.train import HEADINGS
from headwater.training.settings import LEAVES, SECTIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "docs" / language / "train.md" for language in ("en", "zh")]
BEGIN, END = "<!-- settings -->\n", "<!-- /settings -->"
HEADS = ("| setting | usual | meaning |", "| 设置 | 默认 | 含义 |")


def table(language: int) -> str:
    """language 0 is English, 1 Chinese."""
    lines = [HEADS[language], "|---|---|---|"]
    for section in SECTIONS:
        lines.append(f"| **{HEADINGS[section][language]}** | | |")
        for name, leaf in LEAVES.items():
            if leaf.section == section and name != "paths":
                usual = "" if leaf.default in ("", [], {}) else f"{leaf.default}"
                lines.append(f"| `{name}` | {usual} | {leaf.words[language]} |")
    return "\n".join(lines) + "\n"


def wanted(page: Path) -> str:
    """The page with the table as it should be."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(PAGES.index(page)) + END + after


if __name__ == "__main__":
    stale = [page for page in PAGES if wanted(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        if "--write" in sys.argv:
            page.write_text(wanted(page), encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'written' if '--write' in sys.argv else 'run scripts/settings.py --write'}")
    sys.exit(bool(stale) and "--write" not in sys.argv)
