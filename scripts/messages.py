"""The Chinese catalogue, src/headwater/locale/zh/LC_MESSAGES/headwater.po, kept in step with the messages in the code.

    python scripts/messages.py            list the messages without a translation and those the code no longer has
                                          (exit 1 if there are any)
    python scripts/messages.py --write    add the new messages with an empty translation, remove the old ones

A message is the text in a call of _(). Texts of Python and of the system, which reach users too, are in FOREIGN.
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
    """Every message of the code, with the files it stands in."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_" and node.args:
                text = node.args[0]
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    found[text.value].add(path.relative_to(package).as_posix())
    for text in FOREIGN:
        found[text].add("")
    return found


def catalogue() -> Catalog:
    if not CATALOGUE.exists():
        return Catalog(locale="zh")
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="zh")


def gaps(found: dict[str, set[str]], known: Catalog) -> tuple[list[str], list[str]]:
    """The messages without a translation, and the translations without a message."""
    translations = {entry.id for entry in known if entry.id and entry.string}
    entries = {entry.id for entry in known if entry.id}
    return sorted(set(found) - translations), sorted(entries - set(found))


def write(found: dict[str, set[str]], known: Catalog) -> None:
    """Write the catalogue anew, sorted, so that a change shows as a change of its own lines."""
    catalog = Catalog(locale="zh", header_comment="# Chinese messages of Headwater; see scripts/messages.py.")
    old = {entry.id: entry.string for entry in known if entry.id}
    for text in sorted(found):
        files = sorted(file for file in found[text] if file)
        catalog.add(text, old.get(text, ""), locations=[(file, None) for file in files])
    CATALOGUE.parent.mkdir(parents=True, exist_ok=True)
    with CATALOGUE.open("wb") as file:
        write_po(file, catalog, width=0, omit_header=True)


def main() -> int:
    found, known = messages(), catalogue()
    if "--write" in sys.argv:
        write(found, known)
        known = catalogue()
    missing, stale = gaps(found, known)
    for kind, texts in (("no translation", missing), ("not in the code", stale)):
        for text in texts:
            print(f"{kind}: {text!r}")
    print(f"{len(found)} messages, {len(missing)} without a translation, {len(stale)} not in the code")
    return 1 if missing or stale else 0


if __name__ == "__main__":
    sys.exit(main())
