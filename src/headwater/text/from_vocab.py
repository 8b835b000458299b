"""Tokenizers from the older files: vocab.txt (WordPiece), vocab.json + merges.txt (byte-level BPE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headwater.errors import BadFile
from headwater.text.components import Spec, added, bpe, byte_level, split, template, whole
from headwater.text.patterns import QWEN2
from headwater.weights.files import shown

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


def wordpiece(lines: str, specials: Mapping[str, str], config: Mapping[str, Any], where: object) -> Spec:
    """BERT's tokenizer from vocab.txt: the line number is the id. Lower-casing strips accents unless told otherwise."""
    words = lines.split("\n")
    vocab = {word.rstrip("\r"): n for n, word in enumerate(words[:-1] if words[-1] == "" else words)}
    ids = present(specials, vocab, ("unk", "cls", "sep"), where)
    cls, sep = specials["cls"], specials["sep"]
    accents = config.get("strip_accents")
    return whole(
        {
            "type": "WordPiece",
            "unk_token": specials["unk"],
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
        post_processor=template(f"{cls}:0 $A:0 {sep}:0", f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1", vocab),
        decoder=[{"type": "WordPiece", "prefix": "##", "cleanup": True}],
        added=[added(token, number) for token, number in ids.items()],
    )


def merge_rules(lines: str) -> list[list[str]]:
    """merges.txt: two pieces a line, best first, after an optional #version line."""
    rows = lines.split("\n")
    rows = rows[1:] if rows[0].startswith("#version") else rows
    return [row.rstrip("\r").split(" ") for row in rows if row.strip("\r ")]


def gpt2(
    vocab: dict[str, int], merges: list[list[str]], specials: Mapping[str, str], config: Mapping[str, Any]
) -> Spec:
    prefix = config.get("add_prefix_space") is True
    return whole(
        bpe(vocab, merges),
        normalizer=[],
        pre_tokenizer=[byte_level(prefix=prefix, regex=True)],
        decoder=[byte_level(regex=True)],
        post_processor={**byte_level(), "trim_offsets": False},
        added=[added(token, number) for token, number in ids_of(specials, vocab).items()],
    )


def roberta(
    vocab: dict[str, int], merges: list[list[str]], specials: Mapping[str, str], config: Mapping[str, Any]
) -> Spec:
    """RoBERTa and BART: GPT-2's pieces between <s> and </s>, with two </s> between a pair."""
    prefix = config.get("add_prefix_space") is True
    ends = {name: [specials[name], vocab[specials[name]]] for name in ("sep", "cls")}
    return whole(
        bpe(vocab, merges),
        normalizer=[],
        pre_tokenizer=[byte_level(prefix=prefix, regex=True)],
        decoder=[byte_level(regex=True)],
        post_processor={"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": prefix},
        added=[added(t, n, lstrip=t == specials.get("mask")) for t, n in ids_of(specials, vocab).items()],
    )


def qwen2(
    vocab: dict[str, int], merges: list[list[str]], specials: Mapping[str, str], config: Mapping[str, Any]
) -> Spec:
    return whole(
        bpe(vocab, merges),
        normalizer=[{"type": "NFC"}],
        pre_tokenizer=[split(QWEN2), byte_level()],
        decoder=[byte_level()],
        post_processor={**byte_level(), "trim_offsets": False},
        added=[added(token, number) for token, number in ids_of(specials, vocab).items()],
    )


ByteStyle = Callable[[dict[str, int], list[list[str]], Mapping[str, str], Mapping[str, Any]], Spec]
BYTE_STYLES: dict[str, tuple[ByteStyle, dict[str, str]]] = {
    "gpt2": (gpt2, GPT2_TOKENS),
    "roberta": (roberta, ROBERTA_TOKENS),
    "bart": (roberta, ROBERTA_TOKENS),
    "qwen2": (qwen2, QWEN2_TOKENS),
}


def ids_of(specials: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, int]:
    """The special tokens that are in the vocabulary, by id; the same token may play several parts."""
    return {token: vocab[token] for token in dict.fromkeys(specials.values()) if token in vocab}


def present(
    specials: Mapping[str, str], vocab: Mapping[str, int], roles: tuple[str, ...], where: object
) -> dict[str, int]:
    for role in roles:
        if specials.get(role) not in vocab:
            raise BadFile(f"{where}: the {role} token {shown(specials.get(role))} must be in the vocabulary; it is not")
    return ids_of(specials, vocab)
