"""What each column of a table is for: by its name where there is a header, by its content where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.data.examples import Example, Labelled, Pair, Passage, Question, Tagged
from headwater.data.metrics.units import units
from headwater.data.reading.names import INSTRUCTIONS, PAIRS, ROLES, is_language
from headwater.data.reading.shapes import asked
from headwater.errors import BadSetting, nearest

HALF = re.compile("[\ud800-\udfff]")
NUMBER = re.compile(r"[-+]?\d[\d.,]*")
PARAPHRASE = 0.5  # share of common words from which two columns say the same
NEEDS: dict[str, tuple[str, ...]] = {
    "text-to-text": ("source", "target"),
    "classification": ("text", "label"),
    "tagging": ("words", "tags"),
    "answers": ("question", "context", "answers"),
    "language-model": ("text",),
}


def roles_by_name(columns: Sequence[str]) -> dict[str, str]:
    """Role -> column, for the columns whose names say what they are."""
    lower = {column.strip().lower(): column for column in columns}
    found: dict[str, str] = {}
    for role, names in ROLES.items():
        for name in names:
            if name in lower and role not in found and lower[name] not in found.values():
                found[role] = lower[name]
    if task_of(found) not in ("answers", "tagging", "text-to-text"):
        for source, target in PAIRS:
            if {source, target} <= lower.keys() and found.get("label", source) in (lower[source], source):
                return {"source": lower[source], "target": lower[target]}
    languages = [column for column in columns if is_language(column) and column.lower() != "id"]  # a row's name
    if len(languages) >= 2 and not {"source", "target"} <= found.keys():
        found = {**found, "source": languages[0], "target": languages[1]}
    return found


def instruction_format(columns: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The instruction format these columns are of, and the column of each role; ('', {}) for none.

    >>> instruction_format(["instruction", "output", "id"])
    ('Alpaca', {'source': 'instruction', 'target': 'output'})
    """
    lower = {column.strip().lower(): column for column in columns}
    for name, roles in INSTRUCTIONS.items():
        found = {role: lower[column] for role, column in roles.items() if column in lower}
        if {"source", "target"} <= found.keys():
            return name, found
    return "", {}


def task_of(roles: Mapping[str, str]) -> str:
    """The task that the named columns allow, the most special first; '' when they say too little."""
    has = set(roles) | ({"source"} if "text" in roles else set())  # text and summary: the text is what is read
    for task in ("answers", "tagging", "text-to-text", "classification", "language-model"):
        if has >= set(NEEDS[task]):
            return task
    return ""


@dataclass(frozen=True)
class Profile:
    """What a sample of one column's cells looks like."""

    name: str
    distinct: float  # share of different values
    length: float  # mean characters
    spaced: float  # share of cells with a space or a wide script
    numeric: float  # share of cells that are numbers
    missing: float  # share of cells that are empty or null
    prefix: int  # characters all cells begin with


def profile(name: str, values: Sequence[Any]) -> Profile:
    cells = ["" if value is None else str(value) for value in values]
    spaced = sum(" " in cell.strip() or any(ord(c) > 0x2E80 for c in cell) for cell in cells)
    numeric = sum(bool(NUMBER.fullmatch(cell.strip())) for cell in cells)
    missing = sum(not cell.strip() for cell in cells)
    count = max(1, len(cells))
    shared = len(_common_start(cells)) if len(set(cells)) > 1 else 0
    mean_length = sum(map(len, cells)) / count
    return Profile(name, len(set(cells)) / count, mean_length, spaced / count, numeric / count, missing / count, shared)


def _common_start(cells: Sequence[str]) -> str:
    """What all cells begin with: the common start of the first and the last in order is that of all."""
    first, last = min(cells), max(cells)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:same]


