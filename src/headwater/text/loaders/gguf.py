"""Read a tokenizer from the metadata of a GGUF file, and write one.

Four kinds are in use, named by tokenizer.ggml.model: gpt2 (byte-level BPE; tokenizer.ggml.pre names the
pre-tokenizer), llama (sentencepiece BPE), t5 (sentencepiece unigram) and bert (WordPiece).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.errors import BadFile, Unavailable, nearest
from headwater.i18n import _
from headwater.text.loaders.sentencepiece import llama_spec, t5_spec
from headwater.text.loaders.sentencepiece_model import (
    BPE,
    CONTROL,
    NORMAL,
    UNIGRAM,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    SentencePieceModel,
)
from headwater.text.loaders.vocab import wordpiece_spec
from headwater.text.patterns import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from headwater.text.spec import (
    TokenizerSpec,
    added_token,
    bpe_model,
    byte_level,
    split_regex,
    template_processing,
    tokenizer_spec,
)
from headwater.text.tokenizer import Tokenizer

KEY_PREFIX = "tokenizer.ggml."
ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "sep": "seperator_token_id",
    "cls": "cls_token_id",
    "mask": "mask_token_id",
}

_DIGITS: TokenizerSpec = {"type": "Digits", "individual_digits": True}
_GPT2_SPLIT = [byte_level(use_regex=True)]
_DEFAULT_SPLIT = [split_regex(p) for p in (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")] + [
    byte_level()
]
# pre-tokenizers by name; of several names for one, the first is written
_PRE_TOKENIZER_GROUPS: dict[str, list[TokenizerSpec]] = {
    "gpt-2 mpt olmo phi-2 jais roberta-bpe": _GPT2_SPLIT,
    "smollm starcoder refact command-r": [_DIGITS, *_GPT2_SPLIT],
    "llama-bpe llama3 llama-v3": [split_regex(LLAMA3_PATTERN), byte_level()],
    "qwen2": [split_regex(QWEN2_PATTERN), byte_level()],
    "default": _DEFAULT_SPLIT,
}
PRE_TOKENIZERS = {name: steps for names, steps in _PRE_TOKENIZER_GROUPS.items() for name in names.split()}


def tokenizer_from_gguf(metadata: Mapping[str, Any], where: object = "gguf") -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata, with its special tokens and chat template."""
    # the kind of tokenizer
    tokens = _metadata_list(metadata, "tokens", str, where)
    kind = metadata.get(KEY_PREFIX + "model")
    loaders = {"gpt2": _from_gpt2, "llama": _from_llama, "t5": _from_t5, "bert": _from_bert}
    if kind not in loaders:
        raise BadFile(
            _(
                "{where}: a tokenizer of type {kind!r} is not supported; {nearest}",
                where=where,
                kind=str(kind)[:40],
                nearest=nearest(str(kind)[:40], loaders),
            )
        )

    # special tokens by role, and the type of each token
    roles = {}
    for role in ROLE_KEYS:
        token_id = _role_id(metadata, role)
        if 0 <= token_id < len(tokens):
            roles[role] = tokens[token_id]
    type_codes = [NORMAL] * len(tokens)
    if KEY_PREFIX + "token_type" in metadata:
        type_codes = _metadata_list(metadata, "token_type", int, where)
    if len(type_codes) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BadFile(
            _(
                "{where}: the {num_tokens} tokens must be distinct and have a type each, there are {num_types} types",
                where=where,
                num_tokens=len(tokens),
                num_types=len(type_codes),
            )
        )

    spec = loaders[kind](metadata, tokens, type_codes, roles, where)
    chat_template = metadata.get("tokenizer.chat_template")
    return Tokenizer(spec, roles, chat_template if isinstance(chat_template, str) else "", where)


def _role_id(metadata: Mapping[str, Any], role: str) -> int:
    """The token id of a role such as bos; -1 where the metadata have none."""
    token_id = metadata.get(KEY_PREFIX + ROLE_KEYS[role])
    return token_id if type(token_id) is int else -1


