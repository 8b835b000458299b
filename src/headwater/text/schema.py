"""Schema of tokenizer.json: components, keys and value ranges, checked before the `tokenizers` library sees them.

Every component must be of a known type with known keys, every number bounded, every pattern safe (patterns.py), and
all rules together must not make a text much longer (growth_limits.py). Padding and truncation are dropped: a file
could ask for padding to 10^12 tokens.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from headwater.errors import BadFile, nearest
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.growth_limits import SEQUENCE_KEYS, check_growth
from headwater.text.patterns import check_pattern

MAX_VOCAB_SIZE = 2_000_000
MAX_TEXT_CHARACTERS = 2_000

Validator = Callable[[Any, object], bool]  # (value, name of the file) -> valid


def is_text(value: Any, where: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT_CHARACTERS


def is_bool(value: Any, where: object) -> bool:
    return type(value) is bool


def is_null(value: Any, where: object) -> bool:
    return value is None


def int_up_to(max_value: int) -> Validator:
    return lambda value, where: type(value) is int and 0 <= value <= max_value


def one_of(*words: str) -> Validator:
    return lambda value, where: value in words and isinstance(value, str)


def optional(validator: Validator) -> Validator:
    return lambda value, where: value is None or validator(value, where)


def is_charsmap(value: Any, where: object) -> bool:
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


def anything(value: Any, where: object) -> bool:
    return True  # checked in _check_model


def is_pattern(value: Any, where: object) -> bool:
    """{"String": text} or {"Regex": a safe regular expression}."""
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, expression),) = value.items()
    if kind == "Regex" and is_text(expression, where):
        check_pattern(expression, where)
    return kind in ("Regex", "String") and is_text(expression, where) and expression != ""


def is_special_token(value: Any, where: object) -> bool:
    """The special token of a BERT or RoBERTa post-processor: [text, id]."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and is_text(value[0], where)
        and int_up_to(MAX_VOCAB_SIZE)(value[1], where)
    )


def is_template(value: Any, where: object) -> bool:
    return isinstance(value, list) and len(value) <= 64 and all(is_template_item(item, where) for item in value)


def is_template_item(item: Any, where: object) -> bool:
    """An item of a template: a sequence (A or B) or a special token, with its token type."""
    if not isinstance(item, dict) or len(item) != 1:
        return False
    ((kind, reference),) = item.items()
    if not isinstance(reference, dict) or reference.keys() != {"id", "type_id"}:
        return False
    if not int_up_to(15)(reference["type_id"], where):
        return False
    if kind == "Sequence":
        return reference["id"] in ("A", "B")
    return kind == "SpecialToken" and is_text(reference["id"], where)


def are_template_tokens(value: Any, where: object) -> bool:
    """The special tokens that a template names, each with its ids."""
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
            and all(int_up_to(MAX_VOCAB_SIZE)(n, where) for n in t["ids"])
            and all(is_text(s, where) for s in t["tokens"])
            for name, t in value.items()
        )
    )


# --------------------------------------------------------------------------------------------------------- components

MAX_ADDED_TOKENS = 100_000
MAX_DEPTH = 6


def validate_spec(spec: dict[str, Any], where: object) -> dict[str, Any]:
    """A checked copy of a tokenizer.json, with what the library needs; BadFile if it is not valid."""
    known = {"version", "truncation", "padding", "added_tokens", *COMPONENT_SCHEMAS}
    for key in spec:
        if key not in known:
            raise BadFile(
                _(
                    "{where}: the key {key} is not known; {nearest}",
                    where=where,
                    key=quote(key),
                    nearest=nearest(key[:40], known),
                )
            )
    if not isinstance(spec.get("model"), dict):
        raise BadFile(_("{where}: a tokenizer must have a model", where=where))
    spec = {**spec, "truncation": None, "padding": None, "version": "1.0", "model": _with_model_type(spec["model"])}
    for slot in COMPONENT_SCHEMAS:
        if spec.setdefault(slot, None) is not None:
            _check_component(spec[slot], slot, where, 0)
    check_growth(spec, where)
    spec["added_tokens"] = _check_added_tokens(spec.get("added_tokens") or [], where)
    _check_model(spec["model"], where)
    return spec


def _with_model_type(model: dict[str, Any]) -> dict[str, Any]:
    """Add the model type, which old files leave out; it follows from the keys."""
    signs = {"merges": "BPE", "unk_id": "Unigram", "max_input_chars_per_word": "WordPiece", "vocab": "WordLevel"}
    return model if "type" in model else {"type": next((t for key, t in signs.items() if key in model), None), **model}


