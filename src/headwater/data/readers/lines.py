"""Lines of a text file with number and byte offset, decoded in bounded memory, and the count of bad rows.

Only a line feed ends a line (with a carriage return before it). Other separators, such as U+2028 or a form feed, are
data: splitting at them would shift one side of a parallel corpus against the other.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headwater.data.readers.byte_streams import open_bytes
from headwater.data.readers.encoding import TextEncoding, detect_encoding, encoding_from_name
from headwater.errors import BadFile, BadSetting, nearest
from headwater.i18n import _

# ----------------------------------------------------------------------------------------------------------- bad rows

MAX_LOCATIONS = 5  # locations stored for each reason


@dataclass
class BadRows:
    """Counts bad rows by reason, with the locations of the first ones; too many raise BadFile."""

    max_count: int = 1000  # above this many bad rows the format was probably detected wrongly
    count: int = 0
    repaired: int = 0  # lines decoded with U+FFFD in place of invalid bytes
    locations: dict[str, list[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, path: Path, line: int, reason: str) -> None:
        """Count one bad row; raise BadFile above max_count."""
        self.count += 1
        self.counts[reason] = self.counts.get(reason, 0) + 1
        locations = self.locations.setdefault(reason, [])
        if len(locations) < MAX_LOCATIONS:
            locations.append(f"{path.name}:{line}")
        if self.count > self.max_count:
            worst = max(self.counts, key=lambda name: self.counts[name])
            raise BadFile(
                _(
                    "{path}: more than {limit} bad rows, mostly '{reason}' (first at {location}); is it in "
                    "another format? fix it, or name its columns or encoding",
                    path=path,
                    limit=self.max_count,
                    reason=worst,
                    location=self.locations[worst][0],
                )
            )

    def to_dict(self) -> dict[str, Any]:
        reasons = [{"reason": r, "rows": n, "locations": self.locations[r]} for r, n in self.counts.items()]
        return {"rows": self.count, "repaired_lines": self.repaired, "reasons": reasons}

    def summary_lines(self) -> list[str]:
        """One line of text for each reason, the most frequent first."""
        lines: list[str] = [
            _(
                "{n} × {reason} ({locations}{more})",
                n=n,
                reason=reason,
                locations=", ".join(self.locations[reason]),
                more=" …" if n > MAX_LOCATIONS else "",
            )
            for reason, n in sorted(self.counts.items(), key=lambda item: -item[1])
        ]
        if self.repaired:
            lines.append(_("{repaired} lines kept with � in place of invalid bytes", repaired=self.repaired))
        return lines


# -------------------------------------------------------------------------------------------------------------- lines

BLOCK_BYTES = 2**20
SAMPLE_BYTES = 4 * 2**20  # bytes from which the encoding is detected
# encodings in which several lines can be decoded in one call
STATELESS_ENCODINGS = ("utf-8", "ascii", "iso8859-1", "latin-1", "cp1252", "gb18030")
ERROR_POLICIES = ("strict", "skip", "replace")


@dataclass(frozen=True)
class DecodeOptions:
    """Options of decoding: encoding (None: detected), policy for invalid bytes, maximum bytes of a line."""

    encoding: str | None = None
    errors: str = "strict"
    max_line_bytes: int = 2**20

    def __post_init__(self) -> None:
        if self.errors not in ERROR_POLICIES:
            raise BadSetting(
                _(
                    "encoding_errors must be strict, skip or replace, got {errors!r}; {nearest}",
                    errors=self.errors,
                    nearest=nearest(self.errors, ERROR_POLICIES),
                )
            )
        if self.max_line_bytes < 16 or self.max_line_bytes % 4:
            raise BadSetting(
                _(
                    "max_line_bytes must be a multiple of 4 and at least 16, got {max_line_bytes}; 1048576 is "
                    "the default",
                    max_line_bytes=self.max_line_bytes,
                )
            )


DEFAULT_DECODE_OPTIONS = DecodeOptions()


class TextLine(NamedTuple):
    """A decoded line, or a chunk of a line that is too long."""

    number: int  # from 1
    text: str
    error: str = ""  # why the line cannot be used; its text is then empty
    is_complete: bool = True  # False: a chunk of a long line; the next chunk follows


class LineChunk(NamedTuple):
    """The bytes of a line, or a chunk of them, with the byte offset in the file."""

    number: int
    offset: int
    data: bytes
    is_last: bool


def file_encoding(path: Path, decode_options: DecodeOptions) -> TextEncoding:
    """The encoding of a file: as named in the options, or detected."""
    with open_bytes(path) as stream:
        sample = stream.read(SAMPLE_BYTES)
    if not sample.strip():
        raise BadFile(_("{path} is empty; give a file with at least one line", path=path))
    if decode_options.encoding:
        return encoding_from_name(decode_options.encoding, sample)
    return detect_encoding(path, sample)


def iter_line_chunks(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TextLine]:
    """The lines of a file; lines above max_line_bytes are yielded in chunks of at most that size."""
    encoding = file_encoding(path, decode_options)
    decode = _LineDecoder(path, encoding, decode_options.errors, bad_rows)
    with open_bytes(path) as stream:
        stream.read(encoding.bom_length)
        splitter = LineSplitter(encoding.newline, decode_options.max_line_bytes, encoding.bom_length)
        is_stateless = encoding.name in STATELESS_ENCODINGS
        while block := stream.read(BLOCK_BYTES):
            texts = None
            if is_stateless and not decode.in_line:  # fast path: many lines in one call
                texts = splitter.decode_lines(block, encoding.name)
            if texts is None:
                yield from map(decode, splitter.feed(block))
            else:
                first = splitter.line_number - len(texts)
                yield from (TextLine(number, text.removesuffix("\r")) for number, text in enumerate(texts, first))
        yield from map(decode, splitter.flush())


def iter_lines(path: Path, decode_options: DecodeOptions, bad_rows: BadRows) -> Iterator[TextLine]:
    """The lines of a file; one above max_line_bytes is yielded once, as an error without its text."""
    is_long = False
    for line in iter_line_chunks(path, decode_options, bad_rows):
        if not line.is_complete:
            is_long = True
        elif is_long:
            is_long = False
            yield TextLine(
                line.number, "", _("longer than {max_bytes:,} bytes", max_bytes=decode_options.max_line_bytes)
            )
        else:
            yield line


def skip_bad_lines(path: Path, lines: Iterable[TextLine], bad_rows: BadRows) -> Iterator[TextLine]:
    """The lines without an error; the others are counted as bad rows."""
    for line in lines:
        if line.error:
            bad_rows.add(path, line.number, line.error)
        else:
            yield line


# -------------------------------------------------------------------------------------------------- bytes to lines


class LineSplitter:
    """Splits blocks of bytes into lines; memory is bounded by one block and one chunk."""

    def __init__(self, newline: bytes, max_bytes: int, offset: int = 0) -> None:
        self.newline = newline
        self.max_bytes = max_bytes
        self.offset = offset
        self.line_number = 1
        self.remainder = b""

    def feed(self, block: bytes) -> Iterator[LineChunk]:
        """The lines that end in this block, and the chunks of lines above max_bytes."""
        *lines, self.remainder = _split_code_units(self.remainder + block, self.newline)
        for data in lines:
            while len(data) > self.max_bytes:
                yield self._chunk(data[: self.max_bytes])
                data = data[self.max_bytes :]
            yield LineChunk(self.line_number, self.offset, data, True)
            self.line_number += 1
            self.offset += len(data) + len(self.newline)
        while len(self.remainder) > self.max_bytes:
            chunk = self._chunk(self.remainder[: self.max_bytes])
            self.remainder = self.remainder[self.max_bytes :]
            yield chunk

    def _chunk(self, data: bytes) -> LineChunk:
        chunk = LineChunk(self.line_number, self.offset, data, False)
        self.offset += len(data)
        return chunk

    def decode_lines(self, block: bytes, encoding: str) -> list[str] | None:
        """The lines that end in this block, decoded in one call; None if that is not possible (then call feed)."""
        data = self.remainder + block
        end = data.rfind(b"\n")
        if end < 0:
            return None
        try:
            texts = data[:end].decode(encoding).split("\n")
        except UnicodeDecodeError:
            return None
        if 4 * max(map(len, texts)) > self.max_bytes:  # a character has at most four bytes
            return None
        self.line_number += len(texts)
        self.offset += end + 1
        self.remainder = data[end + 1 :]
        return texts

    def flush(self) -> Iterator[LineChunk]:
        """The last line, where no newline ends it."""
        if self.remainder:
            yield LineChunk(self.line_number, self.offset, self.remainder, True)


def _split_code_units(data: bytes, newline: bytes) -> list[bytes]:
    """data.split(newline), at whole code units only: in UTF-16 the bytes 0A 00 may straddle two characters."""
    width = len(newline)
    if width == 1:
        return data.split(newline)
    lines: list[bytes] = []
    start = 0
    end = data.find(newline)
    while end >= 0:
        if (end - start) % width:  # straddles two code units
            end = data.find(newline, end + 1)
            continue
        lines.append(data[start:end])
        start = end + width
        end = data.find(newline, start)
    return [*lines, data[start:]]


# --------------------------------------------------------------------------------------------------- lines to text


class _LineDecoder:
    """Decodes line chunks. A character may straddle two chunks of one line; invalid bytes follow the error policy."""

    def __init__(self, path: Path, encoding: TextEncoding, errors: str, bad_rows: BadRows) -> None:
        self.path = path
        self.encoding = encoding
        self.errors = errors
        self.bad_rows = bad_rows
        self.incremental = codecs.getincrementaldecoder(encoding.name)()
        self.in_line = False  # the chunk before this one did not end its line

    def __call__(self, chunk: LineChunk) -> TextLine:
        is_full_line = chunk.is_last and not self.in_line
        self.in_line = not chunk.is_last
        pending = 0 if is_full_line else len(self.incremental.getstate()[0])
        try:
            if is_full_line:
                text = chunk.data.decode(self.encoding.name)
            else:
                text = self.incremental.decode(chunk.data, chunk.is_last)
        except UnicodeDecodeError as error:
            return self._handle_invalid(chunk, error, chunk.offset - pending + error.start)
        if chunk.is_last:
            self.incremental.reset()
            text = text.removesuffix("\r")
        return TextLine(chunk.number, text, "", chunk.is_last)

    def _handle_invalid(self, chunk: LineChunk, error: UnicodeDecodeError, offset: int) -> TextLine:
        """A line with invalid bytes, by the policy: strict, skip or replace."""
        self.incremental.reset()
        reason = _("not valid {name}", name=self.encoding.name)
        if self.errors == "strict":
            raise BadFile(
                _(
                    "{path}: byte {offset} (line {number}) is 0x{byte:02X}, {reason}; name the file's "
                    "--encoding, or --encoding-errors skip (leave such lines out) or replace",
                    path=self.path,
                    offset=offset,
                    number=chunk.number,
                    byte=error.object[error.start],
                    reason=reason,
                )
            )
        if self.errors == "skip":
            return TextLine(chunk.number, "", reason, chunk.is_last)
        self.bad_rows.repaired += 1
        text = chunk.data.decode(self.encoding.name, "replace")
        if chunk.is_last:
            text = text.removesuffix("\r")
        return TextLine(chunk.number, text, "", chunk.is_last)
