"""Tokenizer specs of Marian (sentencepiece + vocab.json) and fairseq (dictionary + BPE codes) checkpoints.

Marian has a sentencepiece model for each language, and one vocab.json with the ids of both. fairseq has

    dict.xx.txt     a piece and its count per line; pieces that continue end in @@; ids follow <s> <pad> </s> <unk>
    bpe codes       two pieces per line, best first; the last piece of a word ends in </w>
"""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote
from headwater.text.loaders.sentencepiece import FAIRSEQ_TOKENS, build_spec
from headwater.text.loaders.sentencepiece_model import CONTROL, UNKNOWN, SentencePieceModel
from headwater.text.spec import TokenizerSpec, added_token, bpe_model, template_processing, tokenizer_spec

# ------------------------------------------------------------------------------------------------------------- Marian

MARIAN_SPECIAL_TOKENS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def marian_spec(sp: SentencePieceModel, vocab: Mapping[str, int], where: object) -> TokenizerSpec:
    """Text </s>. Pieces of the other language keep their ids, with scores so low that they are chosen last."""
    for token in ("</s>", "<unk>"):
        if token not in vocab:
            raise BadFile(_("{where}: {token} must be in the vocabulary; it is not", where=where, token=quote(token)))
    by_id = sorted(vocab, key=lambda piece: vocab[piece])
    if [vocab[piece] for piece in by_id] != list(range(len(by_id))):
        raise BadFile(
            _("{where}: the ids must run from 0 to {max_id} without a gap", where=where, max_id=len(by_id) - 1)
        )
    scores = {piece.text: piece.score for piece in sp.pieces if piece.piece_type not in (CONTROL, UNKNOWN)}
    last_resort = 2 * (min(scores.values(), default=0.0) - 10)
    pieces = [(piece, scores.get(piece, last_resort * max(len(piece), 1))) for piece in by_id]
    return build_spec(
        sp,
        pieces,
        post_processor=template_processing("$A </s>", "$A $B </s>", vocab),
        unk_id=vocab["<unk>"],
        added_special_tokens=[t for t in MARIAN_SPECIAL_TOKENS.values() if t in vocab],
    )


# ------------------------------------------------------------------------------------------------------------ fairseq

FAIRSEQ_SPECIAL_TOKENS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
END_OF_WORD = "</w>"
CONTINUATION_MARK = "@@"


def parse_dictionary(text: str, where: object) -> dict[str, int]:
    """Pieces and their ids; `wor@@` becomes `wor`, `word` becomes `word</w>`."""
    vocab = {token: number for number, token in enumerate(FAIRSEQ_TOKENS)}
    for line in filter(None, text.split("\n")):
        piece, _unused, count = line.rstrip("\r").removesuffix(" #fairseq:overwrite").rpartition(" ")
        is_continued = piece.endswith(CONTINUATION_MARK)
        spelling = piece.removesuffix(CONTINUATION_MARK) if is_continued else piece + END_OF_WORD
        if not piece or not count.isdecimal() or spelling in vocab:
            raise BadFile(
                _("{where}: each line must be a new piece and its count, got {line}", where=where, line=quote(line))
            )
        vocab[spelling] = len(vocab)
    return vocab


def parse_bpe_codes(text: str, where: object) -> list[list[str]]:
    """The merges of subword-nmt, version 0.2 (the last piece of a word is marked from the start)."""
    lines = [line.rstrip("\r").split(" ") for line in text.split("\n") if line.strip("\r ")]
    version = lines.pop(0) if lines and lines[0][0] == "#version:" else []
    if version[1:] != ["0.2"] or any(len(line) != 2 for line in lines):
        raise BadFile(
            _("{where}: must be BPE codes of version 0.2, two pieces per line; it is something else", where=where)
        )
    return lines


def missing_pieces(vocab: dict[str, int], merges: list[list[str]]) -> list[str]:
    """Intermediate pieces of the merges that the dictionary lacks; fairseq encodes them as <unk>."""
    missing: dict[str, None] = {}
    needed = set(vocab)
    for first, second in reversed(merges):  # a product comes after its parts
        if first + second in needed:
            for piece in (first, second):
                if piece not in needed:
                    needed.add(piece)
                    missing[piece] = None
    return list(missing)


def fairseq_spec(vocab: dict[str, int], merges: list[list[str]]) -> TokenizerSpec:
    """Text </s>. Merges with a piece outside the vocabulary are left out."""
    known_merges = [pair for pair in merges if {*pair, "".join(pair)} <= vocab.keys()]
    return tokenizer_spec(
        bpe_model(vocab, known_merges, unk_token="<unk>", end_of_word_suffix=END_OF_WORD),
        normalizer=[],
        pre_tokenizer=[{"type": "WhitespaceSplit"}],
        decoder=[{"type": "BPEDecoder", "suffix": END_OF_WORD}],
        post_processor=template_processing("$A </s>", "$A $B </s>", vocab),
        added_tokens=[added_token(token, vocab[token]) for token in FAIRSEQ_TOKENS],
    )
