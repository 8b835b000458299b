"""What each column of a table is for: by its name where there is a header, by its content where there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwater.data.examples import Example, Labelled, Pair, Passage, Tagged
from headwater.data.reading.shapes import asked
from headwater.errors import BadSetting, nearest

ROLES: dict[str, tuple[str, ...]] = {  # role -> names people give it, best first
    "source": ("source", "src", "input", "article", "document", "description", "original", "prompt", "instruction",
               "nl", "原文", "源文", "输入", "正文"),
    "target": ("target", "tgt", "output", "summary", "highlights", "synopsis", "translation", "code", "cmd", "command",
               "completion", "response", "译文", "目标", "摘要", "输出", "译"),
    "text": ("text", "sentence", "review", "content", "body", "comment", "tweet", "sentence1", "premise",
             "文本", "内容", "评论", "句子"),
    "second": ("second", "text_b", "sentence2", "hypothesis"),
    "label": ("label", "class", "category", "sentiment", "polarity", "stars", "rating", "intent",
              "标签", "类别", "情感"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "question": ("question", "问题"),
    "context": ("context", "passage"),
    "answers": ("answers", "答案"),
}  # fmt: skip
CODES = (
    "af ar bg bn ca cmn cs cy da de el en eng eo es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka kk ko la lt lv "
    "mk mn ms nb nl no pl pt ro ru sk sl sq sr sv sw ta th tl tr uk ur uz vi yue zh zho"
)
LANGUAGES = frozenset(CODES.split())
HALF = re.compile("[\ud800-\udfff]")
NEEDS: dict[str, tuple[str, ...]] = {
    "text-to-text": ("source", "target"),
    "classification": ("text", "label"),
    "tagging": ("words", "tags"),
    "answers": ("question", "context", "answers"),
    "language-model": ("text",),
}


def is_language(name: str) -> bool:
    """'de', 'zh-CN', 'pt_BR': a known language, perhaps with a region."""
    return name.lower().replace("_", "-").split("-")[0] in LANGUAGES and len(name) <= 8


def is_header(cells: Sequence[str]) -> bool:
    """A first row is a header when its cells are different short names and two of them (or the only one) are known."""
    names = [cell.strip().lower() for cell in cells]
    known = sum(any(name in words for words in ROLES.values()) or is_language(name) for name in names)
    return len(set(names)) == len(names) and max(map(len, names)) <= 40 and known >= min(2, len(names))


def roles_by_name(columns: Sequence[str]) -> dict[str, str]:
    """Role -> column, for the columns whose names say what they are."""
    lower = {column.strip().lower(): column for column in columns}
    found: dict[str, str] = {}
    for role, names in ROLES.items():
        for name in names:
            if name in lower and role not in found and lower[name] not in found.values():
                found[role] = lower[name]
    languages = [column for column in columns if is_language(column.strip()) and column.lower() != "id"]  # a row's name
    if len(languages) >= 2 and not {"source", "target"} <= found.keys():
        found = {**found, "source": languages[0], "target": languages[1]}
    return found


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
    prefix: int  # characters all cells begin with


def profile(name: str, cells: Sequence[str]) -> Profile:
    spaced = sum(" " in cell.strip() or any(ord(c) > 0x2E80 for c in cell) for cell in cells)
    count = max(1, len(cells))
    shared = len(_common_start(cells)) if len(set(cells)) > 1 else 0
    return Profile(name, len(set(cells)) / count, sum(map(len, cells)) / count, spaced / count, shared)


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
    looks = [profile(name, [str(row.get(name, "")) for row in rows]) for name in rows[0]]
    labels = [p for p in looks if len(rows) >= 20 and p.distinct <= 0.2 and p.length <= 30]
    texts = [p for p in looks if p not in labels and not _is_name(p) and p.prefix < 20]
    if len(texts) >= 2:
        return {"source": texts[0].name, "target": texts[1].name}
    if texts and labels:
        return {"text": texts[0].name, "label": min(labels, key=lambda p: p.distinct).name}
    if len(looks) == 2 and not labels:
        return {"source": looks[0].name, "target": looks[1].name}
    return {"text": (texts or looks)[0].name}


def _is_name(look: Profile) -> bool:
    """Identifiers: nearly all different, no spaces, beside columns of text."""
    return look.distinct > 0.95 and look.spaced < 0.05


def check_columns(chosen: dict[str, str], columns: Sequence[str]) -> None:
    """A user's own choice of columns: known roles, columns that are there."""
    for role, column in chosen.items():
        if role not in ROLES:
            raise BadSetting(f"columns has no role {role!r}; {nearest(role, ROLES)}")
        if column not in columns:
            raise BadSetting(f"no column is called {column!r}; {nearest(column, columns)}")


def example_of(task: str, cells: dict[str, Any], roles: Mapping[str, str], document: int) -> Example:
    """One example from one row. ValueError says what is wrong with the row."""
    got = {role: cells.get(column) for role, column in roles.items()}
    if task == "answers":
        return asked(got["question"], got["context"], got["answers"] or (), str(cells.get("id", "")))
    if task == "tagging":
        return _tagged(got["words"], got["tags"])
    text = {role: _text(role, got[role]) for role in NEEDS[task]}
    if task == "text-to-text":
        return Pair(text["source"], text["target"])
    if task == "classification":
        return Labelled(text["text"], text["label"].strip(), str(got.get("second") or ""))
    return Passage(text["text"], document)


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
    if HALF.search(text):
        raise ValueError(f"{role} holds half of a surrogate pair, which no text has")
    if not text.strip():
        raise ValueError(f"empty {role}")
    return text
