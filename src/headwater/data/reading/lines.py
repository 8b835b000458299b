"""Lines of text with their number and byte offset, in bounded memory, whatever the encoding.

Only a line feed ends a line (and takes a carriage return before it with it). Other separators, such as U+2028 or a
form feed, are data: splitting at them would shift one side of a parallel corpus against the other.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from headwater.data.reading.encodings import Encoding, detect, named
from headwater.data.reading.opening import Bytes, opened
from headwater.data.reading.problems import Problems
from headwater.errors import BadFile, BadSetting, nearest

BLOCK = 2**20
SAMPLE = 4 * 2**20  # bytes from which the encoding is found
STATELESS = ("utf-8", "ascii", "iso8859-1", "latin-1", "cp1252", "gb18030")  # lines decode together as they do alone
POLICIES = ("strict", "skip", "replace")


@dataclass(frozen=True)
class Reading:
    """How bytes become lines: the encoding (None: found), what to do with wrong bytes, the longest row in bytes."""

    encoding: str | None = None
    invalid: str = "strict"
    longest: int = 2**20

    def __post_init__(self) -> None:
        if self.invalid not in POLICIES:
            raise BadSetting(f"invalid must be strict, skip or replace, got {self.invalid!r}; "
                             + nearest(self.invalid, POLICIES))  # fmt: skip
        if self.longest < 16 or self.longest % 4:
            raise BadSetting(f"longest must be a multiple of 4 from 16, got {self.longest}; 1048576 is the usual one")


USUAL = Reading()


class Line(NamedTuple):
    number: int  # from 1
    text: str
    fault: str = ""  # why the line cannot be used; its text is then empty
    ends: bool = True  # False: a piece of a line too long to hold; the next piece follows


class Piece(NamedTuple):
    number: int
    offset: int
    data: bytes
    ends: bool


def encoding_of(path: Path, reading: Reading) -> Encoding:
    with opened(path) as stream:
        start = stream.read(SAMPLE)
    if not start.strip():
        raise BadFile(f"{path} is empty; give a file with at least one line")
    return named(reading.encoding, start) if reading.encoding else detect(path, start)


def pieces(path: Path, reading: Reading, problems: Problems) -> Iterator[Line]:
    """Every line of the file; lines above reading.longest come in pieces of at most that many bytes."""
    encoding = encoding_of(path, reading)
    decode = _Decoder(path, encoding, reading.invalid, problems)
    with opened(path) as stream:
        stream.read(encoding.mark)
        cutter = _Cutter(encoding.newline, reading.longest, encoding.mark)
        quick = encoding.name in STATELESS
        while block := stream.read(BLOCK):
            texts = cutter.texts(block, encoding.name) if quick and not decode.inside else None
            if texts is None:
                yield from map(decode, cutter.feed(block))
            else:
                first = cutter.number - len(texts)
                yield from (Line(number, text.removesuffix("\r")) for number, text in enumerate(texts, first))
        yield from map(decode, cutter.end())


def lines(path: Path, reading: Reading, problems: Problems) -> Iterator[Line]:
    """Every line whole; one above reading.longest comes once, as a fault, without its text."""
    long = False
    for line in pieces(path, reading, problems):
        if not line.ends:
            long = True
        elif long:
            long = False
            yield Line(line.number, "", f"longer than {reading.longest:,} bytes")
        else:
            yield line


def good(path: Path, found: Iterable[Line], problems: Problems) -> Iterator[Line]:
    """The lines that can be used; the others are counted."""
    for line in found:
        if line.fault:
            problems.add(path, line.number, line.fault)
        else:
            yield line


# ------------------------------------------------------------------------------------------------- bytes to pieces


class _Cutter:
    """Cuts blocks of bytes into lines; memory is bounded by one block and the longest piece."""

    def __init__(self, newline: bytes, longest: int, offset: int = 0) -> None:
        self.newline, self.longest, self.offset = newline, longest, offset
        self.number, self.rest = 1, b""

    def feed(self, block: bytes) -> Iterator[Piece]:
        """The lines that end in this block, and the pieces of one that is longer than the longest."""
        *whole, self.rest = _split(self.rest + block, self.newline)
        for data in whole:
            while len(data) > self.longest:
                yield self._piece(data[: self.longest])
                data = data[self.longest :]
            yield Piece(self.number, self.offset, data, True)
            self.number += 1
            self.offset += len(data) + len(self.newline)
        while len(self.rest) > self.longest:
            piece = self._piece(self.rest[: self.longest])
            self.rest = self.rest[self.longest :]
            yield piece

    def _piece(self, data: bytes) -> Piece:
        piece = Piece(self.number, self.offset, data, False)
        self.offset += len(data)
        return piece

    def texts(self, block: bytes, encoding: str) -> list[str] | None:
        """The lines that end in this block, decoded in one go; None where one of them needs care (then call feed)."""
        data = self.rest + block
        end = data.rfind(b"\n")
        if end < 0:
            return None
        try:
            texts = data[:end].decode(encoding).split("\n")
        except UnicodeDecodeError:
            return None
        if 4 * max(map(len, texts)) > self.longest:  # a character has at most four bytes
            return None
        self.number += len(texts)
        self.offset += end + 1
        self.rest = data[end + 1 :]
        return texts

    def end(self) -> Iterator[Piece]:
        """The last line, where no newline ends it."""
        if self.rest:
            yield Piece(self.number, self.offset, self.rest, True)


def cut(stream: Bytes, newline: bytes, longest: int, offset: int = 0) -> Iterator[Piece]:
    """Byte lines without their newline."""
    cutter = _Cutter(newline, longest, offset)
    while block := stream.read(BLOCK):
        yield from cutter.feed(block)
    yield from cutter.end()


def _split(data: bytes, newline: bytes) -> list[bytes]:
    """data.split(newline), at whole code units only: in UTF-16 the bytes 0A 00 may straddle two characters."""
    width = len(newline)
    if width == 1:
        return data.split(newline)
    found, start, place = [], 0, data.find(newline)
    while place >= 0:
        if (place - start) % width:
            place = data.find(newline, place + 1)
            continue
        found.append(data[start:place])
        start = place + width
        place = data.find(newline, start)
    return [*found, data[start:]]


# -------------------------------------------------------------------------------------------------- pieces to text


class _Decoder:
    """Text of each piece. A character may straddle two pieces of one line; wrong bytes are met by the policy."""

    def __init__(self, path: Path, encoding: Encoding, invalid: str, problems: Problems) -> None:
        self.path, self.encoding, self.invalid, self.problems = path, encoding, invalid, problems
        self.partial = codecs.getincrementaldecoder(encoding.name)()
        self.inside = False  # the piece before this one did not end its line

    def __call__(self, piece: Piece) -> Line:
        alone, self.inside = piece.ends and not self.inside, not piece.ends
        pending = 0 if alone else len(self.partial.getstate()[0])
        try:
            text = piece.data.decode(self.encoding.name) if alone else self.partial.decode(piece.data, piece.ends)
        except UnicodeDecodeError as error:
            return self._wrong(piece, error, piece.offset - pending + error.start)
        if piece.ends:
            self.partial.reset()
            text = text.removesuffix("\r")
        return Line(piece.number, text, "", piece.ends)

    def _wrong(self, piece: Piece, error: UnicodeDecodeError, offset: int) -> Line:
        self.partial.reset()
        what = f"not valid {self.encoding.name}"
        if self.invalid == "strict":
            raise BadFile(
                f"{self.path}: byte {offset} (line {piece.number}) is 0x{error.object[error.start]:02X}, {what}; "
                "name the file's --encoding, or --invalid skip (leave such lines out) or replace"
            )
        if self.invalid == "skip":
            return Line(piece.number, "", what, piece.ends)
        self.problems.repaired += 1
        text = piece.data.decode(self.encoding.name, "replace")
        return Line(piece.number, text.removesuffix("\r") if piece.ends else text, "", piece.ends)
