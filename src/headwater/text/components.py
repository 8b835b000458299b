"""The pieces of a tokenizer.json, as plain tables: every loader writes one, and one door builds it (engine.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwater.text.patterns import SPACES

Spec = dict[str, Any]


def whole(
    model: Spec,
    *,
    normalizer: list[Spec],
    pre_tokenizer: list[Spec],
    decoder: list[Spec],
    post_processor: Spec | None = None,
    added: Iterable[Spec] = (),
) -> Spec:
    """A tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "model": model,
        "normalizer": _row(normalizer, "normalizers"),
        "pre_tokenizer": _row(pre_tokenizer, "pretokenizers"),
        "post_processor": post_processor,
        "decoder": _row(decoder, "decoders"),
    }


def _row(parts: list[Spec], inner: str) -> Spec | None:
    return {"type": "Sequence", inner: parts} if len(parts) > 1 else parts[0] if parts else None


def added(token: str, number: int, *, special: bool = True, lstrip: bool = False) -> Spec:
    return {
        "id": number,
        "content": token,
        "single_word": False,
        "lstrip": lstrip,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def template(single: str, pair: str, ids: Mapping[str, int]) -> Spec:
    """`[CLS]:0 $A:0 [SEP]:0` -> a TemplateProcessing. A word without `:` has kind 0."""
    used = {word.split(":")[0] for word in f"{single} {pair}".split() if not word.startswith("$")}
    return {
        "type": "TemplateProcessing",
        "single": [_item(word) for word in single.split()],
        "pair": [_item(word) for word in pair.split()],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in sorted(used)},
    }


def _item(word: str) -> Spec:
    name, _, kind = word.partition(":")
    place = {"id": name.lstrip("$"), "type_id": int(kind or 0)}
    return {"Sequence": place} if name.startswith("$") else {"SpecialToken": place}


def replace(text: str, by: str) -> Spec:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def replace_pattern(pattern: str, by: str) -> Spec:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": by}


def split(pattern: str) -> Spec:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, prefix: bool = False, regex: bool = False) -> Spec:
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}


def bpe(vocab: Mapping[str, int], merges: list[Any], **more: Any) -> Spec:
    rest = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **rest, **more, "vocab": dict(vocab), "merges": merges}


ONE_SPACE = replace_pattern(SPACES, " ")
