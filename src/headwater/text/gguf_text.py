"""The tokenizer inside a GGUF file, and ours written as one.

Four kinds are in use, named by tokenizer.ggml.model: gpt2 (byte-level BPE; tokenizer.ggml.pre says how text is cut into
words), llama (sentencepiece BPE), t5 (sentencepiece unigram) and bert (WordPiece).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.errors import BadFile, Unavailable, nearest
from headwater.text.components import Spec, added, bpe, byte_level, split, template, whole
from headwater.text.from_sentencepiece import llama, t5
from headwater.text.from_vocab import wordpiece
from headwater.text.patterns import GPT2, LLAMA3, QWEN2
from headwater.text.sentencepiece import BPE, CONTROL, NORMAL, UNIGRAM, UNKNOWN, USER, Piece, SentencePiece
from headwater.text.tokenizer import Tokenizer

KEY = "tokenizer.ggml."
ROLE_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id",
             "sep": "seperator_token_id", "cls": "cls_token_id", "mask": "mask_token_id"}  # fmt: skip

_DIGITS: Spec = {"type": "Digits", "individual_digits": True}
_WORDS = [byte_level(regex=True)]
_DEFAULT = [split(p) for p in (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")] + [byte_level()]
# How text is cut before the merges. Several names mean the same; the first of each is written.
_CUTS: dict[str, list[Spec]] = {
    "gpt-2 mpt olmo phi-2 jais roberta-bpe": _WORDS,
    "smollm starcoder refact command-r": [_DIGITS, *_WORDS],
    "llama-bpe llama3 llama-v3": [split(LLAMA3), byte_level()],
    "qwen2": [split(QWEN2), byte_level()],
    "default": _DEFAULT,
}
CUTS = {name: steps for names, steps in _CUTS.items() for name in names.split()}


def from_gguf(metadata: Mapping[str, Any], where: object = "gguf") -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata, with its special tokens and chat template."""
    tokens = _list(metadata, "tokens", str, where)
    kind = metadata.get(KEY + "model")
    makers = {"gpt2": _from_gpt2, "llama": _from_llama, "t5": _from_t5, "bert": _from_bert}
    if kind not in makers:
        raise BadFile(
            f"{where}: a tokenizer of kind {str(kind)[:40]!r} is not read here; {nearest(str(kind)[:40], makers)}"
        )
    roles = {role: tokens[n] for role, key in ROLE_KEYS.items()
             if type(n := metadata.get(KEY + key)) is int and 0 <= n < len(tokens)}  # fmt: skip
    kinds = _list(metadata, "token_type", int, where) if KEY + "token_type" in metadata else [NORMAL] * len(tokens)
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise BadFile(
            f"{where}: the {len(tokens)} tokens must be distinct and have a type each, there are {len(kinds)} types"
        )
    spec = makers[kind](metadata, tokens, kinds, roles, where)
    chat = metadata.get("tokenizer.chat_template")
    return Tokenizer(spec, roles, chat if isinstance(chat, str) else "", where)


def _from_gpt2(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], roles: dict[str, str], where: object
) -> Spec:
    pre = metadata.get(KEY + "pre", "default")
    if pre not in CUTS:
        raise BadFile(f"{where}: text cut as {str(pre)[:40]!r} is not known here; {nearest(str(pre)[:40], CUTS)}")
    vocab = {token: n for n, token in enumerate(tokens)}
    merges = _list(metadata, "merges", str, where)  # "a b" each; as lists they would take twice the time
    starts = pre in ("llama-bpe", "llama3", "llama-v3")
    before = f"{roles['bos']} " if _flag(metadata, "add_bos_token", starts) and "bos" in roles else ""
    after = f" {roles['eos']}" if _flag(metadata, "add_eos_token", False) and "eos" in roles else ""
    around = template(f"{before}$A{after}", f"{before}$A $B{after}", vocab) if before or after else None
    return whole(
        bpe(vocab, merges, ignore_merges=starts), normalizer=[{"type": "NFC"}] if pre == "qwen2" else [],
        pre_tokenizer=CUTS[pre], decoder=[byte_level(regex=True)], post_processor=around, added=_added(tokens, kinds),
    )  # fmt: skip


def _from_llama(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], roles: dict[str, str], where: object
) -> Spec:
    sp = _sentencepiece(metadata, tokens, kinds, BPE, where)
    config = {
        "add_bos_token": _flag(metadata, "add_bos_token", True),
        "add_eos_token": _flag(metadata, "add_eos_token", False),
    }
    return llama(sp, config)[0]


