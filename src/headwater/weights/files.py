"""Opening a stranger's file, and writing our own so that a crash leaves the old one or the new one, never a half."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headwater.errors import BadFile, NotFound


def shown(text: object, most: int = 60) -> str:
    """A name from a file, fit for one line of a message: quoted, escaped, cut."""
    quoted = ascii(str(text)[: most + 1])
    return quoted if len(quoted) <= most else quoted[: most - 1] + "…" + quoted[0]


def open_plain(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Links, pipes, folders and devices are refused: a model has no use for them."""
    path = Path(path)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise BadFile(f"{path} must be a regular file, it is a link; copy the folder with its contents (cp -rL)")
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise NotFound(f"{path} is not there; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadFile(f"{shown(path)} can not be opened: {reason(error)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile(f"{path} must be a regular file; it is a folder, a pipe or a device")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | Path, most: int) -> bytes:
    """The whole of a small file; one larger than `most` bytes is refused before it is read."""
    with open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise BadFile(f"{path} must be at most {most:,} bytes, it has {size:,}; it is not the file it claims to be")
        return file.read(most + 1)[:most]


@contextmanager
def atomic(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all.

    A new file in the same folder is written, flushed and fsynced, then renamed over the old one, and the folder is
    fsynced. The bytes of the old file are never touched, so tensors still mapped from it keep their values.
    """
    path = Path(path)
    part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.part")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise BadFile(f"{path} can not be written: {reason(error)}; what was there before is untouched") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    if os.name != "posix":  # elsewhere a folder can not be opened, and the rename itself is the promise
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()
