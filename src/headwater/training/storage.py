"""The disk, seen through eight small operations, so that a test can make any one of them fail, or be the last.

A file is durable after write() returns, its name after sync() of the folder that holds it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headwater.weights.files import sync_folder

Piece = bytes | memoryview


class Written(NamedTuple):
    size: int
    sha256: str


class Disk:
    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def write(self, path: Path, pieces: Iterable[Piece]) -> Written:
        """A new file with these bytes, flushed to the platter, and the hash of what was written."""
        size, digest = 0, hashlib.sha256()
        with self.create(path) as file:
            for piece in pieces:
                self.put(file, piece)
                size += len(piece)
                digest.update(piece)
            file.flush()
            self.flush(file)
        return Written(size, digest.hexdigest())

    def create(self, path: Path) -> BinaryIO:
        return os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666), "wb"
        )

    def put(self, file: BinaryIO, piece: Piece) -> None:
        file.write(piece)

    def flush(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name. An existing file is replaced in one step; an existing folder is not."""
        os.rename(old, new)

    def sync(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        sync_folder(folder)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def free(self, folder: Path) -> int:
        """Bytes that may still be written there."""
        return shutil.disk_usage(folder).free


def remove_tree(disk: Disk, folder: Path) -> None:
    """Remove a folder and what is in it. A link is removed, never followed."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(disk, Path(entry.path))
        else:
            disk.remove(Path(entry.path))
    disk.remove_folder(folder)
