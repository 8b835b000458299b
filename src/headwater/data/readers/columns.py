"""Column roles of a table (source, target, text, label, …), by name or by content, and the task they allow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headwater.audio.file_names import is_audio
from headwater.data.examples import EXAMPLE_FORMATS
from headwater.data.metrics import split_words
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.vision.images import is_image_name

NUMBER = re.compile(r"[-+]?\d[\d.,]*")
PARAPHRASE_OVERLAP = 0.5  # fraction of common words from which two columns are paraphrases


def known_roles() -> dict[str, tuple[str, ...]]:
    """Role -> the column names it is detected by; for a role without a list, its own name."""
    of_tasks = {role: (role,) for each in EXAMPLE_FORMATS.values() for role in (*each.roles, *each.optional_roles)}
    return {**NAMES_BY_ROLE, **{role: names for role, names in of_tasks.items() if role not in NAMES_BY_ROLE}}


def roles_by_name(columns: Sequence[str], sample: Sequence[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Role -> column, for the columns with known names. A path is one only where the sample names images or sounds."""
    lower = {column.strip().lower(): column for column in columns}
    roles: dict[str, str] = {}
    for role, names in known_roles().items():
        for name in names:
            is_free = name in lower and role not in roles and lower[name] not in roles.values()
            if is_free and (role != "path" or names_files(lower[name], sample)):
                roles[role] = lower[name]
    if infer_task(roles) in ("", "classification", "language-model"):  # a pair of COLUMN_PAIRS is more specific
        for source, target in COLUMN_PAIRS:
            if {source, target} <= lower.keys() and roles.get("label", source) in (lower[source], source):
                return {"source": lower[source], "target": lower[target]}
    languages = [column for column in columns if is_language(column) and column.lower() != "id"]  # id: Indonesian
    if len(languages) >= 2 and not {"source", "target"} <= roles.keys():
        roles = {**roles, "source": languages[0], "target": languages[1]}
    return roles


