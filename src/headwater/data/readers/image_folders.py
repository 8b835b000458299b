"""Reading a folder of images with a folder for each class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.data.examples import LabeledImage
from headwater.data.readers.lines import BadRows
from headwater.i18n import _
from headwater.vision.images import find_images

FORMAT = "image-folder"


def read_image_folder(folders: Sequence[Path], bad_rows: BadRows) -> Iterator[LabeledImage]:
    """The images of folders, with the name of the folder they are in as the label."""
    for folder in folders:
        for path in find_images(folder):
            label = path.relative_to(folder).parts[0]
            if path.parent == folder:
                bad_rows.add(path, 1, _("it is in no folder of a class"))
            else:
                yield LabeledImage(str(path), label)


def hash_image_folder(folder: Path) -> str:
    """SHA-256 of the names and sizes of the images of a folder."""
    digest = hashlib.sha256()
    for path in find_images(folder):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
