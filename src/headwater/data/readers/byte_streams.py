"""Byte streams of data files: gzip with a decompression limit, binary files refused by magic number, progress."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

from headwater.errors import BadFile, NotFound
from headwater.i18n import _

# ------------------------------------------------------------------------------------------------------ magic numbers

MAGIC_BYTES = 264  # bytes of a file that are checked; the magic number of tar is at 257

ARCHIVES = (
    (b"7z\xbc\xaf\x27\x1c", _("a 7z archive")),
    (b"Rar!\x1a\x07", _("a RAR archive")),
    (b"\xfd7zXZ\x00", _("an xz file")),
    (b"\x28\xb5\x2f\xfd", _("a Zstandard file")),
)
DOCUMENTS = (
    (b"%PDF-", _("a PDF document")),
    (b"{\\rtf", _("an RTF document")),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _("an old Microsoft Office document")),
)
TABLES = (
    (b"PAR1", _("a Parquet file")),
    (b"ARROW1\x00\x00", _("an Arrow file")),
    (b"\x89HDF\r\n\x1a\n", _("an HDF5 file")),
)
MEDIA = (
    (b"\x89PNG\r\n\x1a\n", _("a PNG image")),
    (b"\xff\xd8\xff", _("a JPEG image")),
    (b"GIF87a", _("a GIF image")),
    (b"GIF89a", _("a GIF image")),
    (b"II*\x00", _("a TIFF image")),
    (b"MM\x00*", _("a TIFF image")),
    (b"fLaC", _("a FLAC recording")),
    (b"OggS\x00", _("an Ogg recording")),
    (b"ID3\x02", _("an MP3 recording")),
    (b"ID3\x03", _("an MP3 recording")),
    (b"ID3\x04", _("an MP3 recording")),
    (b"\xff\xfb", _("an MP3 recording")),
    (b"\x1aE\xdf\xa3", _("a Matroska video")),
)
RIFF = {b"WAVE": _("a WAV recording"), b"WEBP": _("a WebP image"), b"AVI ": _("an AVI video")}
MODELS = (
    (b"GGUF", _("a GGUF model")),
    (b"\x80\x02", _("a Python pickle")),
    (b"\x80\x03", _("a Python pickle")),
    (b"\x80\x04", _("a Python pickle")),
    (b"\x80\x05", _("a Python pickle")),
    (b"\x93NUMPY", _("a NumPy array")),
    (b"\x7fELF", _("a program")),
)
SQLITE = b"SQLite format 3\x00"
ZIP = b"PK\x03\x04"


def refuse_binary(path: Path, header: bytes) -> None:
    """Raise BadFile, with advice, when the first bytes of a file are the magic number of a binary format."""
    if header.startswith(ZIP):
        _refuse_zip(path)
    if kind := _match_magic(header, DOCUMENTS):
        raise BadFile(
            _(
                "{path} is {kind}, which is not read; save its text as a plain text file (.txt) and give that",
                path=path,
                kind=kind,
            )
        )
    if kind := _match_magic(header, TABLES):
        raise BadFile(
            _("{path} is {kind}, which is not read; write its rows as CSV or JSONL and give that", path=path, kind=kind)
        )
    if header.startswith(SQLITE):
        raise BadFile(
            _("{path} is an SQLite database, which is not read; export the table as CSV and give that", path=path)
        )
    if kind := _match_magic(header, MEDIA) or _riff(header) or _mp4(header):
        raise BadFile(_("{path} is {kind}, which is not read; give text, a table or JSONL", path=path, kind=kind))
    if kind := _match_magic(header, MODELS):
        raise BadFile(_("{path} is {kind}, not data to learn from; give text, a table or JSONL", path=path, kind=kind))
    if kind := _match_magic(header, ARCHIVES) or _tar_or_bzip2(header):
        raise BadFile(
            _("{path} is {kind}, which is not read; unpack it and give the files inside", path=path, kind=kind)
        )


def _match_magic(header: bytes, signatures: tuple[tuple[bytes, str], ...]) -> str:
    return next((kind for magic, kind in signatures if header.startswith(magic) and _is_binary(header, magic)), "")


def _is_binary(header: bytes, signature: bytes) -> bool:
    """A text may begin with the letters PAR1, GGUF or fLaC; in a file of that format control characters follow."""
    return signature not in (b"PAR1", b"GGUF", b"fLaC") or b"\0" <= header[4:5] < b" "


def _riff(header: bytes) -> str:
    return RIFF.get(header[8:12], "") if header.startswith(b"RIFF") else ""


def _mp4(header: bytes) -> str:
    return _("an MP4 recording") if header[:3] == b"\0\0\0" and header[4:8] == b"ftyp" else ""


def _tar_or_bzip2(header: bytes) -> str:
    if header[257:262] == b"ustar":
        return _("a tar archive")
    return _("a bzip2 file") if header.startswith(b"BZh") and header[4:10] == b"1AY&SY" else ""


def _refuse_zip(path: Path) -> None:
    """Office documents are zip archives; the names of the files inside tell them apart."""
    names = _zip_names(path)
    if "word/document.xml" in names:
        raise BadFile(_("{path} is a Word document (docx), which is not read; save it as plain text (.txt)", path=path))
    if "xl/workbook.xml" in names:
        raise BadFile(
            _("{path} is an Excel workbook (xlsx), which is not read; save the sheet as CSV (UTF-8)", path=path)
        )
    if "ppt/presentation.xml" in names:
        raise BadFile(
            _("{path} is a PowerPoint file (pptx), which is not read; save its text as a .txt file", path=path)
        )
    if "content.xml" in names and "mimetype" in names:
        raise BadFile(
            _(
                "{path} is an OpenDocument file, which is not read; save a text as .txt, a sheet as CSV (UTF-8)",
                path=path,
            )
        )
    if "META-INF/container.xml" in names:
        raise BadFile(_("{path} is an EPUB book, which is not read; convert it to plain text (.txt)", path=path))
    raise BadFile(_("{path} is a zip archive, which is not read; unpack it and give the files inside", path=path))


def _zip_names(path: Path) -> frozenset[str]:
    """The names of the files in a zip archive; none when its directory is damaged."""
    try:
        with zipfile.ZipFile(path) as archive:
            return frozenset(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return frozenset()


# ------------------------------------------------------------------------------------------------------ read progress

ProgressCallback = Callable[[Path, int, int], None]  # file, bytes read so far, size in bytes


def _no_callback(path: Path, done: int, total: int) -> None: ...


_progress_callback: ContextVar[ProgressCallback] = ContextVar("progress_callback", default=_no_callback)


@contextmanager
def progress_callback(callback: ProgressCallback) -> Iterator[None]:
    """Within this context, the callback is called after each block that is read of a file."""
    before = _progress_callback.set(callback)
    try:
        yield
    finally:
        _progress_callback.reset(before)


class ProgressStream:
    """A byte stream that reports its progress; `raw` is the file beneath it, compressed or not."""

    def __init__(self, path: Path, stream: ByteStream, raw: BinaryIO, total: int) -> None:
        self.path = path
        self.stream = stream
        self.raw = raw
        self.total = total
        self.callback = _progress_callback.get()

    def read(self, size: int, /) -> bytes:
        block = self.stream.read(size)
        self.callback(self.path, self.raw.tell() if block else self.total, self.total)
        return block


class ReadingProgress:
    """Progress callback that prints: on a terminal one line that is overwritten, elsewhere a line every few seconds."""

    def __init__(self, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.out = out or sys.stderr
        self.clock = clock
        self.is_terminal = self.out.isatty()
        self.interval = 0.2 if self.is_terminal else 5.0  # seconds between two messages
        self.visible = False
        self.last_update = self.clock()

    def __call__(self, path: Path, done: int, total: int) -> None:
        if done >= total:
            self.clear()
        elif self.clock() - self.last_update >= self.interval:
            self.last_update = self.clock()
            name = "".join(c if c.isprintable() else "·" for c in path.name)
            text = _(
                "reading {name} … {size} of {total}",
                name=name,
                size=f"{done / 1e6:.0f} MB",
                total=f"{total / 1e6:.0f} MB",
            )
            self.visible = True
            self.out.write(f"\r{text}\x1b[K" if self.is_terminal else f"{text}\n")
            self.out.flush()

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self.visible and self.is_terminal:
            self.out.write("\r\x1b[K")
            self.out.flush()
        self.visible = False


# ------------------------------------------------------------------------------------------------------------ opening

GZIP_MAGIC = b"\x1f\x8b"
MAX_COMPRESSION_RATIO = 200  # text compresses 3 to 20 times; deflate can reach 1032
UNCHECKED_BYTES = 16 * 2**20  # below this many decompressed bytes no ratio is dangerous
MAX_UNPACKED_BYTES = 64 * 2**30  # decompressed bytes of one file

SPECIAL_FILE_KINDS = {
    stat.S_ISDIR: _("a folder"),
    stat.S_ISFIFO: _("a pipe"),
    stat.S_ISCHR: _("a device"),
    stat.S_ISBLK: _("a device"),
    stat.S_ISSOCK: _("a socket"),
}


class ByteStream(Protocol):
    """A file or a decompressor that can be read in blocks."""

    def read(self, size: int, /) -> bytes: ...


def stat_regular(path: Path) -> os.stat_result:
    """The file's stat result; anything but a regular file is refused before it is opened."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NotFound(_("no file is at {path}; check the name", path=path)) from None
    except OSError as error:
        reason = _("its links form a loop") if error.errno == errno.ELOOP else error.strerror
        raise BadFile(_("{path} cannot be read: {reason}", path=path, reason=reason)) from None
    if not stat.S_ISREG(status.st_mode):
        kind = next(
            (name for is_kind, name in SPECIAL_FILE_KINDS.items() if is_kind(status.st_mode)), _("not a regular file")
        )
        raise BadFile(
            _("{path} must be a regular file, it is {kind}; copy its content into a file first", path=path, kind=kind)
        )
    return status


