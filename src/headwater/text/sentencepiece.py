"""Reading a sentencepiece `.model` file, without sentencepiece: it is a small protobuf message.

A message is a row of fields: a varint of (number << 3 | wire kind), then the value. Only what is needed is kept:

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
from headwater.weights.files import read_bounded, shown

MOST_BYTES, MOST_PIECES = 32 << 20, 1_000_000
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


@dataclass
class SentencePiece:
    pieces: list[Piece] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    space_last: bool = False
    unk: int = 0
    bos: int = 1
    eos: int = 2
    pad: int = -1
    charsmap: bytes = b""
    dummy_prefix: bool = True
    tidy_spaces: bool = True
    escape_spaces: bool = True


def read(path: str | Path) -> SentencePiece:
    return parse(read_bounded(path, MOST_BYTES), path)


def parse(raw: bytes, where: object = "sentencepiece") -> SentencePiece:
    """The model in `raw`, or a BadFile."""
    model = SentencePiece()
    for number, value in _fields(raw, where):
        if number == 1:
            model.pieces.append(_piece(_message(value, where), where))
            if len(model.pieces) > MOST_PIECES:
                raise BadFile(f"{where}: must have at most {MOST_PIECES:,} pieces, it has more")
        elif number == 2:
            _trainer(model, _message(value, where), where)
        elif number == 3:
            _normalizer(model, _message(value, where), where)
    texts = {piece.text for piece in model.pieces}
    if not model.pieces or len(texts) != len(model.pieces) or model.kind not in (UNIGRAM, BPE) or model.space_last:
        raise BadFile(f"{where}: not a sentencepiece model of kind unigram or BPE with distinct pieces; another file?")
    if not 0 <= model.unk < len(model.pieces):
        raise BadFile(f"{where}: the unknown piece {model.unk} must be one of the {len(model.pieces)} pieces")
    return model


def _piece(raw: bytes, where: object) -> Piece:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(raw, where):
        if number == 1:
            try:
                text = _message(value, where).decode()
            except UnicodeDecodeError:
                raise BadFile(f"{where}: a piece must be UTF-8, got {shown(value)}") from None
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not text or len(text) > 256 or score - score != 0.0 or not NORMAL <= kind <= BYTE:
        raise BadFile(
            f"{where}: a piece must have text, a finite score and a known type, got {shown((text, score, kind))}"
        )
    return Piece(text, score, kind)


def _trainer(model: SentencePiece, raw: bytes, where: object) -> None:
    names = {3: "kind", 40: "unk", 41: "bos", 42: "eos", 43: "pad"}
    flags = {24: "space_last", 35: "byte_fallback"}
    _set(model, raw, names, flags, where)


def _normalizer(model: SentencePiece, raw: bytes, where: object) -> None:
    _set(model, raw, {}, {3: "dummy_prefix", 4: "tidy_spaces", 5: "escape_spaces"}, where)
    for number, value in _fields(raw, where):
        if number == 2:
            model.charsmap = _message(value, where)


def _set(model: SentencePiece, raw: bytes, numbers: dict[int, str], flags: dict[int, str], where: object) -> None:
    for number, value in _fields(raw, where):
        if number in numbers or number in flags:
            if not isinstance(value, int):
                raise BadFile(f"{where}: field {number} must be a whole number")
            signed = value - (1 << 64) if value >> 63 else value  # -1 is written as 2^64 - 1
            setattr(model, numbers.get(number) or flags[number], bool(value) if number in flags else signed)


def _message(value: int | float | bytes, where: object) -> bytes:
    if not isinstance(value, bytes):
        raise BadFile(f"{where}: not a sentencepiece model: a number stands where a message must")
    return value


def _fields(raw: bytes, where: object) -> Iterator[tuple[int, int | float | bytes]]:
    """(number, value) of each field; nested messages and texts come as bytes."""
    at = 0
    while at < len(raw):
        key, at = _varint(raw, at, where)
        number, wire = key >> 3, key & 7
        if wire == 0:
            whole, at = _varint(raw, at, where)
            yield number, whole
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(raw, at, where)
        if size is None or size > len(raw) - at or number == 0:
            raise BadFile(f"{where}: not a sentencepiece model, or cut short, at byte {at} of a message of {len(raw)}")
        value = raw[at : at + size]
        at += size
        yield number, struct.unpack("<f", value)[0] if wire == 5 else value


def _varint(raw: bytes, at: int, where: object) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise BadFile(f"{where}: not a sentencepiece model, or cut short: a number does not end")