def _from_t5(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], roles: dict[str, str], where: object
) -> Spec:
    if "</s>" not in tokens:
        raise BadFile(f"{where}: a t5 tokenizer must have the token </s>")
    return t5(_sentencepiece(metadata, tokens, kinds, UNIGRAM, where), {"extra_ids": 0})[0]


def _from_bert(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], roles: dict[str, str], where: object
) -> Spec:
    """Here a word begins with ▁ and its rest with nothing; in vocab.txt it begins with nothing and its rest with ##."""
    lines = [
        t if kind != NORMAL else t[1:] if t.startswith("▁") else "##" + t for t, kind in zip(tokens, kinds, strict=True)
    ]
    if any("\n" in line for line in lines):
        raise BadFile(f"{where}: a WordPiece token must not hold a line break")
    return wordpiece("\n".join(lines), {"unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", **roles}, {}, where)


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], kinds: list[int], kind: int, where: object
) -> SentencePiece:
    scores = _list(metadata, "scores", float, where)
    if len(scores) != len(tokens) or any(score - score != 0.0 for score in scores) or not all(tokens):
        raise BadFile(f"{where}: each of the {len(tokens)} tokens must have a finite score and a text")
    pieces = [Piece(*row) for row in zip(tokens, scores, kinds, strict=True)]
    ids = {
        role: n if type(n := metadata.get(KEY + ROLE_KEYS[role])) is int else -1
        for role in ("unk", "bos", "eos", "pad")
    }
    unk = ids["unk"] if 0 <= ids["unk"] < len(tokens) else 0
    return SentencePiece(
        pieces, kind, byte_fallback="<0x0A>" in tokens, unk=unk, bos=ids["bos"], eos=ids["eos"], pad=ids["pad"],
        charsmap=bytes(n & 255 for n in _charsmap(metadata)),
        dummy_prefix=_flag(metadata, "add_space_prefix", True),
        tidy_spaces=_flag(metadata, "remove_extra_whitespaces", False),
    )  # fmt: skip


def _added(tokens: list[str], kinds: list[int]) -> list[Spec]:
    return [added(token, n, special=kind != USER) for n, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, UNKNOWN, USER) and token]  # fmt: skip


def _list(metadata: Mapping[str, Any], name: str, kind: type, where: object) -> list[Any]:
    found = metadata.get(KEY + name)
    if not isinstance(found, list) or not found or not all(type(item) is kind for item in found):
        raise BadFile(f"{where}: {KEY + name} must be a list of {kind.__name__}; it is missing or of another kind")
    return found


def _charsmap(metadata: Mapping[str, Any]) -> list[int]:
    found = metadata.get(KEY + "precompiled_charsmap")
    return found if isinstance(found, list) and all(type(n) is int for n in found) else []


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    found = metadata.get(KEY + name, default)
    return found if isinstance(found, bool) else default


def to_gguf(tokenizer: Tokenizer) -> dict[str, Any]:
    """The metadata a GGUF file keeps of this tokenizer. Byte-level BPE only: the others lose something on the way."""
    spec = tokenizer.spec
    model, cut = spec["model"], spec["pre_tokenizer"]
    steps = cut["pretokenizers"] if cut and cut["type"] == "Sequence" else [cut]
    pre = next((name for name, known in CUTS.items() if known == steps), None)
    if model["type"] != "BPE" or pre is None:
        raise Unavailable("only byte-level BPE tokenizers with a published cut can be written into a GGUF file; "
                          "save the model as a folder instead")  # fmt: skip
    ids = tokenizer.engine.get_vocab(with_added_tokens=True)
    tokens = [f"[unused{n}]" for n in range(len(tokenizer))]
    kinds = [5] * len(tokens)  # ids no token has
    for token, n in ids.items():
        tokens[n], kinds[n] = token, NORMAL
    for token in spec["added_tokens"]:
        kinds[token["id"]] = CONTROL if token["special"] else USER
    around = tokenizer.encode("", special=True)
    made = {
        KEY + "model": "gpt2", KEY + "pre": pre, KEY + "tokens": tokens, KEY + "token_type": kinds,
        KEY + "merges": [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]],
        KEY + "add_bos_token": around[:1] == [tokenizer.bos], KEY + "add_eos_token": around[-1:] == [tokenizer.eos],
    }  # fmt: skip
    made |= {
        KEY + key: tokenizer.special(role) for role, key in ROLE_KEYS.items() if tokenizer.special(role) is not None
    }
    return made | ({"tokenizer.chat_template": tokenizer.chat_template} if tokenizer.chat_template else {})