@contextmanager
def open_bytes(path: Path) -> Iterator[ByteStream]:
    """Open a plain or gzip file (detected by its first bytes, not by its name) as a byte stream."""
    stat_regular(path)
    try:
        # O_NONBLOCK: open() returns even if the file has been replaced by a pipe since stat()
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise BadFile(_("{path} cannot be opened: {strerror}", path=path, strerror=error.strerror)) from None
    with os.fdopen(handle, "rb") as raw:
        header = raw.read(MAGIC_BYTES)
        raw.seek(0)
        refuse_binary(path, header)
        stream = GunzipGuard(path, raw) if header[:2] == GZIP_MAGIC else raw
        yield ProgressStream(path, stream, raw, os.fstat(raw.fileno()).st_size)


class GunzipGuard:
    """A gzip stream that raises BadFile above MAX_COMPRESSION_RATIO times its compressed size (zip bombs)."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self.path = path
        self.stream = gzip.GzipFile(fileobj=raw)
        self.compressed_size = os.fstat(raw.fileno()).st_size
        self.bytes_read = 0

    def read(self, size: int, /) -> bytes:
        """Decompress up to `size` bytes, and check what comes out."""
        try:
            block = self.stream.read(size)
        except (EOFError, zlib.error, OSError) as error:
            raise BadFile(
                _(
                    "{path} is a damaged gzip file after byte {offset}: {error}",
                    path=self.path,
                    offset=self.bytes_read,
                    error=error,
                )
            ) from None

        # the first block: not another gzip file, and not a binary format
        if not self.bytes_read and block[:2] == GZIP_MAGIC:
            raise BadFile(_("{path} is gzip inside gzip; unpack it once", path=self.path))
        if not self.bytes_read:
            refuse_binary(self.path, block[:MAGIC_BYTES])

        # the compression ratio
        self.bytes_read += len(block)
        limit = max(UNCHECKED_BYTES, MAX_COMPRESSION_RATIO * self.compressed_size)
        if self.bytes_read > min(MAX_UNPACKED_BYTES, limit):
            raise BadFile(
                _(
                    "{path} decompresses to more than {num_bytes:,} bytes from {compressed_size:,}; text never "
                    "compresses {max_ratio} times, so it is refused; decompress it yourself if you trust it",
                    path=self.path,
                    num_bytes=self.bytes_read,
                    compressed_size=self.compressed_size,
                    max_ratio=MAX_COMPRESSION_RATIO,
                )
            )
        return block
