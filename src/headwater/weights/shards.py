"""A model's weights in a folder: one model.safetensors, or shards with an index that says which holds what."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.errors import BadFile, NotFound
from headwater.weights.files import atomic, read_bounded, shown
from headwater.weights.header import MOST_BYTES, MOST_TENSORS, check_name
from headwater.weights.strict_json import parse_object
from headwater.weights.tensors import TensorFile, Tensors, outline, write

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_SHARDS = 2_000
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.safetensors", re.ASCII)


class ShardedTensors(Tensors):
    """The tensors of several files, as one. Each is found in the shard the index names, and in no other."""

    def __init__(self, folder: str | Path, index: str = INDEX):
        self.where = Path(folder) / index
        placed = _weight_map(parse_object(read_bounded(self.where, MOST_BYTES), self.where), self.where)
        self.shards = {name: TensorFile(Path(folder) / name) for name in sorted(set(placed.values()))}
        self._shard_of = {name: self.shards[shard] for name, shard in placed.items()}
        promised = Counter(placed.values())
        for shard, file in self.shards.items():
            _check_agreement(shard, file, placed, promised[shard], self.where)

    def __getitem__(self, name: str) -> Tensor:
        return self._shard_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def outline(self, name: str) -> Tensor:
        return self._shard_of[name].outline(name)

    def release(self, name: str) -> None:
        self._shard_of[name].release(name)


def open_folder(folder: str | Path) -> Tensors:
    """The weights of a public model folder. Old pickles are named, never read."""
    folder = Path(folder)
    if (folder / WHOLE).exists():
        return TensorFile(folder / WHOLE)
    if (folder / INDEX).exists():
        return ShardedTensors(folder)
    pickles = [p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))]
    if pickles:
        raise NotFound(
            f"{folder} has no {WHOLE}, only {pickles[0]}: a pickle can run code and is never loaded; "
            "turn it into safetensors with `headwater convert`"
        )
    raise NotFound(f"{folder} must hold {WHOLE} or {INDEX}; it has neither")


def write_folder(folder: str | Path, tensors: Mapping[str, Tensor], largest: int = 5 * 10**9) -> list[Path]:
    """Write weights as one file, or as shards of at most `largest` bytes and then their index; return the paths."""
    folder = Path(folder)
    groups = _groups(tensors, largest)
    if len(groups) == 1:
        write(folder / WHOLE, tensors)
        (folder / INDEX).unlink(missing_ok=True)
        return [folder / WHOLE]
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    for shard, group in zip(names, groups, strict=True):
        write(folder / shard, _Some(tensors, group))
    index = {
        "metadata": {"total_size": sum(_size(tensors, name) for name in tensors)},
        "weight_map": {name: shard for shard, group in zip(names, groups, strict=True) for name in group},
    }
    with atomic(folder / INDEX) as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    (folder / WHOLE).unlink(missing_ok=True)  # a stale whole file would be read in place of the shards
    return [folder / name for name in (*names, INDEX)]


class _Some(Tensors):
    def __init__(self, tensors: Mapping[str, Tensor], names: list[str]):
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def outline(self, name: str) -> Tensor:
        return outline(self._tensors, name)


def _size(tensors: Mapping[str, Tensor], name: str) -> int:
    shape = outline(tensors, name)
    return shape.numel() * shape.dtype.itemsize


def _groups(tensors: Mapping[str, Tensor], largest: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = largest
    for name in tensors:
        size = _size(tensors, name)
        if size > room and groups[-1]:
            groups.append([])
            room = largest
        groups[-1].append(name)
        room -= size
    return groups


def _weight_map(index: dict[str, Any], where: object) -> dict[str, str]:
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or len(placed) > MOST_TENSORS:
        raise BadFile(f"{where}: weight_map must name 1 to {MOST_TENSORS:,} tensors and their shards")
    for name, shard in placed.items():
        check_name(name, where)
        if not isinstance(shard, str) or not SHARD.fullmatch(shard) or ".." in shard:
            raise BadFile(f"{where}: {shown(shard)} is no shard: it must be the plain name of a .safetensors file here")
    if len(set(placed.values())) > MOST_SHARDS:
        raise BadFile(f"{where}: names {len(set(placed.values())):,} shards, at most {MOST_SHARDS:,} are read")
    return placed


def _check_agreement(shard: str, file: TensorFile, placed: dict[str, str], promised: int, where: object) -> None:
    """The index and the shard must say the same, both ways: otherwise a tensor is missing, or is there twice."""
    for name in file:
        if placed.get(name) != shard:
            said = f"in {placed[name]}" if name in placed else "nowhere"
            raise BadFile(
                f"{where}: {shard} holds {shown(name)}, which the index places {said}; the folder is mixed up"
            )
    if promised != len(file):
        lost = next(name for name, place in placed.items() if place == shard and name not in file)
        raise BadFile(f"{where}: {shown(lost)} must be in {shard}, which lacks it; fetch the shard again")
