"""The Chinese catalogue, src/headwater/locale/zh/LC_MESSAGES/headwater.po, and the messages of the code.

    python scripts/messages.py            list messages without a translation, and translations without a message
                                          (exit 1 if there are any)
    python scripts/messages.py --write    add the new messages with an empty translation, remove the old ones

A message is the text in a call of _(). Texts of Python and of the operating system that users see are in FOREIGN.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
CATALOGUE = PACKAGE / "locale" / "zh" / "LC_MESSAGES" / "headwater.po"

# argparse formats these itself with %; the others come from the system and from the JSON reader.
FOREIGN = (
    "the following arguments are required: %s",
    "argument %(argument_name)s: %(message)s",
    "expected one argument",
    "expected at most one argument",
    "expected at least one argument",
    "expected %s argument",
    "expected %s arguments",
    "invalid %(type)s value: %(value)r",
    "invalid choice: %(value)r (choose from %(choices)s)",
    "not allowed with argument %s",
    "ignored explicit argument %r",
    "No such file or directory",
    "Permission denied",
    "Is a directory",
    "Not a directory",
    "File exists",
    "File name too long",
    "No space left on device",
    "Read-only file system",
    "Too many open files",
    "Address already in use",
    "Cannot assign requested address",
    "Directory not empty",
    "Input/output error",
    "Broken pipe",
    "Expecting value",
    "Expecting property name enclosed in double quotes",
    "Expecting ',' delimiter",
    "Expecting ':' delimiter",
    "Extra data",
    "Invalid control character at",
    "Unterminated string starting at",
)


def messages(package: Path = PACKAGE) -> dict[str, set[str]]:
    """message -> the files that contain it."""
    files: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_" and node.args:
                text = node.args[0]
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    files[text.value].add(path.relative_to(package).as_posix())
    for text in FOREIGN:
        files[text].add("")
    return files


def catalogue() -> Catalog:
    if not CATALOGUE.exists():
        return Catalog(locale="zh")
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="zh")


def gaps(used: dict[str, set[str]], known: Catalog) -> tuple[list[str], list[str]]:
    """The messages without a translation, and the translations without a message."""
    translations = {entry.id for entry in known if entry.id and entry.string}
    entries = {entry.id for entry in known if entry.id}
    return sorted(set(used) - translations), sorted(entries - set(used))


def write(used: dict[str, set[str]], known: Catalog) -> None:
    """Write the catalogue, sorted by message, so that a diff shows only the changed entries."""
    catalog = Catalog(locale="zh", header_comment="# Chinese messages of Headwater; see scripts/messages.py.")
    old = {entry.id: entry.string for entry in known if entry.id}
    for text in sorted(used):
        files = sorted(file for file in used[text] if file)
        catalog.add(text, old.get(text, ""), locations=[(file, None) for file in files])
    CATALOGUE.parent.mkdir(parents=True, exist_ok=True)
    with CATALOGUE.open("wb") as file:
        write_po(file, catalog, width=0, omit_header=True)


def main() -> int:
    used = messages()
    known = catalogue()
    if "--write" in sys.argv:
        write(used, known)
        known = catalogue()
    missing, stale = gaps(used, known)
    for kind, texts in (("no translation", missing), ("not in the code", stale)):
        for text in texts:
            print(f"{kind}: {text!r}")
    print(f"{len(used)} messages, {len(missing)} without a translation, {len(stale)} not in the code")
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main())
