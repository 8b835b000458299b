"""Multi30k English and German as plain text files, for the benchmarks on real text."""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

DATA = Path(os.environ.get("HEADWATER_DATA", ".")) / "data"  # public datasets; weights are in weights/ beside it
NAMES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}


def prepare_files(source: Path, folder: Path, rows: int = 0) -> Path:
    """Write train, valid and test as .en and .de, from files that may be compressed. rows: of train, 0 for all."""
    for name, original in NAMES.items():
        for side in ("en", "de"):
            existing = [p for p in (source / f"{original}.{side}.gz", source / f"{original}.{side}") if p.is_file()]
            if not existing:
                sys.exit(
                    f"{source / original}.{side} does not exist; give the folder of Multi30k's task 1 with --files"
                )
            with (gzip.open if existing[0].suffix == ".gz" else open)(existing[0], "rb") as file, \
                    (folder / f"{name}.{side}").open("wb") as out:  # fmt: skip
                shutil.copyfileobj(file, out)
            if rows and name == "train":
                lines = (folder / f"{name}.{side}").read_text(encoding="utf-8").split("\n")[:rows]
                (folder / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
