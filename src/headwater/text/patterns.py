"""Regular expressions that a tokenizer file may bring, and which of them are let in.

A pattern from a file runs on every text, so a hostile one could hang the machine by backtracking. Published patterns
are known by heart; any other must be short and of a shape that can not explode: no repeated groups, no
back-references, and at most four open-ended repeats in each alternative.
"""

from __future__ import annotations

import re

from headwater.errors import BadFile
from headwater.weights.files import shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACES, ENDS = " {2,}", "^ +| +$"
KNOWN = frozenset({GPT2, LLAMA3, QWEN2, SPACES, ENDS})

LONGEST, MOST_REPEATS = 300, 4
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w{1,30}\}|x\{[0-9a-fA-F]{1,6}\}|.)", re.DOTALL)
_OPEN_REPEAT = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_ONE_CHARACTER = re.compile(r"\\(?:[pP]\{\^?\w{1,30}\}|x\{[0-9a-fA-F]{1,6}\}|[dDsSwWhHnrtfv]|[^\w<>`'])")  # one each
_SIMPLE_CLASS = re.compile(r"\[\^?[^\[\]\\]+\]")
_COUNTED = re.compile(r"\{(\d*),?\d*\}")
_FIRM_ATOM = re.compile(r"[^\^$*+?{}|]\+?(?![*+?])")


def check_pattern(pattern: str, where: object) -> None:
    """Refuse a regular expression that might take for ever."""
    if pattern in KNOWN:
        return
    if len(pattern) > LONGEST:
        raise BadFile(
            f"{where}: a pattern must have at most {LONGEST} characters, {shown(pattern, 40)} has {len(pattern)}"
        )
    if re.search(r"\\[1-9kgG]", pattern):
        raise BadFile(
            f"{where}: the pattern {shown(pattern)} refers back to itself; such patterns can hang and are refused"
        )
    bare = _CLASS.sub("c", _ESCAPE.sub("e", pattern))
    if _REPEATED_GROUP.search(bare):
        raise BadFile(f"{where}: the pattern {shown(pattern)} repeats a group; such patterns can hang and are refused")
    if any(len(_OPEN_REPEAT.findall(arm)) > MOST_REPEATS for arm in bare.split("|")):
        raise BadFile(
            f"{where}: the pattern {shown(pattern)} has more than {MOST_REPEATS} open repeats in a row; refused"
        )


def firm(pattern: str) -> bool:
    """Whether every match certainly has a character. No is also said of what is not understood here.

    >>> [firm(p) for p in (" {2,}", r"\\s+|x", "a*", "^", "(a)", r"\\b", "a|b?", "a{0,2}")]
    [True, True, False, False, False, False, False, False]
    """
    bare = _SIMPLE_CLASS.sub("c", _ONE_CHARACTER.sub("c", pattern))
    bare = _COUNTED.sub(lambda found: "+" if int(found[1] or 0) else "*", bare)
    understood = not re.search(r"[\\()\[\]{}]", bare)
    return understood and all(_FIRM_ATOM.search(arm) for arm in bare.split("|"))
