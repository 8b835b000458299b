"""Tokenizers from a sentencepiece model, in the conventions of the families that use one.

The model itself says how text is made ready: a character map, tidied spaces, a space in front. Families differ in
which ids stand for what, and in what goes around a text.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from headwater.errors import BadFile
from headwater.text.components import ONE_SPACE, Spec, added, bpe, replace, replace_pattern, template, whole
from headwater.text.patterns import ENDS
from headwater.text.sentencepiece import BPE, CONTROL, UNKNOWN, USER, SentencePiece

Made = tuple[Spec, dict[str, str]]  # a tokenizer.json, and which token plays which part
_CC25 = """
    ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT lv_LV my_MM ne_NP nl_XX
    ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"""
_LATER = """
    af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF pt_XX sv_SE sw_KE ta_IN
    te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"""
MBART_LANGUAGES, MBART50_LANGUAGES = _CC25.split(), (_CC25 + _LATER).split()
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")  # the ids 0 to 3 of models trained with fairseq


def plain(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """The model as it is: its own ids, nothing around the text."""
    return assemble(sp, _pieces(sp)), _roles(sp)


def llama(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """<s> in front (and </s> behind, if the config says so)."""
    roles = _roles(sp)
    before = f"{roles['bos']} " if config.get("add_bos_token", True) is not False and "bos" in roles else ""
    after = f" {roles['eos']}" if config.get("add_eos_token") is True and "eos" in roles else ""
    ids = {piece.text: n for n, piece in enumerate(sp.pieces)}
    around = template(
        f"{before}$A{after}", f"{before}$A{after} {before.replace(' ', ':1 ')}$B:1{after and after + ':1'}", ids
    )
    return assemble(sp, _pieces(sp), around=around), roles


def t5(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """</s> behind; sentinels above the pieces, <extra_id_0> the highest."""
    count = config.get("extra_ids", 100)
    count = count if type(count) is int and 0 <= count <= 1000 else 100
    extra = [f"<extra_id_{n}>" for n in reversed(range(count))]
    pieces = [*_pieces(sp), *((text, 0.0) for text in extra if text not in {p.text for p in sp.pieces})]
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    around = template("$A </s>", "$A </s> $B </s>", ids)
    return assemble(sp, pieces, around=around, more=extra), _roles(sp) | {"pad": "<pad>"}


def albert(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """[CLS] A [SEP] B [SEP]; quotes made one, accents dropped, lower case."""
    before = [replace("``", '"'), replace("''", '"')]
    if config.get("keep_accents") is not True:
        before += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if config.get("do_lower_case", True) is not False:
        before += [{"type": "Lowercase"}]
    ids = {piece.text: n for n, piece in enumerate(sp.pieces)}
    around = template("[CLS]:0 $A:0 [SEP]:0", "[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ids)
    roles = {
        "bos": "[CLS]",
        "eos": "[SEP]",
        "unk": "<unk>",
        "sep": "[SEP]",
        "pad": "<pad>",
        "cls": "[CLS]",
        "mask": "[MASK]",
    }
    return assemble(sp, _pieces(sp), around=around, before=before, more=["[MASK]"], strips=("[MASK]",)), roles


def _fairseq(sp: SentencePiece, more: list[str], single: str, pair: str) -> Made:
    pieces = [*((text, 0.0) for text in FAIRSEQ), *_pieces(sp)[3:], *((text, 0.0) for text in more)]
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    if len(ids) != len(pieces):
        raise BadFile("a fairseq model must begin with <unk> <s> </s>; this sentencepiece model begins otherwise")
    made = assemble(sp, pieces, around=template(single, pair, ids), more=[*FAIRSEQ, *more], strips=("<mask>",), unk=3)
    roles = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": "<mask>"}
    return made, roles


def xlm_roberta(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    return _fairseq(sp, ["<mask>"], "<s> $A </s>", "<s> $A </s> </s> $B </s>")


def mbart(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """X </s> lang: the language of the source is a setting."""
    code = _language(config, MBART_LANGUAGES)
    return _fairseq(sp, [*MBART_LANGUAGES, "<mask>"], f"$A </s> {code}", f"$A $B </s> {code}")


def mbart50(sp: SentencePiece, config: Mapping[str, Any]) -> Made:
    """lang X </s>."""
    code = _language(config, MBART50_LANGUAGES)
    return _fairseq(sp, [*MBART50_LANGUAGES, "<mask>"], f"{code} $A </s>", f"{code} $A $B </s>")


STYLES: dict[str, Callable[[SentencePiece, Mapping[str, Any]], Made]] = {
    "t5": t5,
    "mt5": t5,
    "llama": llama,
    "mistral": llama,
    "gemma": llama,
    "albert": albert,
    "mbart": mbart,
    "mbart50": mbart50,
    "xlmroberta": xlm_roberta,
}


def _language(config: Mapping[str, Any], known: list[str]) -> str:
    code = config.get("src_lang") or "en_XX"
    if code not in known:
        raise BadFile(f"src_lang must be one of {len(known)} languages such as en_XX, got {str(code)[:20]!r}")
    return str(code)


def _pieces(sp: SentencePiece) -> list[tuple[str, float]]:
    return [(piece.text, piece.score) for piece in sp.pieces]


def _roles(sp: SentencePiece) -> dict[str, str]:
    ids = {"unk": sp.unk, "bos": sp.bos, "eos": sp.eos, "pad": sp.pad}
    return {role: sp.pieces[n].text for role, n in ids.items() if 0 <= n < len(sp.pieces)}


def assemble(
    sp: SentencePiece,
    pieces: list[tuple[str, float]],
    *,
    around: Spec | None = None,
    unk: int | None = None,
    before: list[Spec] | None = None,
    more: list[str] | None = None,
    strips: tuple[str, ...] = (),
) -> Spec:
    """A tokenizer.json that cuts text as sentencepiece does: the whole text is one unit, spaces are in the pieces."""
    kinds = {piece.text: piece.kind for piece in sp.pieces}
    ids = {text: n for n, (text, _) in enumerate(pieces)}
    special = [t for t in ids if kinds.get(t) in (CONTROL, UNKNOWN) or t in (more or [])]
    user = [t for t in ids if kinds.get(t) == USER and t not in special]
    unk = sp.unk if unk is None else unk
    normal = list(before or [])
    if sp.charsmap:
        normal.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(sp.charsmap).decode()})
    if sp.tidy_spaces:
        normal += [replace_pattern(ENDS, ""), ONE_SPACE]
    if sp.dummy_prefix:
        normal.append({"type": "Prepend", "prepend": "▁" if sp.escape_spaces else " "})
    if sp.escape_spaces:
        normal.append(replace(" ", "▁"))
    bytes_too = sp.byte_fallback
    if sp.kind == BPE:
        model = bpe(
            ids, merges(pieces, {*special, *user}), unk_token=pieces[unk][0], fuse_unk=True, byte_fallback=bytes_too
        )
    else:
        model = {
            "type": "Unigram",
            "unk_id": unk,
            "vocab": [list(piece) for piece in pieces],
            "byte_fallback": bytes_too,
        }
    decoder = [replace("▁", " "), *([{"type": "ByteFallback"}] if bytes_too else []), {"type": "Fuse"}]
    if sp.dummy_prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    tokens = [added(t, ids[t], lstrip=t in strips) for t in special] + [added(t, ids[t], special=False) for t in user]
    return whole(model, normalizer=normal, pre_tokenizer=[], decoder=decoder, post_processor=around, added=tokens)


def merges(pieces: list[tuple[str, float]], leave: set[str]) -> list[list[str]]:
    """The merges a scored BPE vocabulary stands for: every way to make a piece of two others, best piece first."""
    ids = {text: n for n, (text, _) in enumerate(pieces) if text not in leave}
    found = []
    for text, score in pieces:
        if text in ids and len(text) > 1:
            halves = [(text[:n], text[n:]) for n in range(1, len(text)) if text[:n] in ids and text[n:] in ids]
            found += [(-score, ids[left], ids[right], left, right) for left, right in halves]
    return [[left, right] for *_, left, right in sorted(found)]
