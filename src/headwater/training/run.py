"""The folder of a run: plain files, whole at every instant.

config.yaml      every setting, resolved: headwater train --config runs/x/config.yaml begins the same run anew
model/           the best model so far, with its tokenizer, usable at any moment
checkpoints/     what --resume goes on from
metrics.jsonl    a line for each logged step and each evaluation
samples.jsonl    inputs with what the model made of them, at each evaluation
plots/           curves as pictures
env.json         the run's id, versions, machine, command
"""

from __future__ import annotations

import json
import os
import platform
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
from headwater.training.journals import line_of, read_lines
from headwater.training.lock import Lock
from headwater.training.settings import Settings, read
from headwater.weights.files import atomic, read_bounded
from headwater.weights.strict_json import parse_object

ROOT = "runs"
JOURNALS = ("metrics.jsonl", "samples.jsonl", "order.jsonl")


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.absolute()  # whatever the working directory becomes meanwhile
        self.model, self.checkpoints, self.plots = (folder / name for name in ("model", "checkpoints", "plots"))
        self.config, self.env = folder / "config.yaml", folder / "env.json"
        self.lock = Lock(folder / "lock")

    @classmethod
    def new(cls, folder: Path, settings: Settings) -> Run:
        """Make the folder."""
        refuse_taken(folder)
        run = cls(folder)
        run.make_folders()
        run.write_json(run.env, {"run": uuid.uuid4().hex, **machine()})
        run.write_settings(settings)
        return run

    @classmethod
    def open(cls, folder: Path) -> Run:
        refuse_odd(folder)
        if not (folder / "config.yaml").is_file():
            raise NotFound(f"{folder} must be the folder of a run, it has no config.yaml; `headwater runs` lists them")
        return cls(folder)

    def make_folders(self) -> None:
        for path in (self.folder, self.model, self.checkpoints, self.plots):
            refuse_odd(path)
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = (error.strerror or str(error)).lower()
                raise BadFile(f"{path} can not be made: {why}; choose another --out") from None

    @property
    def id(self) -> str:
        return str(parse_object(read_bounded(self.env, 1 << 20), self.env)["run"])

    @contextmanager
    def held(self) -> Iterator[Run]:
        """While it is trained: nobody else may, and a folder that can not be written is found out now."""
        if not os.access(self.folder, os.W_OK):
            raise BadFile(f"{self.folder} must be writable, it is not; choose another --out, or change its mode")
        self.make_folders()
        with self.lock:
            yield self

    def frame(self) -> dict[Path, bytes]:
        """The small files without which the folder is no run."""
        return {path: path.read_bytes() for path in (self.env, self.config, *self.model.glob("tokenizer*.json"))}

    def check_held(self, frame: Mapping[Path, bytes]) -> None:
        """Before anything is written: nobody else may train here. A lock file that was only removed is made again."""
        if self.lock.lost:
            self._check_own(frame)
            self.lock.keep()

    def _check_own(self, frame: Mapping[Path, bytes]) -> None:
        if self.env.is_file() and self.env.read_bytes() != frame[self.env]:
            raise Unavailable(f"{self.folder} must be this run's own folder, another run is there now: this one stops")

    def mended(self, frame: Mapping[Path, bytes]) -> bool:
        """Whether somebody removed a part of the frame, or all, while it was held; it is there again."""
        self._check_own(frame)
        gone = [path for path in (self.checkpoints, self.plots, *frame) if not path.exists()]
        if gone:
            self.make_folders()
            for path in frame.keys() & set(gone):
                with atomic(path) as file:
                    file.write(frame[path])
        self.lock.keep()
        return bool(gone)

    def settings(self) -> Settings:
        try:
            said = yaml.safe_load(read_bounded(self.config, 1 << 20).decode())
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            raise BadFile(f"{self.config} is not YAML ({' '.join(str(error).split())[:60]}); mend it") from None
        if not isinstance(said, Mapping):
            raise BadFile(f"{self.config} must hold settings by section; mend it")
        return read(said)

    def write_settings(self, settings: Settings) -> None:
        text = yaml.safe_dump(settings.nested(), sort_keys=False, allow_unicode=True)
        with atomic(self.config) as file:
            file.write(
                f"# headwater {__version__}; the same run anew: headwater train --config THIS FILE\n{text}".encode()
            )

    def write_json(self, path: Path, value: Any) -> None:
        with atomic(path) as file:
            file.write(json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")

    def rewind(self, step: int) -> None:
        """Forget what the journals say of later steps: they will be done again, and then be written once."""
        for name in JOURNALS:
            path = self.folder / name
            if path.is_file():
                kept = [line for line in read_lines(path) if line["step"] <= step]
                with atomic(path) as file:
                    file.write("".join(map(line_of, kept)).encode("utf-8", "backslashreplace"))

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.folder / name)


def refuse_taken(folder: Path) -> None:
    """A folder that holds anything is refused: no run is ever written over another."""
    refuse_odd(folder)
    if folder.exists() and any(folder.iterdir()):
        raise BadSetting(
            f"{folder} must be new or empty, it holds a run or other files; "
            f"choose another --out, or go on with: headwater train --resume {folder}"
        )


def refuse_unwritable(folder: Path) -> None:
    """Make the folder, write a file into it, and leave nothing behind: before any data is read, not after."""
    refuse_odd(folder)
    missing: list[Path] = []
    try:
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise BadFile(
            f"{folder} must be writable, it can not be made or written: {why}; choose another --out"
        ) from None
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def refuse_odd(path: Path) -> None:
    """A link or a file where a folder of ours should be: writing through it might hit something else."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        kind = "a link" if path.is_symlink() else "a file"
        raise BadFile(f"{path} must be a folder, it is {kind}; remove it or choose another --out")


def free_name(task: str, stem: str, root: Path | None = None) -> Path:
    """runs/TASK/NAME, or NAME-2, NAME-3 … where that is taken."""
    base = (root or Path(ROOT)) / task
    clean = "".join(c if c.isalnum() or c in "-_" else "-" for c in stem).strip("-")[:60] or "run"
    numbered = (base / (clean if n == 1 else f"{clean}-{n}") for n in range(1, 10**6))
    return next(path for path in numbered if not path.exists())


def machine() -> dict[str, Any]:
    import numpy
    import torch

    return {
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "headwater": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.platform(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
