"""Which files belong together: the sets (train, valid, test), and the two sides of a parallel text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headwater.data.reading.names import is_code
from headwater.data.reading.opening import regular
from headwater.errors import BadFile, BadSetting, NotFound, nearest

LAYOUTS = {".tsv": "tsv", ".tab": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json",
           ".conll": "conll", ".conllu": "conll", ".bio": "conll", ".iob": "conll", ".iob2": "conll"}  # fmt: skip
OTHER = frozenset((".txt", ".text", ".md", ".annotated", ".raw", ""))  # suffixes that say nothing about the content
NOT_DATA = re.compile(r"^(readme|licen[cs]e|source|changelog|notice)\b|^\.|~$", re.I)
SPLITS = (("valid", re.compile(r"(^|[._/-])(val|valid|validation|dev|eval)([._/-]|\d|$)", re.I)),
          ("test", re.compile(r"(^|[._/-])(test)([._/-]|\d|$)", re.I)))  # fmt: skip
CLASSES = frozenset(("pos", "neg", "neu", "positive", "negative", "neutral", "spam", "ham"))


class Side(NamedTuple):
    """One file's place: its set, the stem it shares with its other side, and the language its name says."""

    path: Path
    split: str
    stem: str
    language: str


@dataclass
class Gathered:
    """The plain files meant; `in_folder` are those nobody named, and `empty` those of them without content."""

    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    in_folder: set[Path] = field(default_factory=set)
    empty: list[Path] = field(default_factory=list)


def gather(paths: Iterable[Path | str]) -> Gathered:
    """The plain files meant: folders opened one level, hidden files and read-mes left out, each file once."""
    found = Gathered()
    seen: dict[tuple[int, int], Path] = {}
    for path in map(Path, paths):
        folder = path.is_dir()
        for file in _inside(path) if folder else [path]:
            status = regular(file)
            if (first := seen.setdefault((status.st_dev, status.st_ino), file)) is not file:
                found.notes.append(f"{file.name} is the same file as {first.name}; read once")
                continue
            if status.st_size == 0 and not folder:
                raise BadFile(f"{file} is empty; give a file with at least one line")
            (found.files if status.st_size else found.empty).append(file)
            if folder:
                found.in_folder.add(file)
    if not found.files:
        raise NotFound("no data file was given; name a file, two parallel files or a folder of them")
    return found


def _inside(path: Path) -> list[Path]:
    files = sorted(p for p in path.iterdir() if not NOT_DATA.match(p.name) and not p.is_dir())
    if not files:
        raise BadFile(f"{path} is a folder without data files; name a folder with at least one")
    return files


def split_of(path: Path) -> str:
    """train, valid or test, as the file's name says; train when it says nothing.

    >>> [split_of(Path(name)) for name in ("train.en", "val.de.gz", "test_2016_flickr.fr", "contest.txt")]
    ['train', 'valid', 'test', 'train']
    """
    name = re.sub(r"_", ".", path.name)
    return next((split for split, pattern in SPLITS if pattern.search(name)), "train")


def side_of(path: Path) -> Side:
    """'train.en.gz' -> stem 'train', language 'en'; 'corpus.de.txt' -> stem 'corpus.txt', language 'de'."""
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    split = split_of(path)
    if suffix not in LAYOUTS and suffix not in OTHER:
        return Side(path, split, str(path.parent / Path(name).stem), suffix[1:])
    parts = name.split(".")
    for place in range(len(parts) - 1):
        if suffix == ".txt" and is_code(parts[place]):
            return Side(path, split, str(path.parent / ".".join(parts[:place] + parts[place + 1 :])), parts[place])
    return Side(path, split, str(path), "")


def pair_up(
    sides: Sequence[Side], source: str | None, target: str | None
) -> tuple[dict[str, tuple[Path, Path]], tuple[str, str]]:
    """The two files of each stem, source first: as named, or else in the order given."""
    stems: dict[str, dict[str, Path]] = {}
    for side in sides:
        stems.setdefault(side.stem, {})[side.language] = side.path
    languages = list(dict.fromkeys(side.language for side in sides))
    if (source is None) != (target is None) and len(languages) == 2:
        source = source or next(name for name in languages if name != target)
        target = target or next(name for name in languages if name != source)
    if source is None or target is None:
        if len(languages) != 2:
            raise BadSetting(f"parallel files in {len(languages)} languages ({', '.join(languages)}); "
                             "say which is the source and which the target")  # fmt: skip
        source, target = languages
    for name in (source, target):
        if name not in languages:
            raise BadSetting(f"no file is in language {name!r}; {nearest(name, languages)}")
    pairs = {stem: (files[source], files[target]) for stem, files in stems.items() if {source, target} <= files.keys()}
    return pairs, (source, target)
