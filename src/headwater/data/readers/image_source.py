"""Detection of folders of images: photos/cat/1.jpg, or photos/train/cat/1.jpg beside photos/test/cat/2.jpg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.data.readers.files import split_from_name
from headwater.data.readers.image_folders import FORMAT
from headwater.data.readers.source import DataSource, FileGroup
from headwater.errors import BadFile, BadSetting
from headwater.i18n import _
from headwater.vision.images import find_images, is_image_name

SPLIT_NAMES = ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")


def image_folder_source(paths: Sequence[Path], valid: Sequence[Path], task: str) -> DataSource | None:
    """The source of folders of images; None where the paths are something else."""
    if not paths or not all(path.is_dir() for path in (*paths, *valid)) or not all(map(_has_image_classes, paths)):
        return None
    if task not in ("", "image-classification"):
        raise BadSetting(
            _(
                "{path} holds images in a folder for each class, which is for image-classification, not {task}; give "
                "a table with a column of paths",
                path=paths[0],
                task=task,
            )
        )
    groups = [FileGroup(split, FORMAT, (folder,)) for path in paths for split, folder in _splits(path)]
    groups += [FileGroup("valid", FORMAT, (path,)) for path in valid]
    return DataSource("image-classification", tuple(groups))


def _has_image_classes(path: Path) -> bool:
    """Whether a folder holds folders of images, in classes or in splits of classes."""
    children = [child for child in path.iterdir() if not child.name.startswith(".")]
    folders = [child for child in children if child.is_dir()]
    if any(child.is_file() and not is_image_name(child) for child in children):
        return False
    has_images = any(find_images(folder) for folder in folders)
    if not has_images and any(is_image_name(child) for child in children):
        raise BadFile(
            _(
                "{path} holds images without a class; put those of each class into a folder of its own, or give a "
                "table with the columns path and label",
                path=path,
            )
        )
    return has_images


def _splits(path: Path) -> list[tuple[str, Path]]:
    """The folders of each split: those named train, val or test, or the folder itself as train."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not folders or not all(folder.name.lower() in SPLIT_NAMES for folder in folders):
        return [("train", path)]
    splits = [(split_from_name(Path(folder.name)), folder) for folder in folders]
    if "train" not in dict(splits):
        raise BadFile(_("{path} must have a folder train beside the others; rename the one to learn from", path=path))
    return splits
