"""Model weights in a folder: one model.safetensors, or shards with model.safetensors.index.json."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.errors import BadFile, NotFound
from headwater.i18n import _
from headwater.io.files import atomic_write, quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.weights.safetensors import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    LazyStateDict,
    SafetensorsFile,
    check_tensor_name,
    meta_tensor,
    write_safetensors,
)

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
MAX_SHARDS = 2_000
SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,150}\.safetensors", re.ASCII)


class ShardedSafetensors(LazyStateDict):
    """The tensors of several shards as one mapping. Each must be in the shard that the index names, and only there."""

    def __init__(self, folder: str | Path, index: str = WEIGHTS_INDEX_NAME):
        self.where = Path(folder) / index
        index_json = parse_json_object(read_limited(self.where, MAX_HEADER_BYTES), self.where)
        weight_map = _parse_weight_map(index_json, self.where)
        self.shards = {name: SafetensorsFile(Path(folder) / name) for name in sorted(set(weight_map.values()))}
        self._shard_of = {name: self.shards[shard] for name, shard in weight_map.items()}
        num_expected = Counter(weight_map.values())
        for shard, file in self.shards.items():
            _check_shard(shard, file, weight_map, num_expected[shard], self.where)

    def __getitem__(self, name: str) -> Tensor:
        return self._shard_of[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)

    def meta_tensor(self, name: str) -> Tensor:
        return self._shard_of[name].meta_tensor(name)

    def release(self, name: str) -> None:
        self._shard_of[name].release(name)


def open_weights(folder: str | Path) -> LazyStateDict:
    """Open the weights of a model folder. Pickles are named in the error, never read."""
    folder = Path(folder)
    if (folder / WEIGHTS_NAME).exists():
        return SafetensorsFile(folder / WEIGHTS_NAME)
    if (folder / WEIGHTS_INDEX_NAME).exists():
        return ShardedSafetensors(folder)
    pickles = [p.name for p in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))]
    if pickles:
        raise NotFound(
            _(
                "{folder} has no {weights_name}, only {pickles}: a pickle can run code and is never loaded; "
                "turn it into safetensors with `headwater convert`",
                folder=folder,
                weights_name=WEIGHTS_NAME,
                pickles=pickles[0],
            )
        )
    raise NotFound(
        _(
            "{folder} must hold {weights_name} or {index_name}; it has neither",
            folder=folder,
            weights_name=WEIGHTS_NAME,
            index_name=WEIGHTS_INDEX_NAME,
        )
    )


def save_weights(folder: str | Path, tensors: Mapping[str, Tensor], max_shard_size: int = 5 * 10**9) -> list[Path]:
    """Write weights as one file, or as shards of at most `max_shard_size` bytes with an index; return the paths."""
    folder = Path(folder)
    groups = _plan_shards(tensors, max_shard_size)
    if len(groups) == 1:
        write_safetensors(folder / WEIGHTS_NAME, tensors)
        (folder / WEIGHTS_INDEX_NAME).unlink(missing_ok=True)
        return [folder / WEIGHTS_NAME]
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    for shard, group in zip(names, groups, strict=True):
        write_safetensors(folder / shard, _TensorSubset(tensors, group))
    index = {
        "metadata": {"total_size": sum(_num_bytes(tensors, name) for name in tensors)},
        "weight_map": {name: shard for shard, group in zip(names, groups, strict=True) for name in group},
    }
    with atomic_write(folder / WEIGHTS_INDEX_NAME) as file:
        file.write(json.dumps(index, indent=2).encode() + b"\n")
    (folder / WEIGHTS_NAME).unlink(missing_ok=True)  # a stale single file would be read instead of the shards
    return [folder / name for name in (*names, WEIGHTS_INDEX_NAME)]


class _TensorSubset(LazyStateDict):
    """A subset of the tensors of a mapping."""

    def __init__(self, tensors: Mapping[str, Tensor], names: list[str]):
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def meta_tensor(self, name: str) -> Tensor:
        return meta_tensor(self._tensors, name)


def _num_bytes(tensors: Mapping[str, Tensor], name: str) -> int:
    meta = meta_tensor(tensors, name)
    return meta.numel() * meta.dtype.itemsize


def _plan_shards(tensors: Mapping[str, Tensor], max_shard_size: int) -> list[list[str]]:
    """Tensor names grouped into shards, in order; a shard is closed when the next tensor would exceed its size."""
    groups: list[list[str]] = [[]]
    num_free = max_shard_size
    for name in tensors:
        size = _num_bytes(tensors, name)
        if size > num_free and groups[-1]:
            groups.append([])
            num_free = max_shard_size
        groups[-1].append(name)
        num_free -= size
    return groups


def _parse_weight_map(index: dict[str, Any], where: object) -> dict[str, str]:
    """The checked weight_map of an index: tensor name -> file name of its shard."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or len(weight_map) > MAX_TENSORS:
        raise BadFile(
            _(
                "{where}: weight_map must name 1 to {max_tensors:,} tensors and their shards",
                where=where,
                max_tensors=MAX_TENSORS,
            )
        )
    for name, shard in weight_map.items():
        check_tensor_name(name, where)
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard) or ".." in shard:
            raise BadFile(
                _(
                    "{where}: {shard} is not a shard: it must be the plain name of a .safetensors file in this folder",
                    where=where,
                    shard=quote(shard),
                )
            )
    num_shards = len(set(weight_map.values()))
    if num_shards > MAX_SHARDS:
        raise BadFile(
            _(
                "{where}: names {num_shards:,} shards, at most {max_shards:,} are read",
                where=where,
                num_shards=num_shards,
                max_shards=MAX_SHARDS,
            )
        )
    return weight_map


def _check_shard(
    shard: str, file: SafetensorsFile, weight_map: dict[str, str], num_expected: int, where: object
) -> None:
    """The index and the shard must list the same tensors: otherwise one is missing, or is there twice."""
    for name in file:
        if weight_map.get(name) != shard:
            location = _("in {other_shard}", other_shard=weight_map[name]) if name in weight_map else _("nowhere")
            raise BadFile(
                _(
                    "{where}: {shard} holds {name}, which the index places {location}; the folder is mixed up",
                    where=where,
                    shard=shard,
                    name=quote(name),
                    location=location,
                )
            )
    if num_expected != len(file):
        missing = next(name for name, listed in weight_map.items() if listed == shard and name not in file)
        raise BadFile(
            _(
                "{where}: {name} must be in {shard}, which lacks it; fetch the shard again",
                where=where,
                name=quote(missing),
                shard=shard,
            )
        )
