"""Ids kept between runs: one folder for each (data, tokenizer), written whole or not at all, safe to delete.

<cache>/<key>/columns.json    name -> type, count and BLAKE2 of each array
<cache>/<key>/source.values.npy, source.offsets.npy, …
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from headwater.data.ragged import Ragged
from headwater.data.reading.opening import regular

VERSION = 1  # raise it when the meaning of the arrays changes: old folders are then not found
IN_MEMORY = 2**30  # bytes; a smaller array is read whole, a larger one is mapped


def key_of(paths: Iterable[Path], *words: str) -> str:
    """A name for the content of these files together with the words (recipe, tokenizer): equal content, equal name."""
    whole = hashlib.blake2b(f"{VERSION}".encode(), digest_size=16)
    for path in paths:
        regular(path)
        whole.update(_digest(path).encode())
    for word in words:
        whole.update(hashlib.blake2b(word.encode()).digest())
    return whole.hexdigest()


def cached(folder: Path | None, key: str, make: Callable[[], dict[str, Ragged]]) -> dict[str, Ragged]:
    """The columns kept under the key, or made and kept. A damaged folder is made again; no folder: nothing is kept."""
    if folder is None:
        return make()
    if (found := load(folder / key)) is not None:
        return found
    columns = make()
    save(folder / key, columns)
    return columns


def save(folder: Path, columns: dict[str, Ragged]) -> None:
    """Write beside the place, then rename: no reader ever meets half a folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    new.mkdir()
    try:
        table = {}
        for name, column in columns.items():
            for part, array in (("values", column.values), ("offsets", column.offsets)):
                file = new / f"{name}.{part}.npy"
                np.save(file, array, allow_pickle=False)
                file.chmod(0o444)  # a mapped file that shrinks would end the process
                table[file.name] = _digest(file)
        (new / "columns.json").write_text(json.dumps(table, indent=1))
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)
        os.rename(new, folder)
    except OSError:  # a full disk, or another process was first: the cache is only a convenience
        shutil.rmtree(new, ignore_errors=True)


def load(folder: Path) -> dict[str, Ragged] | None:
    """The columns of a folder; None when it is absent or anything in it is not as it was written."""
    try:
        table = json.loads((folder / "columns.json").read_text())
        if any(_digest(folder / file) != digest for file, digest in table.items()):
            return None
        names = dict.fromkeys(file.split(".")[0] for file in table)
        return {name: Ragged(_array(folder / f"{name}.values.npy"), _array(folder / f"{name}.offsets.npy"))
                for name in names}  # fmt: skip
    except (OSError, ValueError, AttributeError):
        return None


def _array(path: Path) -> np.ndarray:
    large = path.stat().st_size > IN_MEMORY
    return np.load(path, mmap_mode="r" if large else None, allow_pickle=False)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
