"""A tokenizer.json, checked against what we know before the library sees it.

Every component must be of a known type with known keys, every number bounded, every pattern safe (patterns.py).
Padding and truncation are ours to do and are dropped: a file could ask for padding to 10^12 places.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from headwater.errors import BadFile, nearest
from headwater.text.patterns import check_pattern
from headwater.weights.files import shown

MOST_TOKENS, MOST_ADDED, MOST_CHARACTERS, DEEPEST = 2_000_000, 100_000, 2_000, 6

Check = Callable[[Any, object], bool]


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
    spec["added_tokens"] = _check_added(spec.get("added_tokens") or [], where)
    _check_model(spec["model"], where)
    return spec


def _typed(model: dict[str, Any]) -> dict[str, Any]:
    """Files of the first years leave the model's type out; its keys tell."""
    signs = {"merges": "BPE", "unk_id": "Unigram", "max_input_chars_per_word": "WordPiece", "vocab": "WordLevel"}
    return (
        model if "type" in model else {"type": next((t for sign, t in signs.items() if sign in model), None), **model}
    )


def _text(value: Any, where: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def _flag(value: Any, where: object) -> bool:
    return type(value) is bool


def _null(value: Any, where: object) -> bool:
    return value is None


def _whole(most: int) -> Check:
    return lambda value, where: type(value) is int and 0 <= value <= most


def _one_of(*words: str) -> Check:
    return lambda value, where: value in words and isinstance(value, str)


def _maybe(check: Check) -> Check:
    return lambda value, where: value is None or check(value, where)


def _charsmap(value: Any, where: object) -> bool:
    """sentencepiece's character map: the size of a table of 4-byte units, the table, then texts ended by NUL."""
    if not isinstance(value, str) or len(value) > 8_000_000:
        return False
    try:
        raw = base64.b64decode(value, validate=True)
        size = int.from_bytes(raw[:4], "little")
        raw[4 + size :].decode()
    except ValueError:  # not base64, or not UTF-8
        return False
    return len(raw) >= 4 and size % 4 == 0 and 0 < size <= len(raw) - 4


def _anything(value: Any, where: object) -> bool:
    return True  # checked as a whole in _check_model


def _pattern(value: Any, where: object) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, text),) = value.items()
    if kind == "Regex" and _text(text, where):
        check_pattern(text, where)
    return kind in ("Regex", "String") and _text(text, where) and text != ""


def _special(value: Any, where: object) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and _text(value[0], where) and _whole(MOST_TOKENS)(value[1], where)
    )


def _template(value: Any, where: object) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(_template_item(item, where) for item in value)


def _template_item(item: Any, where: object) -> bool:
    if not isinstance(item, dict) or len(item) != 1:
        return False
    ((kind, said),) = item.items()
    known = isinstance(said, dict) and said.keys() == {"id", "type_id"} and _whole(15)(said["type_id"], where)
    return known and (
        said["id"] in ("A", "B") if kind == "Sequence" else kind == "SpecialToken" and _text(said["id"], where)
    )


def _template_tokens(value: Any, where: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= 64
        and all(
            isinstance(t, dict)
            and t.keys() == {"id", "ids", "tokens"}
            and t["id"] == name
            and isinstance(t["ids"], list)
            and isinstance(t["tokens"], list)
            and 0 < len(t["ids"]) == len(t["tokens"]) <= 64
            and all(_whole(MOST_TOKENS)(n, where) for n in t["ids"])
            and all(_text(s, where) for s in t["tokens"])
            for name, t in value.items()
        )
    )


_BEHAVIOR = _one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_REPLACE: dict[str, Check] = {"pattern": _pattern, "content": _text}
_BYTE_LEVEL: dict[str, Check] = {"add_prefix_space": _flag, "trim_offsets": _flag, "use_regex": _flag}
_METASPACE: dict[str, Check] = {
    "replacement": lambda v, where: isinstance(v, str) and len(v) == 1,
    "str_rep": _text,
    "add_prefix_space": _flag,
    "prepend_scheme": _one_of("first", "never", "always"),
    "split": _flag,
}

# slot -> type -> key -> check; a list under INNER holds components of the same slot.
SLOTS: dict[str, dict[str, dict[str, Check]]] = {
    "normalizer": {
        "BertNormalizer": {
            "clean_text": _flag,
            "handle_chinese_chars": _flag,
            "strip_accents": _maybe(_flag),
            "lowercase": _flag,
        },
        "Strip": {"strip_left": _flag, "strip_right": _flag},
        "Prepend": {"prepend": _text},
        "Replace": _REPLACE,
        "Precompiled": {"precompiled_charsmap": _maybe(_charsmap)},
        "Sequence": {},
        "ByteLevel": {},
        **{name: {} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")},
    },
    "pre_tokenizer": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Digits": {"individual_digits": _flag},
        "Punctuation": {"behavior": _BEHAVIOR},
        "Split": {"pattern": _pattern, "behavior": _BEHAVIOR, "invert": _flag},
        "CharDelimiterSplit": {"delimiter": _METASPACE["replacement"]},
        "Sequence": {},
        **{name: {} for name in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")},
    },
    "model": {
        "BPE": {
            "vocab": _anything,
            "merges": _anything,
            "dropout": _null,
            "unk_token": _maybe(_text),
            "fuse_unk": _flag,
            "continuing_subword_prefix": _maybe(_text),
            "end_of_word_suffix": _maybe(_text),
            "byte_fallback": _flag,
            "ignore_merges": _flag,
        },
        "WordPiece": {
            "vocab": _anything,
            "unk_token": _text,
            "continuing_subword_prefix": _text,
            "max_input_chars_per_word": _whole(1000),
        },
        "WordLevel": {"vocab": _anything, "unk_token": _text},
        "Unigram": {"vocab": _anything, "unk_id": _maybe(_whole(MOST_TOKENS)), "byte_fallback": _flag},
    },
    "post_processor": {
        "BertProcessing": {"sep": _special, "cls": _special},
        "RobertaProcessing": {"sep": _special, "cls": _special, "trim_offsets": _flag, "add_prefix_space": _flag},
        "ByteLevel": _BYTE_LEVEL,
        "Sequence": {},
        "TemplateProcessing": {"single": _template, "pair": _template, "special_tokens": _template_tokens},
    },
    "decoder": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Replace": _REPLACE,
        "ByteFallback": {},
        "Fuse": {},
        "WordPiece": {"prefix": _text, "cleanup": _flag},
        "BPEDecoder": {"suffix": _text},
        "Sequence": {},
        "Strip": {"content": _METASPACE["replacement"], "start": _whole(100), "stop": _whole(100)},
    },
}
INNER = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
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
        fits = isinstance(token, dict) and token.keys() == {"id", "content", *flags} and _text(token["content"], where)
        if (
            not fits
            or not _whole(MOST_TOKENS)(token["id"], where)
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
            isinstance(p, list) and len(p) == 2 and _text(p[0], where) and type(p[1]) in (int, float) for p in pieces
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
        pair = merge.split(" ") if isinstance(merge, str) else merge
        fits = isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair)
        if (
            not fits
            or pair[0] not in vocab
            or pair[1] not in vocab
            or pair[0] + pair[1].removeprefix(prefix) not in vocab
        ):
            raise BadFile(f"{where}: the merge {shown(merge)} must join two pieces of the vocabulary into a third")
