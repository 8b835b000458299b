"""Reading a folder of sounds without labels: recordings, and token files (.npz)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.audio.file_names import is_audio
from headwater.data.recordings import SoundFile

SOUND_FILES = "sound-files"  # the file format
SOUND_TASKS = ("sound-codec", "audio-language-model")
TOKEN_SUFFIX = ".npz"


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
