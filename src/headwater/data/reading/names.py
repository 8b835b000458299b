"""Known column names: the roles they play, pairs of public datasets, instruction formats, and languages."""

from __future__ import annotations

from functools import cache

ROLES: dict[str, tuple[str, ...]] = {  # role -> names people give it, best first
    "source": ("source", "src", "input", "inputs", "article", "document", "dialogue", "description", "original",
               "prompt", "instruction", "nl", "docstring", "src_text", "原文", "源文", "输入", "正文"),
    "target": ("target", "tgt", "output", "targets", "summary", "highlights", "synopsis", "translation", "code", "cmd",
               "command", "completion", "response", "tgt_text", "译文", "目标", "摘要", "输出", "译"),
    "input": (),  # a second part of the source, on a line of its own; may be empty
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

PAIRS = (  # (source, target) of public datasets whose names say nothing, or something else, alone
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

INSTRUCTIONS: dict[str, dict[str, str]] = {  # format -> role -> column; the column of `input` may be missing
    "Alpaca": {"source": "instruction", "input": "input", "target": "output"},
    "Dolly": {"source": "instruction", "input": "context", "target": "response"},
    "prompt/completion": {"source": "prompt", "target": "completion"},
}

UNUSED_NAMES = (  # common names of columns that play no role
    "id idx index no nr number key uid uuid guid title name author user username date time year timestamp created_at "
    "updated_at url link split language lang score votes likes count length topic source_file file path doc_id "
    "question_id review_id sentence_id user_id 编号 序号 标题 日期 时间 作者 来源"
)
UNUSED = frozenset(UNUSED_NAMES.split())

CODES = (
    "af ar bg bn ca cmn cs cy da de el en eng eo es et eu fa fi fr ga gl he hi hr hu hy id is it ja ka kk ko la lt lv "
    "mk mn ms nb nl no pl pt ro ru sk sl sq sr sv sw ta th tl tr uk ur uz vi yue zh zho"
)
LANGUAGES = frozenset(CODES.split())
SPOKEN = ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "tr", "ru", "ar", "zh", "ja", "ko")


def language_code(name: str) -> str:
    """The code of a language, from its code ('zh-CN') or its name in a common language; '' for what names none.

    >>> [language_code(name) for name in ("pt_BR", "German", "Deutsch", "德语", "text")]
    ['pt', 'de', 'de', 'de', '']
    """
    lower = name.strip().lower()
    if is_code(lower):
        return lower.replace("_", "-").split("-")[0]
    return _codes_by_name().get(lower, "") if len(lower) > 1 else ""


def is_code(name: str) -> bool:
    """'de', 'zh-CN', 'pt_BR': the code of a known language, perhaps with a region."""
    return name.lower().replace("_", "-").split("-")[0] in LANGUAGES and len(name) <= 8


def is_language(name: str) -> bool:
    """Whether a name is the code or the name of a language."""
    return bool(language_code(name))


def is_known(name: str) -> bool:
    """Whether a name is one that columns have: a role's, a dataset's or a language's."""
    return name in _known() or is_language(name)


@cache
def _known() -> frozenset[str]:
    of_roles = {name for names in ROLES.values() for name in names}
    of_pairs = {name for pair in PAIRS for name in pair}
    return frozenset(of_roles | of_pairs | UNUSED)


@cache
def _codes_by_name() -> dict[str, str]:
    """The names of the languages in each of SPOKEN."""
    from babel import Locale  # its tables are read only when they are wanted

    found = {"英文": "en", "德文": "de", "法文": "fr", "日文": "ja", "韩文": "ko", "俄文": "ru", "汉语": "zh"}
    for names in (Locale(speaker).languages for speaker in SPOKEN):
        for code in sorted(LANGUAGES & set(names)):
            found.setdefault(names[code].lower(), code)
    return found
