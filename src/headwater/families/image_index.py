"""An index of images by their vectors, kept in the user's cache: search by text or image, and near duplicates.

Only images that are new or changed are read again; those that were removed leave the index.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from headwater.errors import BadInput, Fault
from headwater.families.matching import BATCH_SIZE, Matcher
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.vision.images import find_images, read_image
from headwater.vision.pixel_cache import cache_folder

MAX_INDEX_BYTES = 1 << 30


class Hit(NamedTuple):
    """A found image and its cosine similarity."""

    path: Path
    cosine: float


class Duplicate(NamedTuple):
    """Two images that are nearly the same."""

    first: Path
    second: Path
    cosine: float


class ImageIndex:
    """The vectors of the images of a folder. problems: the images that could not be read, in one line each."""

    def __init__(self, paths: Sequence[Path], vectors: np.ndarray, problems: Sequence[str]) -> None:
        self.paths = list(paths)
        self.vectors = vectors  # [N, W] float32 unit vectors
        self.problems = list(problems)

    def search(self, vector: np.ndarray, count: int) -> list[Hit]:
        """The nearest images to a unit vector [W]."""
        cosines = self.vectors @ vector
        order = np.argsort(-cosines, kind="stable")[:count]
        return [Hit(self.paths[n], float(cosines[n])) for n in order]

    def duplicates(self, threshold: float) -> list[Duplicate]:
        """Pairs of images whose cosine is at least the threshold, the most alike first."""
        pairs = []
        for first, row in enumerate(self.vectors):  # a row at a time: N x N cosines may not fit
            cosines = self.vectors[first + 1 :] @ row
            for n in np.flatnonzero(cosines >= threshold):
                pairs.append(Duplicate(self.paths[first], self.paths[first + 1 + n], float(cosines[n])))
        return sorted(pairs, key=lambda pair: -pair.cosine)


def build_index(folder: str | Path, matcher: Matcher, progress: Callable[[int, int], None] | None = None) -> ImageIndex:
    """The index of a folder: from the cache, with the images that are new or changed."""
    folder = Path(folder)
    paths = find_images(folder)
    if not paths:
        raise BadInput(_("{folder} holds no images; give a folder with image files", folder=folder))
    file = cache_folder().parent / "index" / f"{_index_key(folder, matcher)}.npz"
    known = _read(file)

    # vectors of the images that are not in the index as they are now
    stamps = {path: _stamp(path) for path in paths}
    new = [path for path in paths if f"{path}\0{stamps[path]}" not in known]
    problems: list[str] = []
    for first in range(0, len(new), BATCH_SIZE):
        if progress is not None:
            progress(first, len(new))
        readable: list[Path] = []
        pixels: list[np.ndarray] = []
        for path in new[first : first + BATCH_SIZE]:
            try:
                pixels.append(read_image(path))
                readable.append(path)
            except Fault as fault:
                problems.append(" ".join(str(fault).split()))
        if readable:
            vectors = matcher.image_vectors(pixels).numpy()
            known |= {f"{path}\0{stamps[path]}": vector for path, vector in zip(readable, vectors, strict=True)}

    present = [path for path in paths if f"{path}\0{stamps[path]}" in known]
    if not present:
        raise BadInput(_("{folder}: no image can be read; {problem}", folder=folder, problem=problems[0]))
    vectors = np.stack([known[f"{path}\0{stamps[path]}"] for path in present])
    if new or len(present) != len(known):
        _write(file, [f"{path}\0{stamps[path]}" for path in present], vectors)
    return ImageIndex(present, vectors, problems)


def _stamp(path: Path) -> str:
    """Size and time of change of a file."""
    try:
        status = os.stat(path)
    except OSError:
        return "missing"
    return f"{status.st_size}:{status.st_mtime_ns}"


def _index_key(folder: Path, matcher: Matcher) -> str:
    """A hash of the folder and of the image tower."""
    digest = hashlib.sha256(str(folder.absolute()).encode("utf-8", "surrogateescape"))
    digest.update(repr((matcher.model.spec, matcher.processor)).encode())
    for parameter in matcher.model.image.parameters():
        digest.update(parameter.detach().float().sum().cpu().numpy().tobytes())
    return digest.hexdigest()[:32]


def _read(file: Path) -> dict[str, np.ndarray]:
    """Image and stamp -> vector; empty where there is no index, or a damaged one."""
    names = file.with_suffix(".json")
    try:
        keys = parse_json_object(read_limited(names, MAX_INDEX_BYTES), names)["images"]
        vectors = np.load(file.with_suffix(".npy"), allow_pickle=False)
        return dict(zip(keys, vectors, strict=True))
    except (Fault, OSError, ValueError, KeyError, TypeError):
        return {}


def _write(file: Path, keys: Sequence[str], vectors: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").unlink(missing_ok=True)  # the old names must not be read with the new vectors
    with atomic_write(file.with_suffix(".npy")) as out:
        np.save(out, vectors, allow_pickle=False)
    with atomic_write(file.with_suffix(".json")) as out:
        out.write(json.dumps({"images": list(keys)}).encode())


def query_vector(query: str, matcher: Matcher) -> np.ndarray:
    """The unit vector of a query: an image file, or a text."""
    vectors = matcher.image_vectors([read_image(query)]) if Path(query).is_file() else matcher.text_vectors([query])
    return torch.as_tensor(vectors)[0].numpy()