_BEHAVIOR = one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_REPLACE: dict[str, Validator] = {"pattern": is_pattern, "content": is_text}
_BYTE_LEVEL: dict[str, Validator] = {"add_prefix_space": is_bool, "trim_offsets": is_bool, "use_regex": is_bool}
_METASPACE: dict[str, Validator] = {
    "replacement": lambda v, where: isinstance(v, str) and len(v) == 1,
    "str_rep": is_text,
    "add_prefix_space": is_bool,
    "prepend_scheme": one_of("first", "never", "always"),
    "split": is_bool,
}

# stage -> type -> key -> validator; a Sequence has a list of components of the same stage
COMPONENT_SCHEMAS: dict[str, dict[str, dict[str, Validator]]] = {
    "normalizer": {
        "BertNormalizer": {
            "clean_text": is_bool,
            "handle_chinese_chars": is_bool,
            "strip_accents": optional(is_bool),
            "lowercase": is_bool,
        },
        "Strip": {"strip_left": is_bool, "strip_right": is_bool},
        "Prepend": {"prepend": is_text},
        "Replace": _REPLACE,
        "Precompiled": {"precompiled_charsmap": optional(is_charsmap)},
        "Sequence": {},
        "ByteLevel": {},
        **{name: {} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt")},
    },
    "pre_tokenizer": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Digits": {"individual_digits": is_bool},
        "Punctuation": {"behavior": _BEHAVIOR},
        "Split": {"pattern": is_pattern, "behavior": _BEHAVIOR, "invert": is_bool},
        "CharDelimiterSplit": {"delimiter": _METASPACE["replacement"]},
        "Sequence": {},
        **{name: {} for name in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit", "UnicodeScripts")},
    },
    "model": {
        "BPE": {
            "vocab": anything,
            "merges": anything,
            "dropout": is_null,
            "unk_token": optional(is_text),
            "fuse_unk": is_bool,
            "continuing_subword_prefix": optional(is_text),
            "end_of_word_suffix": optional(is_text),
            "byte_fallback": is_bool,
            "ignore_merges": is_bool,
        },
        "WordPiece": {
            "vocab": anything,
            "unk_token": is_text,
            "continuing_subword_prefix": is_text,
            "max_input_chars_per_word": int_up_to(1000),
        },
        "WordLevel": {"vocab": anything, "unk_token": is_text},
        "Unigram": {"vocab": anything, "unk_id": optional(int_up_to(MAX_VOCAB_SIZE)), "byte_fallback": is_bool},
    },
    "post_processor": {
        "BertProcessing": {"sep": is_special_token, "cls": is_special_token},
        "RobertaProcessing": {
            "sep": is_special_token,
            "cls": is_special_token,
            "trim_offsets": is_bool,
            "add_prefix_space": is_bool,
        },
        "ByteLevel": _BYTE_LEVEL,
        "Sequence": {},
        "TemplateProcessing": {"single": is_template, "pair": is_template, "special_tokens": are_template_tokens},
    },
    "decoder": {
        "ByteLevel": _BYTE_LEVEL,
        "Metaspace": _METASPACE,
        "Replace": _REPLACE,
        "ByteFallback": {},
        "Fuse": {},
        "WordPiece": {"prefix": is_text, "cleanup": is_bool},
        "BPEDecoder": {"suffix": is_text},
        "Sequence": {},
        "Strip": {"content": _METASPACE["replacement"], "start": int_up_to(100), "stop": int_up_to(100)},
    },
}


def _check_component(value: Any, stage: str, where: object, depth: int) -> None:
    """Check the type, keys and values of a component of a stage (normalizer, …); a Sequence part by part."""
    kind = value.get("type") if isinstance(value, dict) else None
    keys = COMPONENT_SCHEMAS[stage].get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise BadFile(
            _(
                "{where}: {stage} of type {kind} is not known; {nearest}",
                where=where,
                stage=stage,
                kind=quote(kind),
                nearest=nearest(str(kind)[:40], COMPONENT_SCHEMAS[stage]),
            )
        )
    if kind == "Sequence":
        inner = value.get(SEQUENCE_KEYS[stage])
        if (
            value.keys() != {"type", SEQUENCE_KEYS[stage]}
            or not isinstance(inner, list)
            or len(inner) > 64
            or depth > MAX_DEPTH
        ):
            raise BadFile(
                _(
                    "{where}: a Sequence must list at most 64 {components}, at most {max_depth} deep",
                    where=where,
                    components=SEQUENCE_KEYS[stage],
                    max_depth=MAX_DEPTH,
                )
            )
        for part in inner:
            _check_component(part, stage, where, depth + 1)
        return

    for key, setting in value.items():
        if key != "type" and (key not in keys or not keys[key](setting, where)):
            raise BadFile(
                _(
                    "{where}: {stage} {kind}: {key} = {value} is not known or not allowed",
                    where=where,
                    stage=stage,
                    kind=kind,
                    key=quote(key),
                    value=quote(setting),
                )
            )
    if kind == "TemplateProcessing":
        _check_template(value, where)


def _check_template(value: dict[str, Any], where: object) -> None:
    items = [*value.get("single", []), *value.get("pair", [])]
    used = {item["SpecialToken"]["id"] for item in items if "SpecialToken" in item}
    if missing := used - value.get("special_tokens", {}).keys():
        raise BadFile(
            _(
                "{where}: the template names {missing} without saying which token it is",
                where=where,
                missing=quote(sorted(missing)[0]),
            )
        )


def _check_added_tokens(tokens: Any, where: object) -> list[dict[str, Any]]:
    """Check the added tokens: distinct texts and ids, known flags."""
    if not isinstance(tokens, list) or len(tokens) > MAX_ADDED_TOKENS:
        raise BadFile(
            _(
                "{where}: added_tokens must be a list of at most {max_tokens:,}",
                where=where,
                max_tokens=MAX_ADDED_TOKENS,
            )
        )
    flags = {"single_word", "lstrip", "rstrip", "normalized", "special"}
    for token in tokens:
        is_valid = (
            isinstance(token, dict) and token.keys() == {"id", "content", *flags} and is_text(token["content"], where)
        )
        if (
            not is_valid
            or not int_up_to(MAX_VOCAB_SIZE)(token["id"], where)
            or not token["content"]
            or not all(type(token[flag]) is bool for flag in flags)
        ):
            raise BadFile(
                _(
                    "{where}: an added token must have an id, a content and five flags, got {token}",
                    where=where,
                    token=quote(token),
                )
            )
    if len({t["id"] for t in tokens}) != len(tokens) or len({t["content"] for t in tokens}) != len(tokens):
        raise BadFile(_("{where}: two added tokens share an id or a content; both must be unique", where=where))
    return sorted(tokens, key=lambda token: token["id"])


def _check_model(model: dict[str, Any], where: object) -> None:
    """Check the vocabulary, the scores or ids, and the merges of a model."""
    vocab = model.get("vocab")
    if model["type"] == "Unigram":
        pieces = vocab if isinstance(vocab, list) else []
        is_valid = all(
            isinstance(p, list) and len(p) == 2 and is_text(p[0], where) and type(p[1]) in (int, float) for p in pieces
        )
        count = len(pieces)
        if not isinstance(model.get("unk_id"), (int, type(None))) or (model.get("unk_id") or 0) >= max(count, 1):
            raise BadFile(
                _(
                    "{where}: unk_id {unk_id} must be one of the {count:,} pieces",
                    where=where,
                    unk_id=quote(model.get("unk_id")),
                    count=count,
                )
            )
    else:
        words = vocab if isinstance(vocab, dict) else {}
        count = len(words)
        ids = words.values()
        is_valid = all(type(n) is int and 0 <= n <= MAX_VOCAB_SIZE for n in ids) and len(set(ids)) == count
    if not is_valid or not 0 < count <= MAX_VOCAB_SIZE:
        raise BadFile(
            _(
                "{where}: the vocabulary must hold 1 to {max_pieces:,} pieces, each with a unique id or a score",
                where=where,
                max_pieces=MAX_VOCAB_SIZE,
            )
        )
    if model["type"] == "BPE":
        _check_merges(model, where)


def _check_merges(model: dict[str, Any], where: object) -> None:
    """Check the merges: pairs of pieces whose concatenation is a piece."""
    merges = model.get("merges")
    vocab = model["vocab"]
    prefix = model.get("continuing_subword_prefix") or ""
    if not isinstance(merges, list) or len(merges) > MAX_VOCAB_SIZE:
        raise BadFile(
            _("{where}: merges must be a list of at most {max_merges:,}", where=where, max_merges=MAX_VOCAB_SIZE)
        )
    for merge in merges:
        try:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            is_valid = left in vocab and right in vocab and left + right.removeprefix(prefix) in vocab
        except (TypeError, ValueError, AttributeError):  # not two texts
            is_valid = False
        if not is_valid:
            raise BadFile(
                _(
                    "{where}: the merge {merge} must join two pieces of the vocabulary into a third",
                    where=where,
                    merge=quote(merge),
                )
            )
