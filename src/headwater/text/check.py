"""A tokenizer.json, checked against what we know before the library sees it.

Every component must be of a known type with known keys, every number bounded, every pattern safe (patterns.py), and
all rules together must not make a text much longer (growth.py).
Padding and truncation are ours to do and are dropped: a file could ask for padding to 10^12 places.
"""

from __future__ import annotations

from typing import Any

from headwater.errors import BadFile, nearest
from headwater.text import allowed
from headwater.text.allowed import MOST_TOKENS, Check
from headwater.text.growth import INNER, check_growth
from headwater.weights.files import shown

MOST_ADDED, DEEPEST = 100_000, 6


def checked(spec: dict[str, Any], where: object) -> dict[str, Any]:
    """The part of a tokenizer.json the library may see."""
    known = {"version", "truncation", "padding", "added_tokens", *SLOTS}
    for key in spec:
        if key not in known:
            raise BadFile(f"{where}: the key {shown(key)} is not known here; {nearest(key[:40], known)}")
    if not isinstance(spec.get("model"), dict):
        raise BadFile(f"{where}: a tokenizer must have a model")
    spec = {**spec, "truncation": None, "padding": None, "version": "1.0", "model": _typed(spec["model"])}
    for slot in SLOTS:
        if spec.setdefault(slot, None) is not None:
            _check_component(spec[slot], slot, where, 0)
    check_growth(spec, where)
    spec["added_tokens"] = _check_added(spec.get("added_tokens") or [], where)
    _check_model(spec["model"], where)
    return spec


def _typed(model: dict[str, Any]) -> dict[str, Any]:
    """Files of the first years leave the model's type out; its keys tell."""
    signs = {"merges": "BPE", "unk_id": "Unigram", "max_input_chars_per_word": "WordPiece", "vocab": "WordLevel"}
    return (
        model if "type" in model else {"type": next((t for sign, t in signs.items() if sign in model), None), **model}
    )


_BEHAVIOR = allowed.one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_REPLACE: dict[str, Check] = {"pattern": allowed.pattern, "content": allowed.text}
_BYTE_LEVEL: dict[str, Check] = {
    "add_prefix_space": allowed.flag,
    "trim_offsets": allowed.flag,
    "use_regex": allowed.flag,
}
_METASPACE: dict[str, Check] = {
    "replacement": lambda v, where: isinstance(v, str) and len(v) == 1,
    "str_rep": allowed.text,
    "add_prefix_space": allowed.flag,
    "prepend_scheme": allowed.one_of("first", "never", "always"),
    "split": allowed.flag,
}

# slot -> type -> key -> check; a list under INNER holds components of the same slot.
SLOTS: dict[str, dict[str, dict[str, Check]]] = {
    "normalizer": {
        "BertNormalizer": {
            "clean_text": allowed.flag,
            "handle_chinese_chars": allowed.flag,
            "strip_accents": allowed.maybe(allowed.flag),
            "lowercase": allowed.flag,
        },
        "Strip": {"strip_left": allowed.flag, "strip_right": allowed.flag},
        "Prepend": {"prepend": allowed.text},
        "Replace": _REPLACE,
        "Precompiled": {"precompiled_charsmap": allowed.maybe(allowed.charsmap)},
        "Sequence": {},
        "ByteLevel": {},
        **{name: {} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")},
    },
    "pre_tokenizer": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Digits": {"individual_digits": allowed.flag},
        "Punctuation": {"behavior": _BEHAVIOR},
        "Split": {"pattern": allowed.pattern, "behavior": _BEHAVIOR, "invert": allowed.flag},
        "CharDelimiterSplit": {"delimiter": _METASPACE["replacement"]},
        "Sequence": {},
        **{name: {} for name in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")},
    },
    "model": {
        "BPE": {
            "vocab": allowed.anything,
            "merges": allowed.anything,
            "dropout": allowed.null,
            "unk_token": allowed.maybe(allowed.text),
            "fuse_unk": allowed.flag,
            "continuing_subword_prefix": allowed.maybe(allowed.text),
            "end_of_word_suffix": allowed.maybe(allowed.text),
            "byte_fallback": allowed.flag,
            "ignore_merges": allowed.flag,
        },
        "WordPiece": {
            "vocab": allowed.anything,
            "unk_token": allowed.text,
            "continuing_subword_prefix": allowed.text,
            "max_input_chars_per_word": allowed.whole(1000),
        },
        "WordLevel": {"vocab": allowed.anything, "unk_token": allowed.text},
        "Unigram": {
            "vocab": allowed.anything,
            "unk_id": allowed.maybe(allowed.whole(MOST_TOKENS)),
            "byte_fallback": allowed.flag,
        },
    },
    "post_processor": {
        "BertProcessing": {"sep": allowed.special, "cls": allowed.special},
        "RobertaProcessing": {
            "sep": allowed.special,
            "cls": allowed.special,
            "trim_offsets": allowed.flag,
            "add_prefix_space": allowed.flag,
        },
        "ByteLevel": _BYTE_LEVEL,
        "Sequence": {},
        "TemplateProcessing": {
            "single": allowed.template,
            "pair": allowed.template,
            "special_tokens": allowed.template_tokens,
        },
    },
    "decoder": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Replace": _REPLACE,
        "ByteFallback": {},
        "Fuse": {},
        "WordPiece": {"prefix": allowed.text, "cleanup": allowed.flag},
        "BPEDecoder": {"suffix": allowed.text},
        "Sequence": {},
        "Strip": {"content": _METASPACE["replacement"], "start": allowed.whole(100), "stop": allowed.whole(100)},
    },
}


