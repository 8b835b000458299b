"""Reading a folder of sounds without labels: recordings, and token files (.npz)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from headwater.audio.files import is_audio
from headwater.data.examples import Cells, ExampleFormat, Roles, text_cell
from headwater.data.recordings import file_hash

SOUND_FILES = "sound-files"  # the file format
SOUND_TASKS = ("sound-codec", "audio-language-model")
TOKEN_SUFFIX = ".npz"


class SoundFile(NamedTuple):
    """A recording, or a file of its tokens."""

    path: str

    @property
    def input_text(self) -> str:
        """The hash of the file: copies of a recording are in one split, wherever they are."""
        return file_hash(self.path)

    @property
    def texts(self) -> tuple[str, ...]:
        return ()

    @property
    def labels(self) -> tuple[str, ...]:
        return ()

    @classmethod
    def from_cells(cls, cells: Cells, roles: Roles, document: int) -> Self:
        return cls(text_cell("path", cells.get(roles["path"])))


def sound_format(task: str) -> ExampleFormat:
    """The examples of a task that reads sounds alone: folders, or tables with a column path."""
    return ExampleFormat(task, SoundFile, ("path",), input_role="path", file_role="path", inferred=False)


def find_sounds(folder: str | Path) -> list[Path]:
    """The recordings and token files of a folder and of the folders in it, sorted; hidden ones are left out."""
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = [Path(parent) / name for name in sorted(names) if not name.startswith(".")]
        paths += [path for path in files if is_audio(path) or path.suffix == TOKEN_SUFFIX]
    return paths


def has_only_tokens(path: Path) -> bool:
    """Whether a folder holds token files and no recordings."""
    sounds = find_sounds(path) if path.is_dir() else []
    return bool(sounds) and all(sound.suffix == TOKEN_SUFFIX for sound in sounds)


def read_sounds(folders: Sequence[Path]) -> Iterator[SoundFile]:
    """The sounds of folders."""
    for folder in folders:
        for path in find_sounds(folder):
            yield SoundFile(str(path))


def hash_sounds(folder: Path) -> str:
    """SHA-256 of the names and sizes of the sounds of a folder."""
    digest = hashlib.sha256()
    for path in find_sounds(folder):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
