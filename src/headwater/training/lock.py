"""One trainer a folder: a lock that a killed process can not leave behind."""

from __future__ import annotations

import importlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from headwater.errors import Unavailable

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None  # elsewhere the words in the file must do


class Lock:
    """Held from take() to release(). The system lets go of it when the process ends, however it ends.

    Who holds it is written in the file, for the message, and for a folder that several machines share.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.handle = path, -1

    def take(self) -> None:
        self.handle = self._taken(os.O_CREAT)

    def _taken(self, create: int) -> int:
        handle = os.open(self.path, os.O_RDWR | create | getattr(os, "O_NOFOLLOW", 0), 0o666)
        holder = _holder(handle)
        locked = _locked(handle)
        if locked and _same_file(handle, self.path) and not _alive_elsewhere(holder):
            _write(handle, {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot()})
            return handle
        os.close(handle)
        pid, host = holder.get("pid", "?"), holder.get("host", "?")
        if locked and holder:
            raise Unavailable(
                f"{self.path.parent} must have one trainer, process {pid} on {host} is training there; wait for it or "
                f"stop it (if {host} is gone for good, so that it can not be training any more, remove {self.path})"
            )
        raise Unavailable(
            f"{self.path.parent} must have one trainer, process {pid} on {host} is training there; wait for it, "
            "or stop it"
        )

    @property
    def lost(self) -> bool:
        """Whether the file that is held is no longer the one of that name."""
        return self.handle >= 0 and not _same_file(self.handle, self.path)

    def keep(self) -> None:
        """Where its file was removed and nobody has made another: hold a new one. Another file there is a fault."""
        if not self.lost or not self.path.parent.is_dir():
            return
        try:
            new = self._taken(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise Unavailable(
                f"{self.path.parent} must have one trainer, but another file stands where its lock was: it "
                "stops and writes no more (its checkpoints are safe; --resume goes on once nobody else trains there)"
            ) from None
        os.close(self.handle)
        self.handle = new

    def release(self) -> None:
        if self.handle >= 0:
            _write(self.handle, {})
            os.close(self.handle)
            self.handle = -1

    def __enter__(self) -> Lock:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _same_file(handle: int, path: Path) -> bool:
    """Whether what a descriptor has open is what the path names now."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(handle), there)


def _locked(handle: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _alive_elsewhere(holder: dict[str, Any]) -> bool:
    """Another machine wrote its name and did not take it away. On this one, holding the lock proves the other gone."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    return fcntl is None and holder.get("boot") == _boot() and _running(int(holder.get("pid", 0)))


def _running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _holder(handle: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(handle, 4096, 0) or b"{}")
        return said if isinstance(said, dict) else {}
    except ValueError:
        return {}


def _write(handle: int, holder: dict[str, Any]) -> None:
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(holder).encode() if holder else b"", 0)
