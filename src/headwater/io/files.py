"""Open regular files only, and write files atomically: a crash leaves the old file or the new one, never a part."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from headwater.errors import BadFile, NotFound
from headwater.i18n import _


def quote(text: object, max_chars: int = 60) -> str:
    """Quote, escape and truncate a text from a file, so that it fits into one line of an error message."""
    quoted = ascii(str(text)[: max_chars + 1])
    return quoted if len(quoted) <= max_chars else quoted[: max_chars - 1] + "…" + quoted[0]


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading. Symbolic links, pipes, folders and devices are rejected."""
    path = Path(path)
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        if path.is_symlink():
            raise BadFile(
                _("{path} must be a regular file, it is a link; copy the folder with its contents (cp -rL)", path=path)
            )
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise NotFound(_("{path} does not exist; check the path", path=path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadFile(_("{path} cannot be opened: {reason}", path=quote(path), reason=reason(error))) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadFile(_("{path} must be a regular file; it is a folder, a pipe or a device", path=path))
    return os.fdopen(descriptor, "rb")


def read_limited(path: str | Path, max_bytes: int) -> bytes:
    """Read a small file completely; a file larger than `max_bytes` is rejected before it is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise BadFile(
                _(
                    "{path} must be at most {maximum:,} bytes, it has {size:,}; it is not the file it claims to be",
                    path=path,
                    maximum=max_bytes,
                    size=size,
                )
            )
        return file.read(max_bytes + 1)[:max_bytes]


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file atomically: after a crash it is complete or absent.

    A temporary file in the same folder is written, flushed and fsynced, then renamed over the old one, and the folder
    is fsynced. The bytes of the old file are never touched, so tensors still mapped from it keep their values.
    """
    path = Path(path)
    temp_path = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.part")
    try:
        descriptor = os.open(temp_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp_path, path)
        except BaseException:
            temp_path.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)
    except OSError as error:
        raise BadFile(
            _("{path} cannot be written: {reason}; the old file is unchanged", path=path, reason=reason(error))
        ) from None


def fsync_directory(folder: Path) -> None:
    """Fsync a directory, so that renames in it survive a power failure."""
    if os.name != "posix":  # other systems cannot open a directory; the rename itself is durable
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """The operating system's text for an error, in lower case."""
    return (getattr(error, "strerror", None) or str(error)).lower()
