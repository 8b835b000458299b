"""A cache of decoded pixels: every image of a dataset is decoded and resized once, in memory mapped from one file.

The file is in the user's cache folder under a hash of the images and of how they are resized, so a second run, another
split or a resumed run reads it as it is, and loading is never what training waits for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headwater.errors import BadFile, Fault
from headwater.i18n import _
from headwater.vision.images import decode_image, read_image_bytes
from headwater.vision.processor import ImageProcessor

CHUNK = 256  # images decoded before they are written


class DecodedImages(NamedTuple):
    """The pixels of the images that can be read, and the reasons for the others."""

    pixels: np.ndarray  # [N, H, W, 3] uint8
    readable: np.ndarray  # [N] index of each in the paths that were given
    problems: list[str]


def cache_folder() -> Path:
    """HEADWATER_CACHE, or headwater/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HEADWATER_CACHE") or Path(base) / "headwater") / "pixels"


def decode_images(paths: Sequence[str | Path], processor: ImageProcessor) -> DecodedImages:
    """The resized pixels of image files, from the cache where they are in it. Unreadable images are left out."""
    height, width = processor.crop or processor.size
    names = [str(Path(path).absolute()) for path in paths]
    key = _cache_key(names, processor)
    file = cache_folder() / f"{key}.npy"
    index = file.with_suffix(".txt")
    if not (file.is_file() and index.is_file()):
        _check_disk(file.parent, len(names) * height * width * 3)
        _write(names, processor, (height, width), file)
    states = index.read_text(encoding="utf-8").split("\n")[:-1]
    readable = np.array([i for i, state in enumerate(states) if not state], np.int64)
    pixels = np.load(file, mmap_mode="r")
    return DecodedImages(pixels[: len(readable)], readable, [state for state in states if state])


def _cache_key(names: Sequence[str], processor: ImageProcessor) -> str:
    """A hash of the files (name, size, time of change) and of how they are resized."""
    digest = hashlib.sha256(f"{processor.size}{processor.crop}{processor.resample}".encode())
    for name in names:
        try:
            status = os.stat(name)
            digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        except (OSError, ValueError):
            digest.update(f"{name}\0missing\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _check_disk(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > 0.9 * free:
        raise BadFile(
            _(
                "the decoded images need {size:,.1f} GB in {folder}, {free:,.1f} GB are free; choose a smaller "
                "--image-size, or set HEADWATER_CACHE to a larger disk",
                size=size / 1e9,
                folder=folder,
                free=free / 1e9,
            )
        )


def _write(names: Sequence[str], processor: ImageProcessor, shape: tuple[int, int], file: Path) -> None:
    """Decode all images into the file, and the state of each ('' or why it cannot be read) into its index."""
    part = file.with_name(f"{file.stem}.{os.getpid()}.part")
    pixels = np.lib.format.open_memmap(part, mode="w+", dtype=np.uint8, shape=(len(names), *shape, 3))
    states: list[str] = []
    count = 0
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the GIL
        for first in range(0, len(names), CHUNK):
            for result in pool.map(lambda name: _decode(name, processor), names[first : first + CHUNK]):
                states.append(result if isinstance(result, str) else "")
                if not isinstance(result, str):
                    pixels[count] = result
                    count += 1
    pixels.flush()
    del pixels
    index = part.with_suffix(".states")
    index.write_text("".join(state + "\n" for state in states), encoding="utf-8")
    os.replace(index, file.with_suffix(".txt"))
    os.replace(part, file)


def _decode(name: str, processor: ImageProcessor) -> np.ndarray | str:
    """The resized pixels of a file, or in one line why there are none."""
    try:
        return processor.resize(decode_image(read_image_bytes(name), Path(name).name))
    except Fault as fault:
        return " ".join(str(fault).split())