def _check_component(value: Any, slot: str, where: object, depth: int) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    keys = SLOTS[slot].get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise BadFile(f"{where}: {slot} of type {shown(kind)} is not known; {nearest(str(kind)[:40], SLOTS[slot])}")
    if kind == "Sequence":
        inner = value.get(INNER[slot])
        if value.keys() != {"type", INNER[slot]} or not isinstance(inner, list) or len(inner) > 64 or depth > DEEPEST:
            raise BadFile(f"{where}: a Sequence must list at most 64 {INNER[slot]}, at most {DEEPEST} deep")
        for part in inner:
            _check_component(part, slot, where, depth + 1)
        return
    for key, setting in value.items():
        if key != "type" and (key not in keys or not keys[key](setting, where)):
            raise BadFile(f"{where}: {slot} {kind}: {shown(key)} = {shown(setting)} is not known or not allowed")
    if kind == "TemplateProcessing":
        _check_template(value, where)


def _check_template(value: dict[str, Any], where: object) -> None:
    items = [*value.get("single", []), *value.get("pair", [])]
    used = {item["SpecialToken"]["id"] for item in items if "SpecialToken" in item}
    if missing := used - value.get("special_tokens", {}).keys():
        raise BadFile(f"{where}: the template names {shown(sorted(missing)[0])} without saying which token it is")


def _check_added(tokens: Any, where: object) -> list[dict[str, Any]]:
    if not isinstance(tokens, list) or len(tokens) > MOST_ADDED:
        raise BadFile(f"{where}: added_tokens must be a list of at most {MOST_ADDED:,}")
    flags = {"single_word", "lstrip", "rstrip", "normalized", "special"}
    for token in tokens:
        fits = (
            isinstance(token, dict)
            and token.keys() == {"id", "content", *flags}
            and allowed.text(token["content"], where)
        )
        if (
            not fits
            or not allowed.whole(MOST_TOKENS)(token["id"], where)
            or not token["content"]
            or not all(type(token[flag]) is bool for flag in flags)
        ):
            raise BadFile(f"{where}: an added token must have an id, a content and five flags, got {shown(token)}")
    if len({t["id"] for t in tokens}) != len(tokens) or len({t["content"] for t in tokens}) != len(tokens):
        raise BadFile(f"{where}: two added tokens share an id or a content; each must be its own")
    return sorted(tokens, key=lambda token: token["id"])


def _check_model(model: dict[str, Any], where: object) -> None:
    vocab = model.get("vocab")
    if model["type"] == "Unigram":
        pieces = vocab if isinstance(vocab, list) else []
        fits = all(
            isinstance(p, list) and len(p) == 2 and allowed.text(p[0], where) and type(p[1]) in (int, float)
            for p in pieces
        )
        count = len(pieces)
        if not isinstance(model.get("unk_id"), (int, type(None))) or (model.get("unk_id") or 0) >= max(count, 1):
            raise BadFile(f"{where}: unk_id {shown(model.get('unk_id'))} must be one of the {count:,} pieces")
    else:
        words = vocab if isinstance(vocab, dict) else {}
        count = len(words)
        ids = words.values()
        fits = all(type(n) is int and 0 <= n <= MOST_TOKENS for n in ids) and len(set(ids)) == count
    if not fits or not 0 < count <= MOST_TOKENS:
        raise BadFile(
            f"{where}: the vocabulary must hold 1 to {MOST_TOKENS:,} pieces, each with an id or a score of its own"
        )
    if model["type"] == "BPE":
        _check_merges(model, where)


def _check_merges(model: dict[str, Any], where: object) -> None:
    merges, vocab = model.get("merges"), model["vocab"]
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or len(merges) > MOST_TOKENS:
        raise BadFile(f"{where}: merges must be a list of at most {MOST_TOKENS:,}")
    for merge in merges:
        try:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            fits = left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab
        except (TypeError, ValueError, AttributeError):  # not two texts
            fits = False
        if not fits:
            raise BadFile(f"{where}: the merge {shown(merge)} must join two pieces of the vocabulary into a third")
