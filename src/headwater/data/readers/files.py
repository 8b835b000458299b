"""Which files form the dataset: train, validation and test splits, parallel corpora, compatible files of a folder."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from headwater.data.readers.byte_streams import stat_regular
from headwater.data.readers.columns import NAMES_BY_ROLE, is_language_code
from headwater.errors import BadFile, BadSetting, NotFound, nearest
from headwater.i18n import _

FORMAT_BY_SUFFIX = {
    ".tsv": "tsv",
    ".tab": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".conll": "conll",
    ".conllu": "conll",
    ".bio": "conll",
    ".iob": "conll",
    ".iob2": "conll",
}
# suffixes that do not name a format
NEUTRAL_SUFFIXES = frozenset((".txt", ".text", ".md", ".annotated", ".raw", ""))
IGNORED_FILES = re.compile(r"^(readme|licen[cs]e|source|changelog|notice)\b|^\.|~$", re.I)
SPLIT_PATTERNS = (
    ("valid", re.compile(r"(^|[._/-])(val|valid|validation|dev|eval)([._/-]|\d|$)", re.I)),
    ("test", re.compile(r"(^|[._/-])(test)([._/-]|\d|$)", re.I)),
)
CLASS_SUFFIXES = frozenset(("pos", "neg", "neu", "positive", "negative", "neutral", "spam", "ham"))


class DataFile(NamedTuple):
    """A data file: its split, the stem it shares with the other side of a parallel corpus, and its language."""

    path: Path
    split: str
    stem: str
    language: str


@dataclass
class FileCollection:
    """The regular files of the dataset; from_folder: those found in a folder, empty: those of them without content."""

    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    from_folder: set[Path] = field(default_factory=set)
    empty: list[Path] = field(default_factory=list)


def collect_files(paths: Iterable[Path | str]) -> FileCollection:
    """Collect the data files: folders are listed one level deep, without hidden files and read-mes; each file once."""
    collection = FileCollection()
    seen: dict[tuple[int, int], Path] = {}
    for path in map(Path, paths):
        is_folder = path.is_dir()
        for file in _list_folder(path) if is_folder else [path]:
            status = stat_regular(file)
            if (first := seen.setdefault((status.st_dev, status.st_ino), file)) is not file:
                collection.notes.append(
                    _("{name} is the same file as {name2}; read once", name=file.name, name2=first.name)
                )
                continue
            if status.st_size == 0 and not is_folder:
                raise BadFile(_("{file} is empty; give a file with at least one line", file=file))
            if status.st_size:
                collection.files.append(file)
            else:
                collection.empty.append(file)
            if is_folder:
                collection.from_folder.add(file)
    if not collection.files:
        raise NotFound(_("no data file was given; name a file, two parallel files or a folder of them"))
    return collection


def _list_folder(path: Path) -> list[Path]:
    files = sorted(p for p in path.iterdir() if not IGNORED_FILES.match(p.name) and not p.is_dir())
    if not files:
        raise BadFile(_("{path} is a folder without data files; name a folder with at least one", path=path))
    return files


def split_from_name(path: Path) -> str:
    """The split (train, valid or test) in a file's name; train when it has none.

    >>> [split_from_name(Path(name)) for name in ("train.en", "val.de.gz", "test_2016_flickr.fr", "contest.txt")]
    ['train', 'valid', 'test', 'train']
    """
    name = re.sub(r"_", ".", path.name)
    return next((split for split, pattern in SPLIT_PATTERNS if pattern.search(name)), "train")


def parse_file_name(path: Path) -> DataFile:
    """'train.en.gz' -> stem 'train', language 'en'; 'corpus.de.txt' -> stem 'corpus.txt', language 'de'."""
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    split = split_from_name(path)
    if suffix not in FORMAT_BY_SUFFIX and suffix not in NEUTRAL_SUFFIXES:
        return DataFile(path, split, str(path.parent / Path(name).stem), suffix[1:])
    parts = name.split(".")
    for i in range(len(parts) - 1):
        if suffix == ".txt" and is_language_code(parts[i]):
            stem = ".".join(parts[:i] + parts[i + 1 :])
            return DataFile(path, split, str(path.parent / stem), parts[i])
    return DataFile(path, split, str(path), "")


def pair_files(
    data_files: Sequence[DataFile], source: str | None, target: str | None
) -> tuple[dict[str, tuple[Path, Path]], tuple[str, str]]:
    """The two files of each stem, source first: as named, or else in the order given."""
    stems: dict[str, dict[str, Path]] = {}
    for file in data_files:
        stems.setdefault(file.stem, {})[file.language] = file.path
    languages = list(dict.fromkeys(file.language for file in data_files))
    if (source is None) != (target is None) and len(languages) == 2:
        source = source or next(name for name in languages if name != target)
        target = target or next(name for name in languages if name != source)
    if source is None or target is None:
        if len(languages) != 2:
            raise BadSetting(
                _(
                    "parallel files in {num_languages} languages ({languages}); say which is the source and "
                    "which the target",
                    num_languages=len(languages),
                    languages=", ".join(languages),
                )
            )
        source, target = languages
    for name in (source, target):
        if name not in languages:
            raise BadSetting(
                _("no file is in language {name!r}; {nearest}", name=name, nearest=nearest(name, languages))
            )
    pairs = {stem: (files[source], files[target]) for stem, files in stems.items() if {source, target} <= files.keys()}
    return pairs, (source, target)


# --------------------------------------------------------------------------------------- compatible files of a folder

TRAIN_PATTERN = re.compile(r"(^|[._-])train([._-]|\d|$)", re.I)
MAX_NAMES = 8  # files that are named in a message


class FileKind(NamedTuple):
    """A file of a folder and its kind: files with equal keys are compatible."""

    path: Path
    key: Hashable
    structured: bool  # a table, CoNLL or SQuAD rather than plain text


def select_compatible(kinds: Sequence[FileKind]) -> set[Path]:
    """The files to read: of several kinds the one that is named train, or the only one that is not plain text."""
    groups: dict[Hashable, list[FileKind]] = {}
    for kind in kinds:
        groups.setdefault(kind.key, []).append(kind)
    candidates = list(groups.values())
    for condition in (_is_train, _is_structured):
        matches = [group for group in candidates if condition(group)]
        if len(candidates) > 1 and matches:
            candidates = matches
    if len(candidates) > 1:
        groups_text = "; ".join(join_file_names([kind.path for kind in group]) for group in candidates)
        raise BadFile(
            _(
                "{parent} holds files of {num_candidates} kinds: {files}; name the files you mean",
                parent=kinds[0].path.parent,
                num_candidates=len(candidates),
                files=groups_text,
            )
        )
    return {kind.path for kind in candidates[0]}


def _is_train(group: Sequence[FileKind]) -> bool:
    return any(TRAIN_PATTERN.search(kind.path.name.replace("_", ".")) for kind in group)


def _is_structured(group: Sequence[FileKind]) -> bool:
    return group[0].structured


def is_parallel_suffix(suffix: str) -> bool:
    """Whether a suffix is a language, a side of a parallel corpus or a class, rather than a file type.

    >>> [is_parallel_suffix(name) for name in ("de", "src", "neg", "c", "png")]
    [True, True, True, False, False]
    """
    return (
        is_language_code(suffix)
        or suffix in CLASS_SUFFIXES
        or suffix in (*NAMES_BY_ROLE["source"], *NAMES_BY_ROLE["target"])
    )


def join_file_names(paths: Collection[Path]) -> str:
    """The names of the files with commas, at most MAX_NAMES of them.

    >>> join_file_names([Path("a/b.tsv"), Path("c.tsv")])
    'b.tsv, c.tsv'
    """
    names = [path.name for path in paths]
    return ", ".join(names[:MAX_NAMES]) + (" …" if len(names) > MAX_NAMES else "")
