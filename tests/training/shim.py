"""A disk that fails, or goes dark, at the operation of one's choice.

Un-synced work is remembered, so that a power cut can take it back: bytes that were not flushed are cut off, names that
were not synced are undone, removed files come back.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

from headwater.training.storage import Disk


class PowerCut(BaseException):
    """Not an Exception: nothing may catch it and tidy up."""


class FaultyDisk(Disk):
    """The operation number `at` (from 0) raises: an OSError with `code`, or with none a PowerCut."""

    def __init__(self, graves: Path, at: int = -1, code: int = 0, lasting: bool = False) -> None:
        self.graves, self.at, self.code, self.lasting = graves, at, code, lasting
        self.count = 0
        self.undo: list[tuple[Path, object]] = []  # folder whose names are not yet durable, how to take the change back
        self.unflushed: dict[Path, int] = {}
        self.log: list[str] = []

    def _step(self, name: str, path: object) -> None:
        here, self.count = self.count, self.count + 1
        self.log.append(f"{name} {Path(str(path)).name}")
        if here == self.at or (self.lasting and here > self.at >= 0):
            if self.code:
                raise OSError(self.code, os.strerror(self.code))
            raise PowerCut(name)

    def mkdir(self, path):
        self._step("mkdir", path)
        super().mkdir(path)
        self.undo.append((path.parent, lambda: shutil.rmtree(path, ignore_errors=True)))

    def create(self, path):
        self._step("create", path)
        file = super().create(path)
        self.unflushed[path] = 0
        self.undo.append((path.parent, lambda: path.unlink(missing_ok=True)))
        return file

    def write_chunk(self, file, piece):
        self._step("put", file.name)
        super().write_chunk(file, piece)

    def fsync(self, file):
        path = self._newest_unflushed()
        self._step("fsync", path)
        super().fsync(file)
        del self.unflushed[path]

    def _newest_unflushed(self):
        return list(self.unflushed)[-1]

    def rename(self, old, new):
        self._step("rename", new)
        super().rename(old, new)
        self.unflushed = {_moved(p, old, new): n for p, n in self.unflushed.items()}

        def back():
            if new.exists() and not old.exists():
                os.rename(new, old)

        self.undo.append((new.parent, back))

    def fsync_dir(self, folder):
        self._step("sync", folder)
        super().fsync_dir(folder)
        self.undo = [(where, back) for where, back in self.undo if where != folder]

    def unlink(self, path):
        self._step("remove", path)
        grave = self.graves / uuid.uuid4().hex
        os.rename(path, grave)
        self.undo.append((path.parent, lambda: path.parent.is_dir() and os.rename(grave, path)))

    def rmdir(self, path):
        self._step("rmdir", path)
        super().rmdir(path)
        self.undo.append((path.parent, lambda: path.mkdir(exist_ok=True)))

    def lose(self, keep_names: bool, torn: float) -> None:
        """The power is gone: files keep that share of their unflushed bytes; unsynced names stay or are undone."""
        for path in self.unflushed:
            if path.exists():
                os.truncate(path, int(path.stat().st_size * torn))
        if not keep_names:
            for _, back in reversed(self.undo):
                back()


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


FULL, BROKEN = errno.ENOSPC, errno.EIO
