"""Bytes of a user's file, unpacked when it is gzip: never blocked by a pipe, never flooded by a bomb."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from headwater.data.reading.magic import START, refuse_binary
from headwater.data.reading.progress import Watched
from headwater.errors import BadFile, NotFound

GZIP = b"\x1f\x8b"
RATIO = 200  # honest text packs 3 to 20 times; deflate can reach 1032
FREE = 16 * 2**20  # below this many unpacked bytes no ratio is dangerous
LARGEST = 64 * 2**30  # unpacked bytes of one file

KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISSOCK: "a socket",
}


class Bytes(Protocol):
    def read(self, size: int, /) -> bytes: ...


def regular(path: Path) -> os.stat_result:
    """The file's status; anything that is not a plain file is refused before it is opened."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise NotFound(f"no file is at {path}; check the name") from None
    except OSError as error:
        why = "its links form a loop" if error.errno == errno.ELOOP else error.strerror
        raise BadFile(f"{path} cannot be read: {why}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = next((word for test, word in KINDS.items() if test(status.st_mode)), "no plain file")
        raise BadFile(f"{path} must be a plain file, it is {kind}; copy its content into a file first")
    return status


@contextmanager
def opened(path: Path) -> Iterator[Bytes]:
    """The content of a plain or gzip file (told by its first bytes, not by its name), read in blocks."""
    regular(path)
    try:
        # O_NONBLOCK: if the file was changed into a pipe since we looked, open() still returns
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise BadFile(f"{path} cannot be opened: {error.strerror}") from None
    with os.fdopen(handle, "rb") as raw:
        start = raw.read(START)
        raw.seek(0)
        refuse_binary(path, start)
        stream = Unpacked(path, raw) if start[:2] == GZIP else raw
        yield Watched(path, stream, raw, os.fstat(raw.fileno()).st_size)


class Unpacked:
    """A gzip stream that stops with a fault when it grows past RATIO times its packed size, or LARGEST."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self.path, self.stream = path, gzip.GzipFile(fileobj=raw)
        self.packed, self.given = os.fstat(raw.fileno()).st_size, 0

    def read(self, size: int, /) -> bytes:
        try:
            block = self.stream.read(size)
        except (EOFError, zlib.error, OSError) as error:
            raise BadFile(f"{self.path} is a damaged gzip file after byte {self.given}: {error}") from None
        if not self.given and block[:2] == GZIP:
            raise BadFile(f"{self.path} is gzip inside gzip; unpack it once")
        if not self.given:
            refuse_binary(self.path, block[:START])
        self.given += len(block)
        if self.given > min(LARGEST, max(FREE, RATIO * self.packed)):
            raise BadFile(
                f"{self.path} unpacks to more than {self.given:,} bytes from {self.packed:,}; text never packs "
                f"{RATIO} times, so it is refused; unpack it yourself if you trust it"
            )
        return block
