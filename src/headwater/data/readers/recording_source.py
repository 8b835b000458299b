"""Detection of folders of recordings: speech with a text beside each, or sounds in a folder for each class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from headwater.audio.file_names import is_audio
from headwater.data.readers.files import split_from_name
from headwater.data.readers.image_source import SPLIT_NAMES, image_folder_source
from headwater.data.readers.recording_folders import SOUND_FOLDER, SPEECH_FOLDER, find_recordings, has_transcripts
from headwater.data.readers.sound_source import sound_source
from headwater.data.readers.source import DataSource, FileGroup
from headwater.data.recordings import SOUNDS, SPEECH
from headwater.errors import BadFile, BadSetting
from headwater.i18n import _

TABLE_SUFFIXES = frozenset((".tsv", ".csv", ".jsonl", ".json", ".tab", ".ndjson"))


def folder_source(paths: Iterable[str | Path], valid: Iterable[str | Path], task: str) -> DataSource | None:
    """The source of folders of recordings or of images; None where the paths are something else."""
    folders = [Path(path) for path in paths], [Path(path) for path in valid]
    sources = (sound_source, recording_folder_source, image_folder_source)
    return next(filter(None, (find(*folders, task) for find in sources)), None)


def recording_folder_source(paths: Sequence[Path], valid: Sequence[Path], task: str) -> DataSource | None:
    """The source of folders of recordings; None where the paths are something else, such as a folder with a table."""
    folders = (*paths, *valid)
    if not paths or not all(path.is_dir() for path in folders) or any(map(_has_table, folders)):
        return None
    if not all(map(find_recordings, paths)):
        return None
    task_of_files = SPEECH if all(map(has_transcripts, paths)) else SOUNDS
    if task_of_files == SOUNDS:
        for path in folders:
            _check_classes(path)
    if task not in ("", task_of_files):
        raise BadSetting(
            _(
                "{path} holds recordings for {found}, not for {task}; give a table with a column of paths",
                path=paths[0],
                found=task_of_files,
                task=task,
            )
        )
    file_format = SPEECH_FOLDER if task_of_files == SPEECH else SOUND_FOLDER
    groups = [FileGroup(split, file_format, (folder,)) for path in paths for split, folder in _splits(path)]
    groups += [FileGroup("valid", file_format, (path,)) for path in valid]
    return DataSource(task_of_files, tuple(groups))


def _has_table(folder: Path) -> bool:
    """Whether a table lies in a folder: then it says what the recordings are."""
    return any(path.suffix.lower() in TABLE_SUFFIXES for path in folder.iterdir() if not path.name.startswith("."))


def _check_classes(folder: Path) -> None:
    """Recordings without transcripts must be in folders of classes."""
    if any(is_audio(path) for path in folder.iterdir() if path.is_file()):
        raise BadFile(
            _(
                "{path} holds recordings without a text or a class; put a .txt beside each, those of each class into "
                "a folder of its own, or give a table with the columns path and text, or path and label",
                path=folder,
            )
        )


def _splits(path: Path) -> list[tuple[str, Path]]:
    """The folders of each split: those named train, dev-clean or test …, or the folder itself as train."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    names = [re.split(r"[-_.]", folder.name.lower())[0] for folder in folders]
    if not folders or not all(name in SPLIT_NAMES for name in names):
        return [("train", path)]
    splits = [(split_from_name(Path(folder.name)), folder) for folder in folders]
    if "train" not in dict(splits):
        raise BadFile(_("{path} must have a folder train beside the others; rename the one to learn from", path=path))
    return splits
