"""The run directory and its lock.

config.yaml      every setting, resolved: headwater train --config runs/x/config.yaml starts the same run again
model/           the best model so far, with its tokenizer, usable at any moment
checkpoints/     what --resume continues from
metrics.jsonl    a line per logged step and per evaluation
samples.jsonl    inputs with the outputs of the model, at each evaluation
plots/           curves as images
env.json         the run id, versions, machine, command
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from headwater import __version__
from headwater.errors import BadFile, BadSetting, NotFound, Unavailable
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.training.config import TrainConfig, parse_config
from headwater.training.loggers import read_jsonl, to_json_line

RUNS_ROOT = "runs"
LOG_FILES = ("metrics.jsonl", "samples.jsonl", "order.jsonl")


class RunDir:
    """The directory of a run: its files, config and lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # whatever the working directory becomes meanwhile
        self.model_dir = self.folder / "model"
        self.checkpoints_dir = self.folder / "checkpoints"
        self.plots_dir = self.folder / "plots"
        self.config_path = self.folder / "config.yaml"
        self.env_path = self.folder / "env.json"
        self.lock = RunLock(self.folder / "lock")

    def create(self, config: TrainConfig) -> RunDir:
        """Create the run directory, which must be new or empty."""
        require_empty(self.folder)
        self.make_dirs()
        self.write_json(self.env_path, {"run_id": uuid.uuid4().hex, **collect_environment()})
        self.write_config(config)
        return self

    @classmethod
    def open(cls, folder: Path) -> RunDir:
        require_real_dir(folder)
        if not (folder / "config.yaml").is_file():
            raise NotFound(
                _(
                    "{folder} must be the folder of a run, it has no config.yaml; `headwater runs` lists them",
                    folder=folder,
                )
            )
        return cls(folder)

    def make_dirs(self) -> None:
        for path in (self.folder, self.model_dir, self.checkpoints_dir, self.plots_dir):
            require_real_dir(path)
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
                raise BadFile(
                    _("{path} cannot be created: {why}; choose another --out", path=path, why=reason)
                ) from None

    @property
    def id(self) -> str:
        return str(parse_json_object(read_limited(self.env_path, 1 << 20), self.env_path)["run_id"])

    @contextmanager
    def locked(self) -> Iterator[RunDir]:
        """Hold the lock of the run in a block. A directory that is not writable is refused now."""
        if not os.access(self.folder, os.W_OK):
            raise BadFile(
                _("{folder} must be writable, it is not; choose another --out, or change its mode", folder=self.folder)
            )
        self.make_dirs()
        with self.lock:
            yield self

    def essential_files(self) -> dict[Path, bytes]:
        """The small files without which the directory is no run."""
        return {
            path: path.read_bytes()
            for path in (self.env_path, self.config_path, *self.model_dir.glob("tokenizer*.json"))
        }

    def check_locked(self, essential_files: Mapping[Path, bytes]) -> None:
        """Before each write: refuse if another process trains here; a lock file that was deleted is recreated."""
        if self.lock.lost:
            self._check_same_run(essential_files)
            self.lock.reacquire()

    def _check_same_run(self, essential_files: Mapping[Path, bytes]) -> None:
        if self.env_path.is_file() and self.env_path.read_bytes() != essential_files[self.env_path]:
            raise Unavailable(
                _(
                    "{folder} must be the directory of this run, another run is there now: this one stops",
                    folder=self.folder,
                )
            )

    def recreate_missing(self, essential_files: Mapping[Path, bytes]) -> bool:
        """Recreate deleted directories and essential files; returns whether any were missing."""
        self._check_same_run(essential_files)
        missing = [path for path in (self.checkpoints_dir, self.plots_dir, *essential_files) if not path.exists()]
        if missing:
            self.make_dirs()
            for path in essential_files.keys() & set(missing):
                with atomic_write(path) as file:
                    file.write(essential_files[path])
        self.lock.reacquire()
        return bool(missing)

    def load_config(self) -> TrainConfig:
        try:
            loaded = yaml.safe_load(read_limited(self.config_path, 1 << 20).decode())
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            raise BadFile(
                _(
                    "{config} is not YAML ({split}); fix it",
                    config=self.config_path,
                    split=" ".join(str(error).split())[:60],
                )
            ) from None
        if not isinstance(loaded, Mapping):
            raise BadFile(_("{config} must hold settings by section; fix it", config=self.config_path))
        return parse_config(loaded)

    def write_config(self, config: TrainConfig) -> None:
        text = yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True)
        comment = f"# headwater {__version__}; to start the same run again: headwater train --config THIS FILE"
        with atomic_write(self.config_path) as file:
            file.write(f"{comment}\n{text}".encode())

    def write_json(self, path: Path, value: Any) -> None:
        with atomic_write(path) as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")

    def truncate_logs(self, step: int) -> None:
        """Remove the log entries of later steps, which will be repeated, and of a stop, which is over."""
        for name in LOG_FILES:
            path = self.folder / name
            if path.is_file():
                kept = [line for line in read_jsonl(path) if line["step"] <= step and "stop_reason" not in line]
                with atomic_write(path) as file:
                    file.write("".join(map(to_json_line, kept)).encode("utf-8", "backslashreplace"))

    def read_log(self, name: str) -> list[dict[str, Any]]:
        return read_jsonl(self.folder / name)


