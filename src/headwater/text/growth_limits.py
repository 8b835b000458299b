"""Upper bounds on how much longer the rules of a tokenizer.json can make a text, against expansion attacks.

Rules run one after another: ten short rules that each replace one character by ten turn one into ten billion.
Lengths are those of max_normalized_length(), so that Unicode normalization and lower case never count as growth; only
the rules of a file do.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.patterns import never_matches_empty

MAX_GROWTH = 16  # maximum factor by which a text may become longer
MAX_SPECIAL_TOKENS = 64  # tokens that a post_processor may put around a text
MAX_TRIE_KEYS = 1 << 15  # prefixes of a character map that are followed
MAX_KEY_BYTES = 5  # bytes: the library looks up single characters, and clusters of up to this size
BYTE_LEVEL_WEIGHT = 4 * 3  # four bytes per character, each written as a character of length up to 3

Component = Mapping[str, Any]
SEQUENCE_KEYS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


class GrowthRule(NamedTuple):
    """A rule of a tokenizer.json and the factor by which it can make a text longer."""

    name: str
    growth: float


def check_growth(spec: Mapping[str, Any], where: object) -> None:
    """Refuse rules that together may make a text more than MAX_GROWTH times as long."""
    for stages in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth = 1.0
        for rule in (rule for slot in stages for rule in growth_rules(spec[slot], slot)):
            growth *= rule.growth
            if growth > MAX_GROWTH:
                raise BadFile(
                    _(
                        "{where}: the rules of {stages} may make a text at most {max_growth} times as long, up to "
                        "{name} they make it {growth:,.0f} times as long; shorten what they write",
                        where=where,
                        stages=" and ".join(stages),
                        max_growth=MAX_GROWTH,
                        name=rule.name,
                        growth=growth,
                    )
                )
    if (
        count := sum(map(_num_special_tokens, iter_components(spec["post_processor"], "post_processor")))
    ) > MAX_SPECIAL_TOKENS:
        raise BadFile(
            _(
                "{where}: post_processor may add at most {max_tokens} tokens to a text, it adds {count:,}",
                where=where,
                max_tokens=MAX_SPECIAL_TOKENS,
                count=count,
            )
        )


def growth_rules(component: Component | None, stage: str) -> Iterator[GrowthRule]:
    """The rules of a stage (normalizer, …) with their growth factors, in the order in which they run."""
    for part in iter_components(component, stage):
        kind = part["type"]
        growth = GROWTH_BOUNDS.get((stage, kind))
        content = part.get("content", part.get("prepend", ""))
        name = f"{kind} {quote(content)}" if content else kind
        yield GrowthRule(name, 1.0 if growth is None else growth(part))


def iter_components(component: Component | None, stage: str) -> Iterator[Component]:
    """The components of a stage, sequences flattened."""
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component[SEQUENCE_KEYS[stage]]:
        yield from iter_components(part, stage)


def max_normalized_length(text: str) -> int:
    """The maximum length of a text under Unicode normalization and case mapping: 18 for U+FDFA, 1 for most characters.

    >>> [max_normalized_length(text) for text in ("abc", "é", "ﬁ", "ß", "\ufdfa")]
    [3, 2, 2, 2, 18]
    """
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold()))


# ---------------------------------------------------------------------------------------------------- single rules


def _replace_growth(rule: Component, length_of: Callable[[str], int]) -> float:
    """Replace: `content` for each match; a pattern that matches the empty text inserts it around each character."""
    if not {"pattern", "content"} <= rule.keys():
        return 1.0  # the library refuses it
    ((kind, pattern),) = rule["pattern"].items()
    content_length = length_of(rule["content"])
    if kind == "String":
        return max(1.0, content_length / length_of(pattern))
    return max(1.0, content_length) if never_matches_empty(pattern) or not content_length else 1.0 + 2 * content_length


def _charsmap_growth(rule: Component) -> float:
    """sentencepiece's character map: largest length of an entry / length of its key; inf: too many keys."""
    encoded = rule.get("precompiled_charsmap")
    raw = base64.b64decode(encoded) if encoded else b""
    size = int.from_bytes(raw[:4], "little")
    units = np.frombuffer(raw, "<u4", size // 4, 4) if raw else np.zeros(0, np.uint32)
    texts = raw[4 + size :]
    max_bytes = 4 * MAX_GROWTH * max_normalized_length("\ufdfa") + 4  # longer is above the limit for any key
    growth = 1.0
    try:
        for key, value in charsmap_keys(units):
            entry = texts[value : value + max_bytes].partition(b"\0")[0].decode(errors="replace")
            growth = max(
                growth, max_normalized_length(entry) / max(1, max_normalized_length(key.decode(errors="ignore")))
            )
    except OverflowError:
        return float("inf")
    return growth


def charsmap_keys(units: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """The keys of a double-array trie (Darts) with their values, up to MAX_KEY_BYTES; OverflowError: too many.

    A unit holds a label (low 8 bits, and bit 31 where it is a value), bit 8: a key ends here, and the offset of its
    children, in units of 256 where bit 9 is set.
    """
    if not len(units):
        return
    labels = np.arange(1, 256, dtype=np.int64)
    nodes = _child_offset(units[:1])
    keys = [b""]
    for _unused in range(MAX_KEY_BYTES):
        children = nodes[:, None] ^ labels
        in_range = children < len(units)
        child_units = units[np.where(in_range, children, 0)]
        row, label = np.nonzero(in_range & ((child_units & 0x800000FF) == labels))
        keys = [keys[r] + bytes((c + 1,)) for r, c in zip(row.tolist(), label.tolist(), strict=True)]
        if len(keys) > MAX_TRIE_KEYS:
            raise OverflowError(f"more than {MAX_TRIE_KEYS:,} keys")
        nodes = children[row, label] ^ _child_offset(child_units[row, label])
        ends = ((child_units[row, label] >> 8) & 1 == 1) & (nodes < len(units))
        values = units[np.where(ends, nodes, 0)] & 0x7FFFFFFF
        yield from ((keys[i], int(values[i])) for i in np.flatnonzero(ends))


def _child_offset(units: np.ndarray) -> np.ndarray:
    int64_units = units.astype(np.int64)
    return (int64_units >> 10) << ((int64_units & (1 << 9)) >> 6)


def _template_growth(template: Component) -> float:
    """TemplateProcessing: how often a template uses one text."""
    sides = [
        [item["Sequence"]["id"] for item in template.get(side, []) if "Sequence" in item] for side in TEMPLATE_KEYS
    ]
    return float(max(1, *(side.count(text) for side in sides for text in ("A", "B"))))


def _num_special_tokens(processor: Component) -> int:
    """Number of special tokens that a post_processor adds to a text."""
    tokens = processor.get("special_tokens", {})
    named = (
        [i["SpecialToken"]["id"] for i in processor.get(side, []) if "SpecialToken" in i] for side in TEMPLATE_KEYS
    )
    if processor["type"] == "TemplateProcessing":
        return max(sum(len(tokens[name]["ids"]) for name in side) for side in named)
    return 0 if processor["type"] == "ByteLevel" else 4


TEMPLATE_KEYS = ("single", "pair")
# Rules that are not here write at most one character for each that they read.
GROWTH_BOUNDS: dict[tuple[str, str], Callable[[Component], float]] = {
    ("normalizer", "Replace"): lambda rule: _replace_growth(rule, max_normalized_length),
    ("normalizer", "Prepend"): lambda rule: 1.0 + max_normalized_length(rule.get("prepend", "")),
    ("normalizer", "Precompiled"): _charsmap_growth,
    ("normalizer", "BertNormalizer"): lambda rule: 3.0 if rule.get("handle_chinese_chars", True) else 1.0,
    ("normalizer", "ByteLevel"): lambda rule: BYTE_LEVEL_WEIGHT,
    ("pre_tokenizer", "ByteLevel"): lambda rule: 5.0 if rule.get("add_prefix_space", True) else 4.0,
    ("pre_tokenizer", "Metaspace"): lambda rule: 2.0,
    ("post_processor", "TemplateProcessing"): _template_growth,
    ("decoder", "Replace"): lambda rule: _replace_growth(rule, len),
    ("decoder", "WordPiece"): lambda rule: 2.0,  # a space before each token
    ("decoder", "BPEDecoder"): lambda rule: 1.0 if rule.get("suffix", "</w>") else 3.0,
}
