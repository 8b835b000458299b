"""Detection of folders of sounds: sounds/, or sounds/train beside sounds/valid, for a task that reads sounds alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.data.readers.files import split_from_name
from headwater.data.readers.image_source import SPLIT_NAMES
from headwater.data.readers.sound_files import SOUND_FILES, SOUND_TASKS, find_sounds
from headwater.data.readers.source import DataSource, FileGroup
from headwater.errors import BadFile, BadSetting
from headwater.i18n import _


def sound_source(paths: Sequence[Path], valid: Sequence[Path], task: str) -> DataSource | None:
    """The source of folders of sounds, for a task that reads sounds alone; None for anything else."""
    if task not in SOUND_TASKS or not paths or not all(path.is_dir() for path in (*paths, *valid)):
        return None
    groups = [FileGroup(split, SOUND_FILES, (folder,)) for path in paths for split, folder in _splits(path)]
    groups += [FileGroup("valid", SOUND_FILES, (path,)) for path in valid]
    return DataSource(task, tuple(groups))


def _splits(path: Path) -> list[tuple[str, Path]]:
    """The folders of each split: those named train, val or test, or the folder itself as train."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not find_sounds(path):
        raise BadFile(
            _("{path} must hold recordings (wav, flac, ogg, mp3) or token files (.npz), it holds none", path=path)
        )
    if not folders or not all(folder.name.lower() in SPLIT_NAMES for folder in folders):
        return [("train", path)]
    splits = [(split_from_name(Path(folder.name)), folder) for folder in folders]
    if "train" not in dict(splits):
        raise BadSetting(
            _("{path} must have a folder train beside the others; rename the one to learn from", path=path)
        )
    return splits