def require_empty(folder: Path) -> None:
    """Refuse a directory that is not empty: a run never overwrites anything."""
    require_real_dir(folder)
    if folder.exists() and any(folder.iterdir()):
        raise BadSetting(
            _(
                "{folder} must be new or empty, it holds a run or other files; choose another --out, "
                "or continue with: headwater train --resume {folder}",
                folder=folder,
            )
        )


def require_writable(folder: Path) -> None:
    """Check that the directory can be created and written, before any data is read; nothing is left behind."""
    require_real_dir(folder)
    missing: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise BadFile(
            _(
                "{folder} must be writable, it cannot be created or written: {why}; choose another --out",
                folder=folder,
                why=reason,
            )
        ) from None
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def require_real_dir(path: Path) -> None:
    """Refuse a link or a file where a directory is expected."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = _("a link") if path.is_symlink() else _("a file")
        raise BadFile(
            _("{path} must be a folder, it is {kind}; remove it or choose another --out", path=path, kind=kind)
        )


def unused_path(task: str, stem: str, root: Path | None = None) -> Path:
    """runs/TASK/NAME, or NAME-2, NAME-3 … where that is taken."""
    base = (root or Path(RUNS_ROOT)) / task
    clean = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem).strip("-")[:60] or "run"
    numbered = (base / (clean if n == 1 else f"{clean}-{n}") for n in range(1, 10**6))
    return next(path for path in numbered if not path.exists())


def collect_environment() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "headwater": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


# ----------------------------------------------------------------------------------------------------------------- lock

fcntl: Any = (
    importlib.import_module("fcntl") if os.name == "posix" else None
)  # elsewhere the contents of the file must do


class RunLock:
    """File lock of a run directory, from acquire() to release(); the system releases it when the process ends.

    The holder is written in the file, for messages, and for a directory that several machines share.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1

    def acquire(self) -> None:
        self.fd = self._open_locked(os.O_CREAT)

    def _open_locked(self, flags: int) -> int:
        fd = os.open(self.path, os.O_RDWR | flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
        holder = _read_holder(fd)
        locked = _try_flock(fd)
        if locked and _same_file(fd, self.path) and not _held_elsewhere(holder):
            _write_holder(fd, {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot_id()})
            return fd
        os.close(fd)
        pid = holder.get("pid", "?")
        host = holder.get("host", "?")
        if locked and holder:
            raise Unavailable(
                _(
                    "only one process may train in {parent}, process {pid} on {host} does; wait for it, or stop "
                    "it (if {host} no longer exists, remove {path})",
                    parent=self.path.parent,
                    pid=pid,
                    host=host,
                    path=self.path,
                )
            )
        raise Unavailable(
            _(
                "only one process may train in {parent}, process {pid} on {host} does; wait for it, or stop it",
                parent=self.path.parent,
                pid=pid,
                host=host,
            )
        )

    @property
    def lost(self) -> bool:
        """Whether the locked file is no longer the one at the path."""
        return self.fd >= 0 and not _same_file(self.fd, self.path)

    def reacquire(self) -> None:
        """Lock a new file where the old one was deleted. Another file in its place is refused."""
        if not self.lost or not self.path.parent.is_dir():
            return
        try:
            new = self._open_locked(os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise Unavailable(
                _(
                    "only one process may train in {parent}, but its lock file was replaced: this run stops and "
                    "writes nothing more (its checkpoints are safe; continue with --resume once no other process "
                    "trains there)",
                    parent=self.path.parent,
                )
            ) from None
        os.close(self.fd)
        self.fd = new

    def release(self) -> None:
        if self.fd >= 0:
            _write_holder(self.fd, {})
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _same_file(fd: int, path: Path) -> bool:
    """Whether a descriptor and a path refer to the same file."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _try_flock(fd: int) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _held_elsewhere(holder: dict[str, Any]) -> bool:
    """Whether another machine holds the lock; on this machine, having the flock proves that nobody does."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    return fcntl is None and holder.get("boot") == _boot_id() and _process_exists(int(holder.get("pid", 0)))


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _read_holder(fd: int) -> dict[str, Any]:
    try:
        loaded = json.loads(os.pread(fd, 4096, 0) or b"{}")
        return loaded if isinstance(loaded, dict) else {}
    except ValueError:
        return {}


def _write_holder(fd: int, holder: dict[str, Any]) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(holder).encode() if holder else b"", 0)
