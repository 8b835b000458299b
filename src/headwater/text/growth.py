"""How much longer a text may become inside a tokenizer: a bound for each rule of a tokenizer.json, multiplied.

Rules run one after another, so ten short ones that each write ten characters for one make ten billion of one.
Lengths are counted as weight(): then Unicode's own normal forms and lower case never make a text heavier, and only
rules that a file brings can.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from headwater.errors import BadFile
from headwater.text.patterns import firm
from headwater.weights.files import shown

MOST_GROWTH = 16  # times a text may become longer
MOST_SPECIALS = 64  # tokens that a post_processor may put around a text
MOST_KEYS = 1 << 15  # prefixes of a character map that are followed
LONGEST_KEY = 5  # bytes: the library looks up single characters, and clusters of up to this size
BYTE_LEVEL_WEIGHT = 4 * 3  # four bytes a character, each shown as a character of weight up to 3

Component = Mapping[str, Any]
INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


class Rule(NamedTuple):
    name: str
    growth: float


def check_growth(spec: Mapping[str, Any], where: object) -> None:
    """Refuse rules that together may make a text more than MOST_GROWTH times as long."""
    for slots in (("normalizer", "pre_tokenizer"), ("post_processor",), ("decoder",)):
        growth = 1.0
        for rule in (rule for slot in slots for rule in rules(spec[slot], slot)):
            growth *= rule.growth
            if growth > MOST_GROWTH:
                raise BadFile(
                    f"{where}: the rules of {' and '.join(slots)} may make a text at most {MOST_GROWTH} times as long, "
                    f"up to {rule.name} they make it {growth:,.0f} times as long; shorten what they write"
                )
    if (count := sum(map(_specials, components(spec["post_processor"], "post_processor")))) > MOST_SPECIALS:
        raise BadFile(f"{where}: post_processor may add at most {MOST_SPECIALS} tokens to a text, it adds {count:,}")


def rules(component: Component | None, slot: str) -> Iterator[Rule]:
    """Every rule of a slot with its growth, in the order in which they run."""
    for part in components(component, slot):
        kind = part["type"]
        growth = GROWTH.get((slot, kind))
        said = part.get("content", part.get("prepend", ""))
        yield Rule(f"{kind} {shown(said)}" if said else kind, 1.0 if growth is None else growth(part))


def components(component: Component | None, slot: str) -> Iterator[Component]:
    if component is None:
        return
    if component["type"] != "Sequence":
        yield component
        return
    for part in component[INNER[slot]]:
        yield from components(part, slot)


def weight(text: str) -> int:
    """The longest that Unicode's normal forms and case mappings can make a text: 18 for U+FDFA, 1 for most characters.

    >>> weight("abc"), weight("é"), weight("ﬁ"), weight("ß"), weight("\ufdfa")
    (3, 2, 2, 2, 18)
    """
    return len(unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold()))


# ---------------------------------------------------------------------------------------------------- single rules


def _replace(rule: Component, size: Callable[[str], int]) -> float:
    """content for each match; a pattern that matches the empty text puts it before and after each character."""
    if not {"pattern", "content"} <= rule.keys():
        return 1.0  # the library refuses it
    ((kind, pattern),) = rule["pattern"].items()
    written = size(rule["content"])
    if kind == "String":
        return max(1.0, written / size(pattern))
    return max(1.0, written) if firm(pattern) or not written else 1.0 + 2 * written


def _precompiled(rule: Component) -> float:
    """sentencepiece's character map: the most that an entry writes for what it is looked up by; inf: too many keys."""
    said = rule.get("precompiled_charsmap")
    raw = base64.b64decode(said) if said else b""
    size = int.from_bytes(raw[:4], "little")
    units, texts = np.frombuffer(raw, "<u4", size // 4, 4) if raw else np.zeros(0, np.uint32), raw[4 + size :]
    longest = 4 * MOST_GROWTH * weight("\ufdfa") + 4  # bytes; what is longer is too long for any key
    growth = 1.0
    try:
        for key, value in charsmap_keys(units):
            entry = texts[value : value + longest].partition(b"\0")[0].decode(errors="replace")
            growth = max(growth, weight(entry) / max(1, weight(key.decode(errors="ignore"))))
    except OverflowError:
        return float("inf")
    return growth


def charsmap_keys(units: np.ndarray) -> Iterator[tuple[bytes, int]]:
    """The keys of a double-array trie (Darts) with their values, up to LONGEST_KEY bytes; OverflowError: too many.

    A unit holds a label (low 8 bits, and bit 31 where it is a value), bit 8: a key ends here, and the offset of its
    children, in units of 256 where bit 9 is set.
    """
    if not len(units):
        return
    labels = np.arange(1, 256, dtype=np.int64)
    nodes, keys = _offset(units[:1]), [b""]
    for _ in range(LONGEST_KEY):
        children = nodes[:, None] ^ labels
        inside = children < len(units)
        met = units[np.where(inside, children, 0)]
        row, label = np.nonzero(inside & ((met & 0x800000FF) == labels))
        keys = [keys[r] + bytes((c + 1,)) for r, c in zip(row.tolist(), label.tolist(), strict=True)]
        if len(keys) > MOST_KEYS:
            raise OverflowError(f"more than {MOST_KEYS:,} keys")
        nodes = children[row, label] ^ _offset(met[row, label])
        ends = ((met[row, label] >> 8) & 1 == 1) & (nodes < len(units))
        values = units[np.where(ends, nodes, 0)] & 0x7FFFFFFF
        yield from ((keys[i], int(values[i])) for i in np.flatnonzero(ends))


def _offset(units: np.ndarray) -> np.ndarray:
    wide = units.astype(np.int64)
    return (wide >> 10) << ((wide & (1 << 9)) >> 6)


def _repeats(template: Component) -> float:
    """How often a template uses one text."""
    sides = [[item["Sequence"]["id"] for item in template.get(side, []) if "Sequence" in item] for side in SIDES]
    return float(max(1, *(side.count(text) for side in sides for text in ("A", "B"))))


def _specials(processor: Component) -> int:
    """Tokens that a post_processor puts around a text."""
    tokens = processor.get("special_tokens", {})
    named = ([i["SpecialToken"]["id"] for i in processor.get(side, []) if "SpecialToken" in i] for side in SIDES)
    most = max(sum(len(tokens[name]["ids"]) for name in side) for side in named)
    return most if processor["type"] == "TemplateProcessing" else 4 * (processor["type"] != "ByteLevel")


SIDES = ("single", "pair")
# Rules that are not here write at most one character for each that they read.
GROWTH: dict[tuple[str, str], Callable[[Component], float]] = {
    ("normalizer", "Replace"): lambda rule: _replace(rule, weight),
    ("normalizer", "Prepend"): lambda rule: 1.0 + weight(rule.get("prepend", "")),  # before each stretch of text
    ("normalizer", "Precompiled"): _precompiled,
    ("normalizer", "BertNormalizer"): lambda rule: 3.0 if rule.get("handle_chinese_chars", True) else 1.0,
    ("normalizer", "ByteLevel"): lambda rule: BYTE_LEVEL_WEIGHT,
    ("pre_tokenizer", "ByteLevel"): lambda rule: 5.0 if rule.get("add_prefix_space", True) else 4.0,
    ("pre_tokenizer", "Metaspace"): lambda rule: 2.0,
    ("post_processor", "TemplateProcessing"): _repeats,
    ("decoder", "Replace"): lambda rule: _replace(rule, len),
    ("decoder", "WordPiece"): lambda rule: 2.0,  # a space before each token
    ("decoder", "BPEDecoder"): lambda rule: 1.0 if rule.get("suffix", "</w>") else 3.0,
}
