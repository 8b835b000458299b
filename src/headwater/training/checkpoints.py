"""Checkpoints: folders that are whole, or are not there.

    checkpoints/step-00001200/     model.safetensors  optimizer.safetensors  state.json …  manifest.json

A folder is written under another name, each file flushed, the manifest (names, sizes, SHA-256) last; then it is
renamed. A crash at any instant leaves the checkpoints that were there, and perhaps a heap, which is swept away.
Old ones get a name that no reader looks for before their files go, so that a half-deleted one is never taken for whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.errors import BadFile
from headwater.training.storage import Disk, Piece, remove_tree
from headwater.weights.strict_json import parse_object

FORMAT = 1
MANIFEST = "manifest.json"
FEWEST = 2  # the newest may be the one a failing disk has spoiled
LARGEST_MANIFEST = 1 << 20
_NAME = re.compile(r"step-(\d{8,15})")
_LEFTOVER = re.compile(r"\.(trash|new)-step-\d+-[0-9a-f]+")


@dataclass(frozen=True)
class Saved:
    """A checkpoint whose every byte has been checked."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()  # newer ones that were refused, and why

    def state(self) -> dict[str, Any]:
        return parse_object((self.path / "state.json").read_bytes(), self.path / "state.json")


class Checkpoints:
    def __init__(self, folder: Path, run: str, disk: Disk | None = None, keep: int = FEWEST) -> None:
        self.folder, self.run, self.disk, self.keep = folder, run, disk or Disk(), max(keep, FEWEST)
        self.good: set[str] = set()  # names this process has written, or has checked

    # ------------------------------------------------------------------------------------------------------ writing

    def save(self, step: int, files: Mapping[str, Callable[[], Iterable[Piece]]]) -> Path:
        """Write and commit one checkpoint, then let the oldest go. An OSError leaves the others as they were."""
        final = self.folder / f"step-{step:08d}"
        new = self.folder / f".new-{final.name}-{uuid.uuid4().hex[:12]}"
        try:
            self._write(new, step, files)
            if final.exists():
                self._discard(final)  # spoiled: a valid one of this step would have been resumed from
            self.disk.rename(new, final)
            self.disk.sync(self.folder)
        except OSError:
            self._forget(new)
            raise
        self.good.add(final.name)
        self.prune()
        return final

    def _write(self, new: Path, step: int, files: Mapping[str, Callable[[], Iterable[Piece]]]) -> None:
        self.disk.make_folder(new)
        listed = {}
        for name, pieces in files.items():
            size, digest = self.disk.write(new / name, pieces())
            listed[name] = {"bytes": size, "sha256": digest}
        manifest = {"format": FORMAT, "run": self.run, "step": step, "files": listed}
        self.disk.write(new / MANIFEST, [_sealed(manifest)])
        self.disk.sync(new)

    def make_room(self, size: int) -> None:
        """Refuse before writing what the disk can not hold, so that the last free bytes are left to others."""
        needed = 1.1 * size + 2**20
        if self.disk.free(self.folder) < needed:
            self.prune()
            if (free := self.disk.free(self.folder)) < needed:
                amounts = f"{needed / 2**20:.1f} MB are needed, {free / 2**20:.1f} MB are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({amounts})")

    def prune(self) -> None:
        """Let go of all but the newest `keep` valid ones, and of what a crash has left. A failure is only a delay."""
        try:
            kept = 0
            for path in reversed(self.paths()):
                if kept >= self.keep:
                    self._discard(path)
                elif self._is_good(path):
                    kept += 1
            self.sweep()
        except OSError:
            pass

    def sweep(self) -> None:
        """Remove what was never committed, or is already discarded."""
        for entry in os.scandir(self.folder):
            if _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                remove_tree(self.disk, Path(entry.path))

    def _discard(self, path: Path) -> None:
        self.good.discard(path.name)
        self.disk.rename(path, self.folder / f".trash-{path.name}-{uuid.uuid4().hex[:12]}")
        self.disk.sync(self.folder)

    def _forget(self, new: Path) -> None:
        try:
            if new.is_dir():
                remove_tree(self.disk, new)
        except OSError:
            pass  # the next sweep will

    # ------------------------------------------------------------------------------------------------------ reading

    def paths(self) -> list[Path]:
        """The committed checkpoints, oldest first. Their number decides, never the clock."""
        found = [e for e in os.scandir(self.folder) if _NAME.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
        return [Path(e.path) for e in sorted(found, key=lambda e: int(e.name[5:]))]

    def newest(self) -> Saved | None:
        """The newest valid checkpoint; None where there is none at all. If all are spoiled, it is said."""
        refused = []
        for path in reversed(self.paths()):
            if fault := self.fault(path):
                refused.append(f"{path.name}: {fault}")
            else:
                self.good.add(path.name)
                return Saved(path, int(path.name[5:]), tuple(refused))
        if refused:
            raise BadFile(f"{self.folder} must hold a valid checkpoint, all {len(refused)} are spoiled ({refused[0]}); "
                          "restore one from a copy, or begin a new run")  # fmt: skip
        return None

    def fault(self, path: Path) -> str:
        """What is wrong with a checkpoint, in a few words; empty if every byte of it is as it was written."""
        try:
            manifest = _opened(path / MANIFEST)
            files = manifest["files"]
            here = {e.name for e in os.scandir(path) if e.name != MANIFEST}
            if odd := sorted(here ^ set(files)):
                return f"{odd[0]} is {'missing' if odd[0] in files else 'not in its manifest'}"
            if manifest["run"] != self.run:
                return "it belongs to another run"
            if manifest["step"] != int(path.name[5:]):
                return f"it is of step {manifest['step']}"
            return next(filter(None, (_file_fault(path / name, said) for name, said in files.items())), "")
        except (OSError, ValueError, KeyError, TypeError, BadFile) as error:
            return f"its manifest can not be read ({str(error)[:80]})"

    def _is_good(self, path: Path) -> bool:
        if path.name not in self.good and not self.fault(path):
            self.good.add(path.name)
        return path.name in self.good


def _file_fault(path: Path, said: Mapping[str, Any]) -> str:
    if path.is_symlink() or not path.is_file():
        return f"{path.name} is not a plain file"
    if path.stat().st_size != said["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes, {said['bytes']:,} were written"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == said["sha256"] else f"{path.name} is not what was written (SHA-256)"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _sealed(manifest: dict[str, Any]) -> bytes:
    """The manifest with a hash of itself, so that no bit of it may turn either."""
    return _canonical({**manifest, "seal": hashlib.sha256(_canonical(manifest)).hexdigest()})


def _opened(path: Path) -> dict[str, Any]:
    if path.is_symlink() or path.stat().st_size > LARGEST_MANIFEST:
        raise BadFile("it is not a plain small file")
    raw = path.read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    plain = {key: value for key, value in manifest.items() if key != "seal"}
    if plain["format"] != FORMAT:
        raise BadFile(f"format {plain['format']}, this version reads {FORMAT}")
    if raw != _sealed(plain):
        raise BadFile("its seal is broken")
    return plain
