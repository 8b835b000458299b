"""Regular expressions of tokenizer files: the known ones, and a check that others cannot backtrack without bound.

A pattern from a file runs on every text, so a hostile one could hang the process (ReDoS). Published patterns are
allowed; any other must be short, without repeated groups and back-references, and with at most four open-ended
repeats in each alternative.
"""

from __future__ import annotations

import re

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MULTIPLE_SPACES = " {2,}"
EDGE_SPACES = "^ +| +$"
KNOWN_PATTERNS = frozenset({GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN, MULTIPLE_SPACES, EDGE_SPACES})

MAX_PATTERN_CHARACTERS = 300
MAX_OPEN_REPEATS = 4
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
_ESCAPE = re.compile(r"\\(?:[pP]\{\^?\w{1,30}\}|x\{[0-9a-fA-F]{1,6}\}|.)", re.DOTALL)
_OPEN_REPEAT = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
_ONE_CHARACTER = re.compile(r"\\(?:[pP]\{\^?\w{1,30}\}|x\{[0-9a-fA-F]{1,6}\}|[dDsSwWhHnrtfv]|[^\w<>`'])")  # one each
_SIMPLE_CLASS = re.compile(r"\[\^?[^\[\]\\]+\]")
_COUNTED = re.compile(r"\{(\d*),?\d*\}")
_NONEMPTY_ATOM = re.compile(r"[^\^$*+?{}|]\+?(?![*+?])")


def check_pattern(pattern: str, where: object) -> None:
    """Raise BadFile for a regular expression that might backtrack without bound."""
    if pattern in KNOWN_PATTERNS:
        return
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise BadFile(
            _(
                "{where}: a pattern must have at most {max_characters} characters, {pattern} has {num_characters}",
                where=where,
                max_characters=MAX_PATTERN_CHARACTERS,
                pattern=quote(pattern, 40),
                num_characters=len(pattern),
            )
        )

    # back-references
    if re.search(r"\\[1-9kgG]", pattern):
        raise BadFile(
            _(
                "{where}: the pattern {pattern} has a back-reference; such patterns can hang and are refused",
                where=where,
                pattern=quote(pattern),
            )
        )

    # repeats, in the pattern with every escape and character class as one letter
    simplified = _CLASS.sub("c", _ESCAPE.sub("e", pattern))
    if _REPEATED_GROUP.search(simplified):
        raise BadFile(
            _(
                "{where}: the pattern {pattern} repeats a group; such patterns can hang and are refused",
                where=where,
                pattern=quote(pattern),
            )
        )
    if any(len(_OPEN_REPEAT.findall(arm)) > MAX_OPEN_REPEATS for arm in simplified.split("|")):
        raise BadFile(
            _(
                "{where}: the pattern {pattern} has more than {max_repeats} open-ended repeats; such "
                "patterns can hang and are refused",
                where=where,
                pattern=quote(pattern),
                max_repeats=MAX_OPEN_REPEATS,
            )
        )


def never_matches_empty(pattern: str) -> bool:
    """Whether every match certainly has a character; False also for patterns that are not analysed here.

    >>> [never_matches_empty(p) for p in (" {2,}", r"\\s+|x", "a*", "^", "(a)", r"\\b", "a|b?", "a{0,2}")]
    [True, True, False, False, False, False, False, False]
    """
    simplified = _SIMPLE_CLASS.sub("c", _ONE_CHARACTER.sub("c", pattern))
    simplified = _COUNTED.sub(lambda count: "+" if int(count[1] or 0) else "*", simplified)
    is_simple = not re.search(r"[\\()\[\]{}]", simplified)
    return is_simple and all(_NONEMPTY_ATOM.search(arm) for arm in simplified.split("|"))