def roles_by_content(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Role -> column, from a sample of rows: few values are labels; names and boilerplate are left out; text remains.

    >>> roles_by_content([{"1": f"a good day {i}", "2": "pos" if i % 2 else "neg"} for i in range(40)])
    {'text': '1', 'label': '2'}
    """
    if not rows:
        return {}
    names = dict.fromkeys(name for row in rows for name in row)
    looks = [profile(name, [row.get(name) for row in rows]) for name in names]
    labels = [p for p in looks if len(rows) >= 20 and p.distinct <= 0.2 and p.length <= 30]
    texts = [p for p in looks if p not in labels and not _is_name(p) and p.prefix < 20]
    if len(texts) >= 2:
        source, *others = sorted(texts, key=lambda p: p.missing > 0)  # stable: of full columns the first
        return {"source": source.name, "target": _target(source.name, others, rows)}
    if texts and labels:
        return {"text": texts[0].name, "label": min(labels, key=lambda p: p.distinct).name}
    if len(looks) == 2 and not labels:
        return {"source": looks[0].name, "target": looks[1].name}
    return {"text": (texts or looks)[0].name}


def _target(source: str, candidates: Sequence[Profile], rows: Sequence[dict[str, Any]]) -> str:
    """The first candidate that is not a paraphrase of the source, or the first of all."""
    for look in candidates:
        shared = [_same_words(row.get(source), row.get(look.name)) for row in rows]
        if sum(shared) / len(shared) < PARAPHRASE:
            return look.name
    return candidates[0].name


def _same_words(left: Any, right: Any) -> float:
    """The share of words two cells have in common (Jaccard)."""
    first, second = set(units(str(left))), set(units(str(right)))
    return len(first & second) / len(first | second) if first | second else 1.0


def _is_name(look: Profile) -> bool:
    """Identifiers and numbers: nearly all different without spaces, or nothing but numbers, beside columns of text."""
    return (look.distinct > 0.95 and look.spaced < 0.05) or look.numeric > 0.95


def check_columns(chosen: dict[str, str], columns: Sequence[str]) -> None:
    """A user's own choice of columns: known roles, columns that are there."""
    for role, column in chosen.items():
        if role not in ROLES:
            raise BadSetting(f"columns has no role {role!r}; {nearest(role, ROLES)}")
        if column not in columns:
            raise BadSetting(f"no column is called {column!r}; {nearest(column, columns)}")


def example_maker(task: str, roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    """The function that makes an example of one row and the number of its document.

    It raises ValueError with what is wrong with the row.
    """
    return MAKERS[task](roles)


def _pair_maker(roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    source, target, more = roles["source"], roles["target"], roles.get("input", "")

    def make(cells: dict[str, Any], document: int) -> Pair:
        text = _text("source", cells.get(source))
        if more and not _blank(cells.get(more)):
            text = f"{text}\n{_text('input', cells.get(more))}"
        return Pair(text, _text("target", cells.get(target)))

    return make


def _labelled_maker(roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    text, label, second = roles["text"], roles["label"], roles.get("second", "")

    def make(cells: dict[str, Any], document: int) -> Labelled:
        first = _text("text", cells.get(text))
        return Labelled(first, _text("label", cells.get(label)).strip(), str(cells.get(second) or ""))

    return make


def _tagged_maker(roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    return lambda cells, document: _tagged(cells.get(roles["words"]), cells.get(roles["tags"]))


def _question_maker(roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    question, context, answers = (roles[role] for role in NEEDS["answers"])

    def make(cells: dict[str, Any], document: int) -> Question:
        given = () if cells.get("is_impossible") else cells.get(answers) or ()
        return asked(cells.get(question), cells.get(context), given, str(cells.get("id", "")))

    return make


def _passage_maker(roles: Mapping[str, str]) -> Callable[[dict[str, Any], int], Example]:
    return lambda cells, document: Passage(_text("text", cells.get(roles["text"])), document)


MAKERS: dict[str, Callable[[Mapping[str, str]], Callable[[dict[str, Any], int], Example]]] = {
    "text-to-text": _pair_maker,
    "classification": _labelled_maker,
    "tagging": _tagged_maker,
    "answers": _question_maker,
    "language-model": _passage_maker,
}


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _tagged(words: Any, tags: Any) -> Tagged:
    words, tags = (v.split() if isinstance(v, str) else v for v in (words, tags))
    if not (isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) and words):
        raise ValueError("words and tags are not lists of one length")
    return Tagged(tuple(map(str, words)), tuple(map(str, tags)))


def _text(role: str, value: Any) -> str:
    """A cell as text. Numbers and yes/no are labels as they stand; a list or an object is not text."""
    if value is None:
        raise ValueError(f"no {role}")
    if isinstance(value, (dict, list)):
        raise ValueError(f"{role} is not text but {type(value).__name__}")
    text = value if isinstance(value, str) else str(value)
    if not text.isascii() and HALF.search(text):
        raise ValueError(f"{role} holds half of a surrogate pair, which no text has")
    if not text or text.isspace():
        raise ValueError(f"empty {role}")
    return text