def _from_gpt2(
    metadata: Mapping[str, Any], tokens: list[str], type_codes: list[int], roles: dict[str, str], where: object
) -> TokenizerSpec:
    """Byte-level BPE with the pre-tokenizer that the metadata name."""
    pre = metadata.get(KEY_PREFIX + "pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise BadFile(
            _(
                "{where}: the pre-tokenizer {pre!r} is not supported; {nearest}",
                where=where,
                pre=str(pre)[:40],
                nearest=nearest(str(pre)[:40], PRE_TOKENIZERS),
            )
        )
    vocab = {token: n for n, token in enumerate(tokens)}
    merges = _metadata_list(metadata, "merges", str, where)  # "a b" each; as lists they would take twice the time
    is_llama3 = pre in ("llama-bpe", "llama3", "llama-v3")
    prefix = f"{roles['bos']} " if _metadata_bool(metadata, "add_bos_token", is_llama3) and "bos" in roles else ""
    suffix = f" {roles['eos']}" if _metadata_bool(metadata, "add_eos_token", False) and "eos" in roles else ""
    post_processor = (
        template_processing(f"{prefix}$A{suffix}", f"{prefix}$A $B{suffix}", vocab) if prefix or suffix else None
    )
    return tokenizer_spec(
        bpe_model(vocab, merges, ignore_merges=is_llama3),
        normalizer=[{"type": "NFC"}] if pre == "qwen2" else [],
        pre_tokenizer=PRE_TOKENIZERS[pre],
        decoder=[byte_level(use_regex=True)],
        post_processor=post_processor,
        added_tokens=_added_tokens(tokens, type_codes),
    )


def _from_llama(
    metadata: Mapping[str, Any], tokens: list[str], type_codes: list[int], roles: dict[str, str], where: object
) -> TokenizerSpec:
    sp = _sentencepiece_model(metadata, tokens, type_codes, BPE, where)
    config = {
        "add_bos_token": _metadata_bool(metadata, "add_bos_token", True),
        "add_eos_token": _metadata_bool(metadata, "add_eos_token", False),
    }
    return llama_spec(sp, config)[0]


def _from_t5(
    metadata: Mapping[str, Any], tokens: list[str], type_codes: list[int], roles: dict[str, str], where: object
) -> TokenizerSpec:
    if "</s>" not in tokens:
        raise BadFile(_("{where}: a t5 tokenizer must have the token </s>", where=where))
    return t5_spec(_sentencepiece_model(metadata, tokens, type_codes, UNIGRAM, where), {"extra_ids": 0})[0]


