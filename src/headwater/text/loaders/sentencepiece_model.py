"""Read sentencepiece .model files, without sentencepiece: they are small protobuf messages.

A protobuf message is a sequence of fields: a varint of (number << 3 | wire type), then the value. These are read:

    ModelProto        1: SentencePiece (repeated)    2: TrainerSpec    3: NormalizerSpec
    SentencePiece     1: piece    2: score    3: type
    TrainerSpec       3: model_type   24: treat_whitespace_as_suffix   35: byte_fallback   40-43: unk, bos, eos, pad
    NormalizerSpec    2: precompiled_charsmap   3: add_dummy_prefix   4: remove_extra_whitespaces   5: escape_...
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import quote, read_limited

MAX_MODEL_BYTES = 32 << 20
MAX_PIECES = 1_000_000
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM = 1
BPE = 2


class Piece(NamedTuple):
    text: str
    score: float
    piece_type: int


@dataclass
class SentencePieceModel:
    """The contents of a sentencepiece .model file."""

    pieces: list[Piece] = field(default_factory=list)
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    whitespace_as_suffix: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_sentencepiece(path: str | Path) -> SentencePieceModel:
    """Read a sentencepiece .model file."""
    return parse_sentencepiece(read_limited(path, MAX_MODEL_BYTES), path)


def parse_sentencepiece(raw: bytes, where: object = "sentencepiece") -> SentencePieceModel:
    """Parse a sentencepiece model; BadFile if it is not one."""
    # the three fields of a ModelProto
    model = SentencePieceModel()
    for number, value in _iter_fields(raw, where):
        if number == 1:
            model.pieces.append(_parse_piece(_require_bytes(value, where), where))
            if len(model.pieces) > MAX_PIECES:
                raise BadFile(
                    _(
                        "{where}: must have at most {max_pieces:,} pieces, it has more",
                        where=where,
                        max_pieces=MAX_PIECES,
                    )
                )
        elif number == 2:
            _parse_trainer_spec(model, _require_bytes(value, where), where)
        elif number == 3:
            _parse_normalizer_spec(model, _require_bytes(value, where), where)

    # what a valid model must have
    texts = {piece.text for piece in model.pieces}
    if (
        not model.pieces
        or len(texts) != len(model.pieces)
        or model.model_type not in (UNIGRAM, BPE)
        or model.whitespace_as_suffix
    ):
        raise BadFile(
            _(
                "{where}: not a sentencepiece model of type unigram or BPE with distinct pieces; is it another file?",
                where=where,
            )
        )
    if not 0 <= model.unk_id < len(model.pieces):
        raise BadFile(
            _(
                "{where}: the unknown piece {unk} must be one of the {num_pieces} pieces",
                where=where,
                unk=model.unk_id,
                num_pieces=len(model.pieces),
            )
        )
    return model


def _parse_piece(raw: bytes, where: object) -> Piece:
    """A SentencePiece message."""
    text = ""
    score = 0.0
    kind = NORMAL
    for number, value in _iter_fields(raw, where):
        if number == 1:
            try:
                text = _require_bytes(value, where).decode()
            except UnicodeDecodeError:
                raise BadFile(
                    _("{where}: a piece must be UTF-8, got {value}", where=where, value=quote(value))
                ) from None
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not text or len(text) > 256 or score - score != 0.0 or not NORMAL <= kind <= BYTE:
        raise BadFile(
            _(
                "{where}: a piece must have text, a finite score and a known type, got {value}",
                where=where,
                value=quote((text, score, kind)),
            )
        )
    return Piece(text, score, kind)


def _parse_trainer_spec(model: SentencePieceModel, raw: bytes, where: object) -> None:
    names = {3: "model_type", 40: "unk_id", 41: "bos_id", 42: "eos_id", 43: "pad_id"}
    flags = {24: "whitespace_as_suffix", 35: "byte_fallback"}
    _set_fields(model, raw, names, flags, where)


def _parse_normalizer_spec(model: SentencePieceModel, raw: bytes, where: object) -> None:
    _set_fields(model, raw, {}, {3: "add_dummy_prefix", 4: "remove_extra_whitespaces", 5: "escape_whitespaces"}, where)
    for number, value in _iter_fields(raw, where):
        if number == 2:
            model.charsmap = _require_bytes(value, where)


def _set_fields(
    model: SentencePieceModel, raw: bytes, numbers: dict[int, str], flags: dict[int, str], where: object
) -> None:
    for number, value in _iter_fields(raw, where):
        if number in numbers or number in flags:
            if not isinstance(value, int):
                raise BadFile(_("{where}: field {number} must be an integer", where=where, number=number))
            signed = value - (1 << 64) if value >> 63 else value  # -1 is written as 2^64 - 1
            setattr(model, numbers.get(number) or flags[number], bool(value) if number in flags else signed)


def _require_bytes(value: int | float | bytes, where: object) -> bytes:
    if not isinstance(value, bytes):
        raise BadFile(_("{where}: not a sentencepiece model: a number in place of a message", where=where))
    return value


def _iter_fields(raw: bytes, where: object) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of each field; nested messages and texts come as bytes."""
    offset = 0
    while offset < len(raw):
        key, offset = _varint(raw, offset, where)
        number = key >> 3
        wire_type = key & 7
        if wire_type == 0:
            integer, offset = _varint(raw, offset, where)
            yield number, integer
            continue
        size = {1: 8, 5: 4}.get(wire_type)
        if wire_type == 2:
            size, offset = _varint(raw, offset, where)
        if size is None or size > len(raw) - offset or number == 0:
            raise BadFile(
                _(
                    "{where}: not a sentencepiece model, or cut short, at byte {offset} of a message of {num_bytes}",
                    where=where,
                    offset=offset,
                    num_bytes=len(raw),
                )
            )
        value = raw[offset : offset + size]
        offset += size
        yield number, struct.unpack("<f", value)[0] if wire_type == 5 else value


def _varint(raw: bytes, offset: int, where: object) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if offset >= len(raw):
            break
        byte = raw[offset]
        offset += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, offset
    raise BadFile(_("{where}: not a sentencepiece model, or cut short: a number does not end", where=where))
