"""Tokenizer specs from vocab.txt (WordPiece) and vocab.json + merges.txt (byte-level BPE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.patterns import QWEN2_PATTERN
from headwater.text.spec import (
    COLLAPSE_SPACES,
    TokenizerSpec,
    added_token,
    bpe_model,
    byte_level,
    replace_regex,
    split_regex,
    template_processing,
    tokenizer_spec,
)

BERT_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}
ROBERTA_TOKENS = {
    "bos": "<s>",
    "eos": "</s>",
    "unk": "<unk>",
    "sep": "</s>",
    "pad": "<pad>",
    "cls": "<s>",
    "mask": "<mask>",
}
GPT2_TOKENS = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>"}
QWEN2_TOKENS = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}


def wordpiece_spec(
    lines: str, special_tokens: Mapping[str, str], config: Mapping[str, Any], where: object
) -> TokenizerSpec:
    """BERT's tokenizer from vocab.txt: the line number is the id. Lower-casing strips accents by default."""
    # vocabulary and special tokens
    pieces = lines.split("\n")
    if pieces[-1] == "":
        pieces.pop()
    vocab = {piece.rstrip("\r"): n for n, piece in enumerate(pieces)}
    ids = require_special_tokens(special_tokens, vocab, ("unk", "cls", "sep"), where)
    cls = special_tokens["cls"]
    sep = special_tokens["sep"]
    accents = config.get("strip_accents")
    return tokenizer_spec(
        {
            "type": "WordPiece",
            "unk_token": special_tokens["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
        normalizer=[
            {
                "type": "BertNormalizer",
                "clean_text": True,
                "lowercase": config.get("do_lower_case", True) is not False,
                "handle_chinese_chars": config.get("tokenize_chinese_chars", True) is not False,
                "strip_accents": accents if isinstance(accents, bool) else None,
            }
        ],
        pre_tokenizer=[{"type": "BertPreTokenizer"}],
        post_processor=template_processing(f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", vocab),
        decoder=[{"type": "WordPiece", "prefix": "##", "cleanup": True}],
        added_tokens=[added_token(token, number) for token, number in ids.items()],
    )


def parse_merges(lines: str) -> list[list[str]]:
    """Parse merges.txt: two pieces per line, best first, after an optional #version line."""
    rows = lines.split("\n")
    rows = rows[1:] if rows[0].startswith("#version") else rows
    return [row.rstrip("\r").split(" ") for row in rows if row.strip("\r ")]


def gpt2_spec(
    vocab: dict[str, int], merges: list[list[str]], special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> TokenizerSpec:
    """GPT-2's byte-level BPE."""
    prefix = config.get("add_prefix_space") is True
    return tokenizer_spec(
        bpe_model(vocab, merges),
        normalizer=[],
        pre_tokenizer=[byte_level(add_prefix_space=prefix, use_regex=True)],
        decoder=[byte_level(use_regex=True)],
        post_processor={**byte_level(), "trim_offsets": False},
        added_tokens=[added_token(token, number) for token, number in special_token_ids(special_tokens, vocab).items()],
    )


def roberta_spec(
    vocab: dict[str, int], merges: list[list[str]], special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> TokenizerSpec:
    """RoBERTa and BART: GPT-2's pieces between <s> and </s>, with two </s> between a pair."""
    prefix = config.get("add_prefix_space") is True
    ends = {name: [special_tokens[name], vocab[special_tokens[name]]] for name in ("sep", "cls")}
    return tokenizer_spec(
        bpe_model(vocab, merges),
        normalizer=[],
        pre_tokenizer=[byte_level(add_prefix_space=prefix, use_regex=True)],
        decoder=[byte_level(use_regex=True)],
        post_processor={"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": prefix},
        added_tokens=[
            added_token(t, n, lstrip=t == special_tokens.get("mask"))
            for t, n in special_token_ids(special_tokens, vocab).items()
        ],
    )


def qwen2_spec(
    vocab: dict[str, int], merges: list[list[str]], special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> TokenizerSpec:
    """Qwen 2's byte-level BPE: NFC, and a pattern of its own."""
    return tokenizer_spec(
        bpe_model(vocab, merges),
        normalizer=[{"type": "NFC"}],
        pre_tokenizer=[split_regex(QWEN2_PATTERN), byte_level()],
        decoder=[byte_level()],
        post_processor={**byte_level(), "trim_offsets": False},
        added_tokens=[added_token(token, number) for token, number in special_token_ids(special_tokens, vocab).items()],
    )


def dallebart_spec(
    vocab: dict[str, int], merges: list[list[str]], special_tokens: Mapping[str, str], config: Mapping[str, Any]
) -> TokenizerSpec:
    """DALL-E mini's text: lower case, ASCII alone; each word between spaces with a leading space; <s> … </s>."""
    ends = {name: [special_tokens[name], vocab[special_tokens[name]]] for name in ("sep", "cls")}
    unk = special_tokens.get("unk")
    return tokenizer_spec(
        bpe_model(vocab, merges, unk_token=unk if unk in vocab else None),
        normalizer=[
            {"type": "Lowercase"},
            replace_regex("[^\\x00-\\x7F]", ""),
            COLLAPSE_SPACES,
            {"type": "Strip", "strip_left": True, "strip_right": True},
        ],
        pre_tokenizer=[split_regex(" ?[^ ]+"), byte_level(add_prefix_space=True)],
        decoder=[byte_level()],
        post_processor={"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": True},
        added_tokens=[added_token(token, number) for token, number in special_token_ids(special_tokens, vocab).items()],
    )


ByteLevelBuilder = Callable[[dict[str, int], list[list[str]], Mapping[str, str], Mapping[str, Any]], TokenizerSpec]
BYTE_LEVEL_BUILDERS: dict[str, tuple[ByteLevelBuilder, dict[str, str]]] = {
    "gpt2": (gpt2_spec, GPT2_TOKENS),
    "roberta": (roberta_spec, ROBERTA_TOKENS),
    "bart": (roberta_spec, ROBERTA_TOKENS),
    "dallebart": (dallebart_spec, ROBERTA_TOKENS),
    "qwen2": (qwen2_spec, QWEN2_TOKENS),
}


def special_token_ids(special_tokens: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, int]:
    """The special tokens that are in the vocabulary, with their ids; the same token may have several roles."""
    return {token: vocab[token] for token in dict.fromkeys(special_tokens.values()) if token in vocab}


def require_special_tokens(
    special_tokens: Mapping[str, str], vocab: Mapping[str, int], roles: tuple[str, ...], where: object
) -> dict[str, int]:
    """The special tokens by id; BadFile where one of these roles is missing or not in the vocabulary."""
    for role in roles:
        if special_tokens.get(role) not in vocab:
            raise BadFile(
                _(
                    "{where}: the {role} token {token} must be in the vocabulary; it is not",
                    where=where,
                    role=role,
                    token=quote(special_tokens.get(role)),
                )
            )
    return special_token_ids(special_tokens, vocab)
