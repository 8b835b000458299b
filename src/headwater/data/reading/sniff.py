"""The layout of one file: by its suffix, or by its first lines when the suffix says nothing."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

from headwater.data.reading.files import LAYOUTS
from headwater.data.reading.lines import Reading, pieces
from headwater.data.reading.problems import Problems

TAG = re.compile(r"(O|[BIESLUM][-_].+|[A-Z]{1,6}\$?)$")
SAMPLE_LINES = 400


def layout_of(path: Path, reading: Reading) -> str:
    """tsv, csv, jsonl, json, squad, conll or running."""
    by_name = LAYOUTS.get(Path(path.name.lower().removesuffix(".gz")).suffix, "")
    if by_name in ("", "json"):
        return layout_of_lines(first_lines(path, reading)) if not by_name else _json_layout(path, reading)
    return by_name


def first_lines(path: Path, reading: Reading, count: int = SAMPLE_LINES) -> list[str]:
    lenient = Reading(reading.encoding, "replace" if reading.invalid == "strict" else reading.invalid, reading.longest)
    return [line.text for line in islice(pieces(path, lenient, Problems()), count)]


def layout_of_lines(found: list[str]) -> str:
    """
    >>> layout_of_lines(["Hi.\\tSalut.", "Run!\\tCours !"])
    'tsv'
    >>> layout_of_lines(["EU\\tB-ORG", "rejects\\tO", "", "Peter\\tB-PER", "left\\tO"])
    'conll'
    """
    filled = [text for text in found if text.strip()]
    if not filled:
        return "running"
    if filled[0].lstrip()[0] in "{[":
        return "jsonl" if _is_object(filled[0]) else "json"
    if _is_conll(found, filled):
        return "conll"
    tabs = [text.count("\t") for text in filled]
    usual = max(set(tabs), key=tabs.count)
    return "tsv" if usual >= 1 and tabs.count(usual) >= 0.9 * len(tabs) else "running"


def _is_conll(found: list[str], filled: list[str]) -> bool:
    """Several lines, some blank; every filled one has the same few columns, and the last one is always a tag."""
    rows = [text.split("\t") if "\t" in text else text.split() for text in filled if not text.startswith("-DOCSTART-")]
    if len(rows) < 4 or len(filled) == len(found) or len(rows[0]) < 2:
        return False
    tags = sum(len(row) >= 2 and bool(TAG.match(row[-1].strip())) for row in rows)
    return tags >= 0.98 * len(rows)


def _json_layout(path: Path, reading: Reading) -> str:
    """A .json file may be a list of objects, SQuAD data, or JSONL under the wrong name."""
    found = [text for text in first_lines(path, reading) if text.strip()]
    if len(found) > 1 and _is_object(found[0]) and _is_object(found[1]):
        return "jsonl"
    return "squad" if found and found[0].lstrip().startswith("{") else "json"  # a single object can only be SQuAD data


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
