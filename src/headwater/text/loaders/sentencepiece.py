"""Tokenizer specs from sentencepiece models, per model family.

The model determines normalization (character map, spaces, leading space). Families differ in the ids of special tokens
and in the post-processor.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.text.loaders.sentencepiece_model import BPE, CONTROL, UNKNOWN, USER_DEFINED, SentencePieceModel
from headwater.text.patterns import EDGE_SPACES
from headwater.text.spec import (
    COLLAPSE_SPACES,
    TokenizerSpec,
    added_token,
    bpe_model,
    replace_regex,
    replace_string,
    template_processing,
    tokenizer_spec,
)

SpecWithSpecialTokens = tuple[TokenizerSpec, dict[str, str]]  # a tokenizer.json, and its special tokens by role
_CC25 = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"""
_MBART50_ADDED = """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"""
MBART_LANGUAGES = _CC25.split()
MBART50_LANGUAGES = (_CC25 + _MBART50_ADDED).split()
FAIRSEQ_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")  # the ids 0 to 3 of models trained with fairseq


def plain_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """The model's own ids, without special tokens around a text."""
    return build_spec(sp, _scored_pieces(sp)), _special_tokens_map(sp)


def llama_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """<s> text (and </s>, if add_eos_token)."""
    roles = _special_tokens_map(sp)
    prefix = f"{roles['bos']} " if config.get("add_bos_token", True) is not False and "bos" in roles else ""
    suffix = f" {roles['eos']}" if config.get("add_eos_token") is True and "eos" in roles else ""
    ids = {piece.text: n for n, piece in enumerate(sp.pieces)}
    post_processor = template_processing(
        f"{prefix}$A{suffix}", f"{prefix}$A{suffix} {prefix.replace(' ', ':1 ')}$B:1{suffix and suffix + ':1'}", ids
    )
    return build_spec(sp, _scored_pieces(sp), post_processor=post_processor), roles


def t5_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """text </s>; sentinels above the pieces, <extra_id_0> the highest."""
    count = config.get("extra_ids", 100)
    count = count if type(count) is int and 0 <= count <= 1000 else 100
    extra = [f"<extra_id_{n}>" for n in reversed(range(count))]
    pieces = [*_scored_pieces(sp), *((text, 0.0) for text in extra if text not in {p.text for p in sp.pieces})]
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    post_processor = template_processing("$A </s>", "$A </s> $B </s>", ids)
    return build_spec(sp, pieces, post_processor=post_processor, added_special_tokens=extra), _special_tokens_map(
        sp
    ) | {"pad": "<pad>"}


