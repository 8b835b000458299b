"""Crash-safe storage: the operations of a disk, and checkpoint directories with a manifest of SHA-256 sums.

    checkpoints/step-00001200/     model.safetensors  optimizer.safetensors  state.json …  manifest.json

A checkpoint directory is written under a temporary name, each file flushed, the manifest (names, sizes, SHA-256) last;
then it is renamed. A crash at any instant leaves the earlier checkpoints intact, and perhaps a leftover that is removed
later. Old checkpoints are renamed before they are deleted, so that a half-deleted one is never read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headwater.errors import BadFile
from headwater.i18n import _
from headwater.io.files import fsync_directory
from headwater.io.strict_json import parse_json_object

# ----------------------------------------------------------------------------------------------------------------- disk

Chunk = bytes | memoryview


class WrittenFile(NamedTuple):
    num_bytes: int
    sha256: str


class Disk:
    """The file system as a few small operations, so that a test can make any one of them fail.

    A file is durable after write() returns, its name after fsync_dir() of its directory.
    """

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def write(self, path: Path, chunks: Iterable[Chunk]) -> WrittenFile:
        """Write a new file and flush it to disk; returns its size and SHA-256."""
        size = 0
        digest = hashlib.sha256()
        with self.create(path) as file:
            for piece in chunks:
                self.write_chunk(file, piece)
                size += len(piece)
                digest.update(piece)
            file.flush()
            self.fsync(file)
        return WrittenFile(size, digest.hexdigest())

    def create(self, path: Path) -> BinaryIO:
        return os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o666), "wb"
        )

    def write_chunk(self, file: BinaryIO, chunk: Chunk) -> None:
        file.write(chunk)

    def fsync(self, file: BinaryIO) -> None:
        os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name. An existing file is replaced in one step; an existing folder is not."""
        os.rename(old, new)

    def fsync_dir(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        fsync_directory(folder)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that may still be written there."""
        return shutil.disk_usage(folder).free


def remove_tree(disk: Disk, folder: Path) -> None:
    """Remove a folder and what is in it. A link is removed, never followed."""
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(disk, Path(entry.path))
        else:
            disk.unlink(Path(entry.path))
    disk.rmdir(folder)


# ----------------------------------------------------------------------------------------------- checkpoint directories


FORMAT_VERSION = 2
MANIFEST = "manifest.json"
MIN_TO_KEEP = 2  # the newest may be corrupted by a failing disk
MAX_MANIFEST_BYTES = 1 << 20
_NAME_PATTERN = re.compile(r"step-(\d{8,15})")
_LEFTOVER_PATTERN = re.compile(r"\.(trash|new)-step-\d+-[0-9a-f]+")


@dataclass(frozen=True)
class Checkpoint:
    """A validated checkpoint."""

    path: Path
    step: int
    skipped: tuple[str, ...] = ()  # newer ones that are invalid, and why

    def state(self) -> dict[str, Any]:
        return parse_json_object((self.path / "state.json").read_bytes(), self.path / "state.json")


class CheckpointManager:
    """The checkpoints of a run: save, prune, find the latest valid one."""

    def __init__(self, folder: Path, run_id: str, disk: Disk | None = None, max_to_keep: int = MIN_TO_KEEP) -> None:
        self.folder = folder
        self.run_id = run_id
        self.disk = disk or Disk()
        self.max_to_keep = max(max_to_keep, MIN_TO_KEEP)
        self.validated: set[str] = set()  # names this process has written or validated

    # ------------------------------------------------------------------------------------------------------ writing

    def save(self, step: int, files: Mapping[str, Callable[[], Iterable[Chunk]]]) -> Path:
        """Write and commit one checkpoint, then prune. An OSError leaves the others as they were."""
        final = self.folder / f"step-{step:08d}"
        new = self.folder / f".new-{final.name}-{uuid.uuid4().hex[:12]}"
        try:
            self._write_files(new, step, files)
            if final.exists():
                self._retire(final)  # invalid: a valid one of this step would have been resumed from
            self.disk.rename(new, final)
            self.disk.fsync_dir(self.folder)
        except OSError:
            self._abandon(new)
            raise
        self.validated.add(final.name)
        self.prune()
        return final

    def _write_files(self, new: Path, step: int, files: Mapping[str, Callable[[], Iterable[Chunk]]]) -> None:
        self.disk.mkdir(new)
        listed = {}
        for name, pieces in files.items():
            size, digest = self.disk.write(new / name, pieces())
            listed[name] = {"bytes": size, "sha256": digest}
        manifest = {"format": FORMAT_VERSION, "run_id": self.run_id, "step": step, "files": listed}
        self.disk.write(new / MANIFEST, [_with_checksum(manifest)])
        self.disk.fsync_dir(new)

    def check_disk_space(self, num_bytes: int) -> None:
        """Refuse before writing what the disk cannot hold, so that the last free bytes are left to others."""
        needed = 1.1 * num_bytes + 2**20
        if self.disk.free_bytes(self.folder) < needed:
            self.prune()
            if (free := self.disk.free_bytes(self.folder)) < needed:
                amounts = f"{needed / 2**20:.1f} MB are needed, {free / 2**20:.1f} MB are free"
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({amounts})")

    def prune(self) -> None:
        """Remove all but the newest max_to_keep valid checkpoints, and leftovers; retried at the next save."""
        try:
            kept = 0
            for path in reversed(self.paths()):
                if kept >= self.max_to_keep:
                    self._retire(path)
                elif self._is_valid(path):
                    kept += 1
            self.remove_leftovers()
        except OSError:
            pass

    def remove_leftovers(self) -> None:
        """Remove what was never committed, or is already discarded."""
        for entry in os.scandir(self.folder):
            if _LEFTOVER_PATTERN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                remove_tree(self.disk, Path(entry.path))

    def _retire(self, path: Path) -> None:
        self.validated.discard(path.name)
        self.disk.rename(path, self.folder / f".trash-{path.name}-{uuid.uuid4().hex[:12]}")
        self.disk.fsync_dir(self.folder)

    def _abandon(self, new: Path) -> None:
        try:
            if new.is_dir():
                remove_tree(self.disk, new)
        except OSError:
            pass  # the next sweep will

    # ------------------------------------------------------------------------------------------------------ reading

    def paths(self) -> list[Path]:
        """The committed checkpoints by step, oldest first."""
        entries = [
            e for e in os.scandir(self.folder) if _NAME_PATTERN.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
        ]
        return [Path(e.path) for e in sorted(entries, key=lambda e: int(e.name[5:]))]

    def latest_valid(self) -> Checkpoint | None:
        """The newest valid checkpoint; None where there is none. If all are invalid, BadFile is raised."""
        refused = []
        for path in reversed(self.paths()):
            if fault := self.validation_error(path):
                refused.append(f"{path.name}: {fault}")
            else:
                self.validated.add(path.name)
                return Checkpoint(path, int(path.name[5:]), tuple(refused))
        if refused:
            raise BadFile(
                _(
                    "{folder} must have a valid checkpoint, all {num_refused} are corrupted ({refused}); restore "
                    "one from a copy, or start a new run",
                    folder=self.folder,
                    num_refused=len(refused),
                    refused=refused[0],
                )
            )
        return None

    def validation_error(self, path: Path) -> str:
        """What is wrong with a checkpoint; empty if every byte is as it was written."""
        try:
            manifest = _read_manifest(path / MANIFEST)
            files = manifest["files"]
            here = {e.name for e in os.scandir(path) if e.name != MANIFEST}
            if odd := sorted(here ^ set(files)):
                return f"{odd[0]} is {'missing' if odd[0] in files else 'not in its manifest'}"
            if manifest["run_id"] != self.run_id:
                return "it belongs to another run"
            if manifest["step"] != int(path.name[5:]):
                return f"it is of step {manifest['step']}"
            return next(filter(None, (_file_error(path / name, expected) for name, expected in files.items())), "")
        except (OSError, ValueError, KeyError, TypeError, BadFile) as error:
            return f"its manifest cannot be read ({str(error)[:80]})"

    def _is_valid(self, path: Path) -> bool:
        if path.name not in self.validated and not self.validation_error(path):
            self.validated.add(path.name)
        return path.name in self.validated


def _file_error(path: Path, expected: Mapping[str, Any]) -> str:
    if path.is_symlink() or not path.is_file():
        return f"{path.name} is not a plain file"
    if path.stat().st_size != expected["bytes"]:
        return f"{path.name} has {path.stat().st_size:,} bytes, {expected['bytes']:,} were written"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if digest == expected["sha256"] else f"{path.name} is not what was written (SHA-256)"


def _canonical_json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _with_checksum(manifest: dict[str, Any]) -> bytes:
    """The manifest with a checksum of itself."""
    return _canonical_json({**manifest, "checksum": hashlib.sha256(_canonical_json(manifest)).hexdigest()})


def _read_manifest(path: Path) -> dict[str, Any]:
    if path.is_symlink() or path.stat().st_size > MAX_MANIFEST_BYTES:
        raise BadFile(_("it is not a plain small file"))
    raw = path.read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    plain = {key: value for key, value in manifest.items() if key != "checksum"}
    if plain["format"] != FORMAT_VERSION:
        raise BadFile(_("format {format}, this version reads {FORMAT}", format=plain["format"], FORMAT=FORMAT_VERSION))
    if raw != _with_checksum(plain):
        raise BadFile(_("its checksum does not match"))
    return plain
