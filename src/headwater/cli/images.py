"""Image arguments of a command: files, folders and a flag for each; unreadable ones are reported, not fatal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headwater.cli import kernels
from headwater.cli.parser import escape_for_terminal
from headwater.errors import BadInput, Fault, NotFound
from headwater.i18n import _

if TYPE_CHECKING:
    import numpy as np

BATCH_SIZE = 32


class ReadImage(NamedTuple):
    """An image file and its pixels."""

    path: Path
    pixels: np.ndarray


def classify_images(run: str, arguments: Sequence[str], as_json: bool) -> None:
    """Print the most probable label of each image, with its probability; as JSON all of them."""
    from headwater.tasks import get_task
    from headwater.training.predict import load_run

    paths = find_image_arguments(arguments)
    predictor = load_run(run)
    if predictor.task != "image-classification":
        raise BadInput(
            _("{run} was trained for {task}, not for images; train one with headwater train photos/", run=run,
              task=predictor.task)
        )  # fmt: skip
    kernels.warn_missing()
    task = get_task(predictor.task)
    for batch in read_in_batches(paths):
        outputs = predictor([image.pixels for image in batch])
        for image, output in zip(batch, outputs, strict=True):
            if as_json:
                print(json.dumps({"input": str(image.path), "output": output}, ensure_ascii=False))
            else:
                print(escape_for_terminal(f"{image.path}\t{task.output_line(output)}"))


def find_image_arguments(arguments: Sequence[str]) -> list[Path]:
    """The image files that the arguments name; folders are searched, with the folders in them."""
    from headwater.vision.images import find_images

    paths: list[Path] = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            paths += find_images(path)
        elif path.exists():
            paths.append(path)
        else:
            raise NotFound(_("no image file {word!r}; give an existing file or a folder", word=argument))
    if not paths:
        raise BadInput(
            _("there is no image in {names}; give image files or a folder of them", names=", ".join(arguments))
        )
    return paths


def looks_like_images(arguments: Sequence[str]) -> bool:
    """Whether every argument is a folder or has the name of an image file."""
    from headwater.vision.images import is_image_name

    return bool(arguments) and all(os.path.isdir(name) or is_image_name(name) for name in arguments)


def read_in_batches(paths: Sequence[Path]) -> Iterator[list[ReadImage]]:
    """Batches of (path, pixels); an image that cannot be read is named on stderr and left out."""
    from headwater.vision.images import read_image

    batch: list[ReadImage] = []
    skipped = 0
    for path in paths:
        try:
            batch.append(ReadImage(path, read_image(path)))
        except Fault as fault:
            skipped += 1
            print(escape_for_terminal(str(fault.args[0])), file=sys.stderr)
        if len(batch) == BATCH_SIZE:
            yield batch
            batch = []
    if batch:
        yield batch
    if skipped:
        print(_("{skipped:,} of {total:,} images were left out", skipped=skipped, total=len(paths)), file=sys.stderr)
    if skipped == len(paths):
        raise BadInput(_("none of the images can be read; see above"))