def albert_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """[CLS] A [SEP] B [SEP]; quotes unified, accents stripped, lower case."""
    normalizers = [replace_string("``", '"'), replace_string("''", '"')]
    if config.get("keep_accents") is not True:
        normalizers += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if config.get("do_lower_case", True) is not False:
        normalizers += [{"type": "Lowercase"}]
    ids = {piece.text: n for n, piece in enumerate(sp.pieces)}
    post_processor = template_processing("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ids)
    roles = {
        "bos": "[CLS]",
        "eos": "[SEP]",
        "unk": "<unk>",
        "sep": "[SEP]",
        "pad": "<pad>",
        "cls": "[CLS]",
        "mask": "[MASK]",
    }
    return build_spec(
        sp,
        _scored_pieces(sp),
        post_processor=post_processor,
        normalizers=normalizers,
        added_special_tokens=["[MASK]"],
        lstrip_tokens=("[MASK]",),
    ), roles


def _fairseq_spec(sp: SentencePieceModel, added_tokens: list[str], single: str, pair: str) -> SpecWithSpecialTokens:
    """The ids of fairseq: its four special tokens, the pieces from the fourth on, then the added tokens."""
    pieces = [
        *((text, 0.0) for text in FAIRSEQ_TOKENS),
        *_scored_pieces(sp)[3:],
        *((text, 0.0) for text in added_tokens),
    ]
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise BadFile(
            _("a fairseq vocabulary must begin with <unk> <s> </s>; that of this sentencepiece model does not")
        )
    spec = build_spec(
        sp,
        pieces,
        post_processor=template_processing(single, pair, ids),
        added_special_tokens=[*FAIRSEQ_TOKENS, *added_tokens],
        lstrip_tokens=("<mask>",),
        unk_id=3,
    )
    roles = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
    return spec, roles


def xlm_roberta_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    return _fairseq_spec(sp, ["<mask>"], "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def mbart_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """text </s> lang, with the source language of the config."""
    code = _source_language(config, MBART_LANGUAGES)
    return _fairseq_spec(sp, [*MBART_LANGUAGES, "<mask>"], f"$A </s> {code}", f"$A $B </s> {code}")


def mbart50_spec(sp: SentencePieceModel, config: Mapping[str, Any]) -> SpecWithSpecialTokens:
    """lang text </s>, with the source language of the config."""
    code = _source_language(config, MBART50_LANGUAGES)
    return _fairseq_spec(sp, [*MBART50_LANGUAGES, "<mask>"], f"{code} $A </s>", f"{code} $A $B </s>")


SPEC_BUILDERS: dict[str, Callable[[SentencePieceModel, Mapping[str, Any]], SpecWithSpecialTokens]] = {
    "t5": t5_spec,
    "mt5": t5_spec,
    "llama": llama_spec,
    "mistral": llama_spec,
    "gemma": llama_spec,
    "albert": albert_spec,
    "mbart": mbart_spec,
    "mbart50": mbart50_spec,
    "xlmroberta": xlm_roberta_spec,
}


def _source_language(config: Mapping[str, Any], known: list[str]) -> str:
    code = config.get("src_lang") or "en_XX"
    if code not in known:
        raise BadFile(
            _(
                "src_lang must be one of {num_known} languages such as en_XX, got {code!r}",
                num_known=len(known),
                code=str(code)[:20],
            )
        )
    return str(code)


def _scored_pieces(sp: SentencePieceModel) -> list[tuple[str, float]]:
    return [(piece.text, piece.score) for piece in sp.pieces]


def _special_tokens_map(sp: SentencePieceModel) -> dict[str, str]:
    ids = {"unk": sp.unk_id, "bos": sp.bos_id, "eos": sp.eos_id, "pad": sp.pad_id}
    return {role: sp.pieces[n].text for role, n in ids.items() if 0 <= n < len(sp.pieces)}


def build_spec(
    sp: SentencePieceModel,
    pieces: list[tuple[str, float]],
    *,
    post_processor: TokenizerSpec | None = None,
    unk_id: int | None = None,
    normalizers: list[TokenizerSpec] | None = None,
    added_special_tokens: list[str] | None = None,
    lstrip_tokens: tuple[str, ...] = (),
) -> TokenizerSpec:
    """A tokenizer.json that segments as sentencepiece does: no pre-tokenizer, spaces are part of the pieces."""
    # added tokens: special ones, and those that the user of sentencepiece defined
    piece_types = {piece.text: piece.piece_type for piece in sp.pieces}
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    special = [t for t in ids if piece_types.get(t) in (CONTROL, UNKNOWN) or t in (added_special_tokens or [])]
    user_defined = [t for t in ids if piece_types.get(t) == USER_DEFINED and t not in special]
    added_tokens = [added_token(t, ids[t], lstrip=t in lstrip_tokens) for t in special]
    added_tokens += [added_token(t, ids[t], special=False) for t in user_defined]

    # the model
    if unk_id is None:
        unk_id = sp.unk_id
    if sp.model_type == BPE:
        model = bpe_model(
            ids,
            merges_from_scores(pieces, {*special, *user_defined}),
            unk_token=pieces[unk_id][0],
            fuse_unk=True,
            byte_fallback=sp.byte_fallback,
        )
    else:
        model = {
            "type": "Unigram",
            "unk_id": unk_id,
            "vocab": [list(piece) for piece in pieces],
            "byte_fallback": sp.byte_fallback,
        }

    return tokenizer_spec(
        model,
        normalizer=[*(normalizers or []), *_normalizers(sp)],
        pre_tokenizer=[],
        decoder=_decoders(sp),
        post_processor=post_processor,
        added_tokens=added_tokens,
    )


def _normalizers(sp: SentencePieceModel) -> list[TokenizerSpec]:
    """Normalization as the model does it: character map, extra spaces, leading space, spaces as ▁."""
    normalizers: list[TokenizerSpec] = []
    if sp.charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(sp.charsmap).decode()})
    if sp.remove_extra_whitespaces:
        normalizers += [replace_regex(EDGE_SPACES, ""), COLLAPSE_SPACES]
    if sp.add_dummy_prefix:
        normalizers.append({"type": "Prepend", "prepend": "▁" if sp.escape_whitespaces else " "})
    if sp.escape_whitespaces:
        normalizers.append(replace_string(" ", "▁"))
    return normalizers


def _decoders(sp: SentencePieceModel) -> list[TokenizerSpec]:
    """Decoding: the inverse of the normalization of spaces, and of byte fallback."""
    decoders = [replace_string("▁", " ")]
    if sp.byte_fallback:
        decoders.append({"type": "ByteFallback"})
    decoders.append({"type": "Fuse"})
    if sp.add_dummy_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return decoders


def merges_from_scores(pieces: list[tuple[str, float]], excluded: set[str]) -> list[list[str]]:
    """The merges of a scored BPE vocabulary: every split of a piece into two others, best piece first."""
    ids = {text: n for n, (text, _) in enumerate(pieces) if text not in excluded}
    merges: list[tuple[float, int, int, str, str]] = []
    for text, score in pieces:
        if text in ids and len(text) > 1:
            halves = [(text[:n], text[n:]) for n in range(1, len(text)) if text[:n] in ids and text[n:] in ids]
            merges += [(-score, ids[left], ids[right], left, right) for left, right in halves]
    return [[left, right] for *_, left, right in sorted(merges)]
