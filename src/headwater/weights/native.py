"""Our own layout of a model folder: config.json with the tree of parts, model.safetensors with our own paths.

    {"model_type": "headwater", "spec": {…}, "about": {"task": …, "labels": …}, "packed": {"head.out": "Q8_0", …}}

A tied tensor is written once, under the first of its paths. Layers named in "packed" keep their weights in few bits,
as [rows, bytes of a row] under path.blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwater.core import Model, Transformer
from headwater.core.init import constants
from headwater.errors import BadFile, NotFound
from headwater.fast.packed import PACKED, Packed, PackedLinear, PackedTable
from headwater.fast.packed import put as put_at
from headwater.parts import from_plain, to_plain
from headwater.weights.files import atomic, read_bounded
from headwater.weights.finite import check_finite, check_scales
from headwater.weights.room import check_room
from headwater.weights.shards import open_folder, write_folder
from headwater.weights.strict_json import parse_object

KIND = "headwater"
MOST_CONFIG = 16 << 20


class Native(NamedTuple):
    model: Transformer
    about: dict[str, Any]  # what it was trained for: task, labels, special tokens


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every weight under its first path, detached."""
    return {path: p.detach() for path, p in model.named_parameters()}


@torch.no_grad()
def put(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: object) -> None:
    """Copy tensors into a model. Every path and shape is checked before the first value is written."""
    own = dict(model.named_parameters())
    if odd := sorted(set(own) ^ set(tensors)):
        raise BadFile(
            f"{where} must hold this model's tensors, {odd[0]} is {'missing' if odd[0] in own else 'not one'}"
        )
    for path, parameter in own.items():
        if parameter.shape != tensors[path].shape:
            raise BadFile(f"{where}: {path} must be {tuple(parameter.shape)}, it is {tuple(tensors[path].shape)}")
        if not tensors[path].is_floating_point():
            raise BadFile(f"{where}: {path} must be floating point, it is {tensors[path].dtype}; it is another model's")
    for path, parameter in own.items():
        parameter.copy_(tensors[path])


def save_model(folder: str | Path, model: Transformer, about: Mapping[str, Any]) -> Path:
    """Write a model. Each file appears whole, the weights last; a folder in use stays usable."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    packed = packed_of(model)
    config = {"model_type": KIND, "spec": to_plain(model.spec), "about": dict(about)}
    config |= {"packed": {path: module.kind.name for path, module in packed.items()}} if packed else {}
    text = json.dumps(config, indent=1, ensure_ascii=False).encode()
    if not (folder / "config.json").exists() or (folder / "config.json").read_bytes() != text:
        with atomic(folder / "config.json") as file:
            file.write(text)
    write_folder(folder, tensors_of(model) | blocks_of(packed))
    return folder


def packed_of(model: torch.nn.Module) -> dict[str, Packed]:
    return {path: module for path, module in model.named_modules() if isinstance(module, Packed)}


def blocks_of(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """The blocks of packed layers; those that are tied share theirs, which are given once."""
    first = {module.blocks.data_ptr(): path for path, module in reversed(list(packed.items()))}
    return {f"{path}.blocks": packed[path].blocks for path in first.values()}


def is_native(folder: str | Path) -> bool:
    """Whether a folder holds a model in this layout."""
    path = Path(folder) / "config.json"
    return path.is_file() and parse_object(read_bounded(path, MOST_CONFIG), path).get("model_type") == KIND


def described(folder: str | Path) -> tuple[Model, dict[str, Any]]:
    """The spec of a folder in this layout, and what is said about it; no weight is read."""
    spec, about, _ = _described(folder)
    return spec, about


def _described(folder: str | Path) -> tuple[Model, dict[str, Any], dict[str, str]]:
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} must hold a model, it has no config.json; is this the right folder?")
    config = parse_object(read_bounded(path, MOST_CONFIG), path)
    if config.get("model_type") != KIND:
        raise BadFile(
            f"{path}: model_type must be {KIND!r}, it is {str(config.get('model_type'))[:40]!r}; load it by its family"
        )
    spec, about, packed = from_plain(config.get("spec")), config.get("about", {}), config.get("packed", {})
    if not isinstance(spec, Model) or not isinstance(about, dict) or not isinstance(packed, dict):
        raise BadFile(f"{path}: spec must be a Model, about and packed tables; the file is not as it was written")
    for kind in packed.values():
        if kind not in PACKED:
            raise BadFile(
                f"{path}: packed must name {', '.join(PACKED)}, got {kind!r:.40}; was it written by a newer one?"
            )
    return spec, about, packed


def load_model(folder: str | Path) -> Native:
    """The inverse of save_model, ready for use (eval mode)."""
    spec, about, packed = _described(folder)
    file = open_folder(folder)
    check_room(spec, len(file), folder)
    model = spec.skeleton()
    model.to_empty(device="cpu")
    blocks = _pack(model, packed, file, folder)
    put(model, {name: file[name] for name in file if name not in blocks} if blocks else file, folder)
    for path, parameter in model.named_parameters():
        check_finite(parameter.detach(), path, folder)
    constants(model)
    return Native(model.eval(), about)


def _pack(model: Transformer, packed: Mapping[str, str], file: Mapping[str, Tensor], where: object) -> set[str]:
    """Put packed layers in place of those that are named; gives the names of the tensors this took."""
    modules = dict(model.named_modules())
    taken: dict[str, Tensor] = {}
    for path, name in packed.items():
        module: Any = modules.get(path)
        kind = PACKED[name]
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise BadFile(
                f"{where}: packed must name linear layers and tables, got {path!r:.80}; it is another model's"
            )
        key = next((f"{p}.blocks" for p in _alike(path, model.spec.tied) if f"{p}.blocks" in file), f"{path}.blocks")
        if key not in file:
            raise BadFile(f"{where} must hold this model's tensors, {key} is missing")
        blocks = taken.setdefault(key, file[key])
        rows, columns = module.weight.shape
        shape = (rows, columns // kind.weights * kind.size)
        if columns % kind.weights or tuple(blocks.shape) != shape or blocks.dtype != torch.uint8:
            raise BadFile(f"{where}: {key} must be uint8 {shape}, it is {blocks.dtype} {tuple(blocks.shape)}")
        check_scales(blocks, kind, key, where)
        if isinstance(module, nn.Embedding):
            put_at(model, path, PackedTable(blocks, kind))
        else:
            put_at(model, path, PackedLinear(blocks, kind, module.bias))
    return set(taken)


def _alike(path: str, tied: tuple[tuple[str, str], ...]) -> list[str]:
    """A path and all that are tied to it."""
    found = [path]
    for one in found:  # grows while it is walked
        found += [p for pair in tied if one in pair for p in pair if p not in found]
    return found