def names_files(column: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column holds names of images, or of recordings."""
    return names_sounds(column, sample) or all(is_image_name(str(row.get(column))) for row in sample[:20])


def names_sounds(column: str, sample: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a column holds names of recordings."""
    return bool(sample) and all(is_audio(Path(str(row.get(column)).strip())) for row in sample[:20])


def instruction_format(columns: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The instruction format (Alpaca, Dolly, …) of these columns, and the column of each role; ('', {}) for none.

    >>> instruction_format(["instruction", "output", "id"])
    ('Alpaca', {'source': 'instruction', 'target': 'output'})
    """
    lower = {column.strip().lower(): column for column in columns}
    for name, columns_by_role in INSTRUCTION_FORMATS.items():
        roles = {role: lower[column] for role, column in columns_by_role.items() if column in lower}
        if {"source", "target"} <= roles.keys():
            return name, roles
    return "", {}


def infer_task(roles: Mapping[str, str]) -> str:
    """The task these roles allow, the most specific first; '' when there are too few."""
    present = set(roles)
    if "text" in roles:  # text and summary: the text is the source
        present.add("source")
    for example_format in sorted(EXAMPLE_FORMATS.values(), key=lambda each: -len(each.roles)):
        if example_format.inferred and example_format.roles and present >= set(example_format.roles):
            return example_format.task
    return ""


@dataclass(frozen=True)
class ColumnProfile:
    """Statistics of a sample of one column's cells."""

    name: str
    distinct_fraction: float  # distinct values / cells
    mean_length: float  # in characters
    spaced_fraction: float  # cells with a space or in a wide script
    numeric_fraction: float  # cells that are numbers
    missing_fraction: float  # cells that are empty or null
    prefix_length: int  # length of the common prefix of all cells


def profile_column(name: str, values: Sequence[Any]) -> ColumnProfile:
    """The profile of a column from a sample of its values."""
    cells = ["" if value is None else str(value) for value in values]
    spaced = sum(" " in cell.strip() or any(ord(c) > 0x2E80 for c in cell) for cell in cells)
    numeric = sum(bool(NUMBER.fullmatch(cell.strip())) for cell in cells)
    missing = sum(not cell.strip() for cell in cells)
    count = max(1, len(cells))
    return ColumnProfile(
        name,
        distinct_fraction=len(set(cells)) / count,
        mean_length=sum(map(len, cells)) / count,
        spaced_fraction=spaced / count,
        numeric_fraction=numeric / count,
        missing_fraction=missing / count,
        prefix_length=len(_common_prefix(cells)) if len(set(cells)) > 1 else 0,
    )


def _common_prefix(cells: Sequence[str]) -> str:
    """The common prefix of all cells, which is that of the first and the last in sorted order."""
    first = min(cells)
    last = max(cells)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def roles_by_content(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Role -> column, from a sample of rows: few distinct values are labels, identifiers are ignored.

    >>> roles_by_content([{"1": f"a good day {i}", "2": "pos" if i % 2 else "neg"} for i in range(40)])
    {'text': '1', 'label': '2'}
    """
    if not rows:
        return {}
    names = dict.fromkeys(name for row in rows for name in row)
    profiles = [profile_column(name, [row.get(name) for row in rows]) for name in names]
    labels = [p for p in profiles if len(rows) >= 20 and p.distinct_fraction <= 0.2 and p.mean_length <= 30]
    texts = [p for p in profiles if p not in labels and not _is_identifier(p) and p.prefix_length < 20]
    if len(texts) >= 2:
        # the sort is stable: the first column without missing cells
        source, *others = sorted(texts, key=lambda p: p.missing_fraction > 0)
        return {"source": source.name, "target": _pick_target(source.name, others, rows)}
    if texts and labels:
        return {"text": texts[0].name, "label": min(labels, key=lambda p: p.distinct_fraction).name}
    if len(profiles) == 2 and not labels:
        return {"source": profiles[0].name, "target": profiles[1].name}
    return {"text": (texts or profiles)[0].name}


def _pick_target(source: str, candidates: Sequence[ColumnProfile], rows: Sequence[dict[str, Any]]) -> str:
    """The first candidate that is not a paraphrase of the source, or the first of all."""
    for candidate in candidates:
        overlaps = [_word_overlap(row.get(source), row.get(candidate.name)) for row in rows]
        if sum(overlaps) / len(overlaps) < PARAPHRASE_OVERLAP:
            return candidate.name
    return candidates[0].name


def _word_overlap(left: Any, right: Any) -> float:
    """Jaccard similarity of the words of two cells."""
    first = set(split_words(str(left)))
    second = set(split_words(str(right)))
    return len(first & second) / len(first | second) if first | second else 1.0


def _is_identifier(column: ColumnProfile) -> bool:
    """Whether a column holds identifiers or numbers: nearly all distinct and without spaces, or nearly all numeric."""
    return (column.distinct_fraction > 0.95 and column.spaced_fraction < 0.05) or column.numeric_fraction > 0.95


def check_columns(chosen: dict[str, str], columns: Sequence[str]) -> None:
    """Check the user's choice of columns: the roles must be known, the columns must exist."""
    for role, column in chosen.items():
        if role not in known_roles():
            raise BadSetting(
                _("columns has no role {role!r}; {nearest}", role=role, nearest=nearest(role, known_roles()))
            )
        if column not in columns:
            raise BadSetting(
                _("no column is called {column!r}; {nearest}", column=column, nearest=nearest(column, columns))
            )


# --------------------------------------------------------------------------------------------------
# Known column names: the roles they play, pairs of public datasets, instruction formats, and languages.


NAMES_BY_ROLE: dict[str, tuple[str, ...]] = {  # role -> common names, best first
    "source": ("source", "src", "input", "inputs", "article", "document", "dialogue", "description", "original",
               "prompt", "instruction", "nl", "docstring", "src_text", "原文", "源文", "输入", "正文"),
    "target": ("target", "tgt", "output", "targets", "summary", "highlights", "synopsis", "translation", "code", "cmd",
               "command", "completion", "response", "tgt_text", "译文", "目标", "摘要", "输出", "译"),
    "input": (),  # a second part of the source, on a line of its own; may be empty
    "path": ("path", "image", "picture", "file", "filename", "file_name", "image_path", "audio", "wav", "recording",
             "图片", "录音"),
    "speaker": ("speaker", "speaker_id", "client_id", "说话人"),
    "language": ("language", "locale", "语言"),
    "text": ("text", "caption", "sentence", "review", "content", "body", "comment", "tweet", "sentence1", "premise",
             "transcript", "transcription", "文本", "内容", "评论", "句子"),
    "second": ("second", "text_b", "sentence2", "hypothesis"),
    "label": ("label", "class", "category", "sentiment", "polarity", "stars", "rating", "intent",
              "标签", "类别", "情感"),
    "words": ("words", "tokens"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "question": ("question", "问题"),
    "context": ("context", "passage"),
    "answers": ("answers", "答案"),
}  # fmt: skip

COLUMN_PAIRS = (  # (source, target) of public datasets; each name alone is ambiguous
    ("intent", "snippet"),  # CoNaLa
    ("invocation", "cmd"),  # NL2Bash
    ("func_documentation_string", "func_code_string"),  # CodeSearchNet
    ("question", "answer"),  # GSM8K, closed-book question answering
    ("question", "response"),
    ("question", "query"),  # Spider
    ("question", "sql"),  # WikiSQL
    ("query", "response"),
    ("complex", "simple"),  # simplification
    ("original", "corrected"),  # grammatical error correction
    ("incorrect", "correct"),
)

INSTRUCTION_FORMATS: dict[str, dict[str, str]] = {  # format -> role -> column; the column of `input` may be missing
    "Alpaca": {"source": "instruction", "input": "input", "target": "output"},
    "Dolly": {"source": "instruction", "input": "context", "target": "response"},
    "prompt/completion": {"source": "prompt", "target": "completion"},
}

UNUSED_NAMES = (  # common names of columns that play no role
    "id idx index no nr number key uid uuid guid title name author user username date time year timestamp created_at "
    "updated_at url link split language lang score votes likes count length topic source_file file path doc_id "
    "question_id review_id sentence_id user_id 编号 序号 标题 日期 时间 作者 来源"
)
UNUSED_COLUMNS = frozenset(UNUSED_NAMES.split())

LANGUAGE_CODES = (
    "af ar bg bn ca cmn cs cy da de el en eng eo es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka kk ko la lt lv "
    "mk mn ms nb nl no pl pt ro ru sk sl sq sr sv sw ta th tl tr uk ur uz vi yue zh zho"
)
LANGUAGES = frozenset(LANGUAGE_CODES.split())
NAME_LOCALES = ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "tr", "ru", "ar", "zh", "ja", "ko")


def language_code(name: str) -> str:
    """The code of a language, from its code ('zh-CN') or its name in a common language; '' if it is neither.

    >>> [language_code(name) for name in ("pt_BR", "German", "Deutsch", "德语", "text")]
    ['pt', 'de', 'de', 'de', '']
    """
    lower = name.strip().lower()
    if is_language_code(lower):
        return lower.replace("_", "-").split("-")[0]
    return _codes_by_name().get(lower, "") if len(lower) > 1 else ""


def is_language_code(name: str) -> bool:
    """'de', 'zh-CN', 'pt_BR': the code of a known language, perhaps with a region."""
    return name.lower().replace("_", "-").split("-")[0] in LANGUAGES and len(name) <= 8


def is_language(name: str) -> bool:
    """Whether a name is the code or the name of a language."""
    return bool(language_code(name))


def is_known_column(name: str) -> bool:
    """Whether a name is a common column name: of a role, of a public dataset, or a language."""
    return name in _known_columns() or is_language(name)


@cache
def _known_columns() -> frozenset[str]:
    role_names = {name for names in NAMES_BY_ROLE.values() for name in names}
    pair_names = {name for pair in COLUMN_PAIRS for name in pair}
    return frozenset(role_names | pair_names | UNUSED_COLUMNS)


@cache
def _codes_by_name() -> dict[str, str]:
    """Language name -> code, for the names in each of NAME_LOCALES."""
    from babel import Locale  # loads its tables on import

    codes = {"英文": "en", "德文": "de", "法文": "fr", "日文": "ja", "韩文": "ko", "俄文": "ru", "汉语": "zh"}
    for locale in NAME_LOCALES:
        names = Locale(locale).languages
        for code in sorted(LANGUAGES & set(names)):
            codes.setdefault(names[code].lower(), code)
    return codes