def _from_bert(
    metadata: Mapping[str, Any], tokens: list[str], type_codes: list[int], roles: dict[str, str], where: object
) -> TokenizerSpec:
    """WordPiece: GGUF marks the start of a word with ▁; vocab.txt marks its continuation with ##."""
    lines = []
    for token, type_code in zip(tokens, type_codes, strict=True):
        if type_code == NORMAL:
            token = token[1:] if token.startswith("▁") else "##" + token
        lines.append(token)
    if any("\n" in line for line in lines):
        raise BadFile(_("{where}: a WordPiece token must not contain a line break", where=where))
    return wordpiece_spec("\n".join(lines), {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", **roles}, {}, where)


def _sentencepiece_model(
    metadata: Mapping[str, Any], tokens: list[str], type_codes: list[int], model_type: int, where: object
) -> SentencePieceModel:
    """The metadata as the contents of a sentencepiece .model file."""
    scores = _metadata_list(metadata, "scores", float, where)
    if len(scores) != len(tokens) or any(score - score != 0.0 for score in scores) or not all(tokens):
        raise BadFile(
            _(
                "{where}: each of the {num_tokens} tokens must have a finite score and a text",
                where=where,
                num_tokens=len(tokens),
            )
        )
    pieces = [Piece(*row) for row in zip(tokens, scores, type_codes, strict=True)]
    unk_id = _role_id(metadata, "unk")
    if not 0 <= unk_id < len(tokens):
        unk_id = 0
    return SentencePieceModel(
        pieces,
        model_type,
        byte_fallback="<0x0A>" in tokens,
        unk_id=unk_id,
        bos_id=_role_id(metadata, "bos"),
        eos_id=_role_id(metadata, "eos"),
        pad_id=_role_id(metadata, "pad"),
        charsmap=bytes(n & 255 for n in _metadata_charsmap(metadata)),
        add_dummy_prefix=_metadata_bool(metadata, "add_space_prefix", True),
        remove_extra_whitespaces=_metadata_bool(metadata, "remove_extra_whitespaces", False),
    )


def _added_tokens(tokens: list[str], type_codes: list[int]) -> list[TokenizerSpec]:
    return [
        added_token(token, n, special=kind != USER_DEFINED)
        for n, (token, kind) in enumerate(zip(tokens, type_codes, strict=True))
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and token
    ]


def _metadata_list(metadata: Mapping[str, Any], name: str, item_type: type, where: object) -> list[Any]:
    values = metadata.get(KEY_PREFIX + name)
    if not isinstance(values, list) or not values or not all(type(item) is item_type for item in values):
        raise BadFile(
            _(
                "{where}: {key} must be a list of {item_type}; it is missing or of another type",
                where=where,
                key=KEY_PREFIX + name,
                item_type=item_type.__name__,
            )
        )
    return values


def _metadata_charsmap(metadata: Mapping[str, Any]) -> list[int]:
    values = metadata.get(KEY_PREFIX + "precompiled_charsmap")
    return values if isinstance(values, list) and all(type(n) is int for n in values) else []


def _metadata_bool(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(KEY_PREFIX + name, default)
    return value if isinstance(value, bool) else default


def tokenizer_to_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """The GGUF metadata of a tokenizer. Byte-level BPE only: the other kinds cannot be written without loss."""
    # the name of the pre-tokenizer
    spec = tokenizer.spec
    model = spec["model"]
    pre_tokenizer = spec["pre_tokenizer"]
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    pre = next((name for name, known in PRE_TOKENIZERS.items() if known == steps), None)
    if model["type"] != "BPE" or pre is None:
        raise Unavailable(
            _(
                "only byte-level BPE tokenizers with a published pre-tokenizer can be written into a GGUF "
                "file; save the model as a folder instead"
            )
        )

    # tokens with their types
    tokens = [f"[unused{n}]" for n in range(len(tokenizer))]
    type_codes = [UNUSED] * len(tokens)  # ids without a token
    for token, token_id in tokenizer.backend.get_vocab(with_added_tokens=True).items():
        tokens[token_id] = token
        type_codes[token_id] = NORMAL
    for token in spec["added_tokens"]:
        type_codes[token["id"]] = CONTROL if token["special"] else USER_DEFINED

    # metadata
    special_ids = tokenizer.encode("", add_special_tokens=True)
    metadata: dict[str, Any] = {
        KEY_PREFIX + "model": "gpt2",
        KEY_PREFIX + "pre": pre,
        KEY_PREFIX + "tokens": tokens,
        KEY_PREFIX + "token_type": type_codes,
        KEY_PREFIX + "merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]],
        KEY_PREFIX + "add_bos_token": special_ids[:1] == [tokenizer.bos_id],
        KEY_PREFIX + "add_eos_token": special_ids[-1:] == [tokenizer.eos_id],
    }
    metadata |= {
        KEY_PREFIX + key: tokenizer.special_id(role)
        for role, key in ROLE_KEYS.items()
        if tokenizer.special_id(role) is not None
    }
    if tokenizer.chat_template:
        metadata["tokenizer.chat_template"] = tokenizer.chat_template
    return metadata
