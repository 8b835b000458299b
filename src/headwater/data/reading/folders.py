"""The files of a folder that belong together: those that are read alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

from headwater.data.reading.files import CLASSES
from headwater.data.reading.names import ROLES, is_code
from headwater.errors import BadFile

TRAIN = re.compile(r"(^|[._-])train([._-]|\d|$)", re.I)
SHOWN = 8  # files that are named in a message


class Kind(NamedTuple):
    """One file of a folder, and what it is read as: files with equal keys are read alike."""

    path: Path
    key: Hashable
    structured: bool  # a table, tags or questions rather than running text


def alike(kinds: Sequence[Kind]) -> set[Path]:
    """The files to read: of several groups the one that is named train, or the only one that is not running text."""
    groups: dict[Hashable, list[Kind]] = {}
    for kind in kinds:
        groups.setdefault(kind.key, []).append(kind)
    candidates = list(groups.values())
    for wanted in (_is_train, _is_structured):
        chosen = [group for group in candidates if wanted(group)]
        if len(candidates) > 1 and chosen:
            candidates = chosen
    if len(candidates) > 1:
        said = "; ".join(named([kind.path for kind in group]) for group in candidates)
        raise BadFile(f"{kinds[0].path.parent} holds files of {len(candidates)} kinds: {said}; name the files you mean")
    return {kind.path for kind in candidates[0]}


def _is_train(group: Sequence[Kind]) -> bool:
    return any(TRAIN.search(kind.path.name.replace("_", ".")) for kind in group)


def _is_structured(group: Sequence[Kind]) -> bool:
    return group[0].structured


def is_side(suffix: str) -> bool:
    """Whether a suffix names one side of a parallel text or a class, rather than a kind of file.

    >>> [is_side(name) for name in ("de", "src", "neg", "c", "png")]
    [True, True, True, False, False]
    """
    return is_code(suffix) or suffix in CLASSES or suffix in (*ROLES["source"], *ROLES["target"])


def named(paths: Collection[Path]) -> str:
    """The names of some files, the first ones of many.

    >>> named([Path("a/b.tsv"), Path("c.tsv")])
    'b.tsv, c.tsv'
    """
    names = [path.name for path in paths]
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")
