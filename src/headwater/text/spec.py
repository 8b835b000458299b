"""Builders of tokenizer.json components, as plain dicts; every loader returns such a spec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headwater.text.patterns import MULTIPLE_SPACES

TokenizerSpec = dict[str, Any]


def tokenizer_spec(
    model: TokenizerSpec,
    *,
    normalizer: list[TokenizerSpec],
    pre_tokenizer: list[TokenizerSpec],
    decoder: list[TokenizerSpec],
    post_processor: TokenizerSpec | None = None,
    added_tokens: Iterable[TokenizerSpec] = (),
) -> TokenizerSpec:
    """The contents of a tokenizer.json."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added_tokens),
        "model": model,
        "normalizer": _sequence(normalizer, "normalizers"),
        "pre_tokenizer": _sequence(pre_tokenizer, "pretokenizers"),
        "post_processor": post_processor,
        "decoder": _sequence(decoder, "decoders"),
    }


def _sequence(parts: list[TokenizerSpec], inner: str) -> TokenizerSpec | None:
    """A Sequence of several components under the key `inner`; a single component itself; None for none."""
    if not parts:
        return None
    return {"type": "Sequence", inner: parts} if len(parts) > 1 else parts[0]


def added_token(token: str, token_id: int, *, special: bool = True, lstrip: bool = False) -> TokenizerSpec:
    """An entry of added_tokens."""
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": lstrip,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def template_processing(single: str, pair: str, ids: Mapping[str, int]) -> TokenizerSpec:
    """`[CLS]:0 $A:0 [SEP]:0` -> a TemplateProcessing. An item without `:` has token type 0."""
    used = {word.split(":")[0] for word in f"{single} {pair}".split() if not word.startswith("$")}
    return {
        "type": "TemplateProcessing",
        "single": [_template_item(word) for word in single.split()],
        "pair": [_template_item(word) for word in pair.split()],
        "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in sorted(used)},
    }


def _template_item(word: str) -> TokenizerSpec:
    name, _, type_id = word.partition(":")
    item = {"id": name.lstrip("$"), "type_id": int(type_id or 0)}
    return {"Sequence": item} if name.startswith("$") else {"SpecialToken": item}


def replace_string(text: str, content: str) -> TokenizerSpec:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


def replace_regex(pattern: str, content: str) -> TokenizerSpec:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def split_regex(pattern: str) -> TokenizerSpec:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = False) -> TokenizerSpec:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def bpe_model(vocab: Mapping[str, int], merges: list[Any], **settings: Any) -> TokenizerSpec:
    """A BPE model."""
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {"type": "BPE", **defaults, **settings, "vocab": dict(vocab), "merges": merges}


COLLAPSE_SPACES = replace_regex(MULTIPLE_SPACES, " ")
