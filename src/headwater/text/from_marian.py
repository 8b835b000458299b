"""Marian's tokenizers: a sentencepiece model for each language, and one vocab.json with the ids of both."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.errors import BadFile
from headwater.text.components import Spec, template
from headwater.text.from_sentencepiece import assemble
from headwater.text.sentencepiece import CONTROL, UNKNOWN, SentencePiece
from headwater.weights.files import shown

ROLES = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


def marian(sp: SentencePiece, vocab: Mapping[str, int], where: object) -> Spec:
    """Text </s>. Pieces of the other language keep their ids, with scores so low that they are a last resort."""
    for token in ("</s>", "<unk>"):
        if token not in vocab:
            raise BadFile(f"{where}: {shown(token)} must be in the vocabulary; it is not")
    by_id = sorted(vocab, key=lambda piece: vocab[piece])
    if [vocab[piece] for piece in by_id] != list(range(len(by_id))):
        raise BadFile(f"{where}: the ids must run from 0 to {len(by_id) - 1} without a gap")
    scores = {piece.text: piece.score for piece in sp.pieces if piece.kind not in (CONTROL, UNKNOWN)}
    last_resort = 2 * (min(scores.values(), default=0.0) - 10)
    pieces = [(piece, scores.get(piece, last_resort * max(len(piece), 1))) for piece in by_id]
    around = template("$A </s>", "$A $B </s>", vocab)
    return assemble(sp, pieces, around=around, unk=vocab["<unk>"], more=[t for t in ROLES.values() if t in vocab])
