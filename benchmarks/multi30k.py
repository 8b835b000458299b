"""Multi30k English and German as plain files in a folder: what the benches with real text read."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

DATA = Path(os.environ.get("HEADWATER_DATA", ".")) / "data"  # public data sets, where somebody has put them
NAMES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}


def unpacked(source: Path, folder: Path, rows: int = 0) -> Path:
    """train, valid and test, each .en and .de, from files that may be compressed. rows: only so many of train."""
    for name, theirs in NAMES.items():
        for side in ("en", "de"):
            found = [p for p in (source / f"{theirs}.{side}.gz", source / f"{theirs}.{side}") if p.is_file()]
            if not found:
                sys.exit(f"{source / theirs}.{side} is not there; give the folder of Multi30k's task 1 by --files")
            with (gzip.open if found[0].suffix == ".gz" else open)(found[0], "rb") as file, \
                    (folder / f"{name}.{side}").open("wb") as out:  # fmt: skip
                shutil.copyfileobj(file, out)
            if rows and name == "train":
                kept = (folder / f"{name}.{side}").read_text(encoding="utf-8").split("\n")[:rows]
                (folder / f"{name}.{side}").write_text("\n".join(kept) + "\n", encoding="utf-8")
    return folder
