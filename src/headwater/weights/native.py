"""Our own layout of a model folder: config.json with the tree of parts, model.safetensors with our own paths.

    {"model_type": "headwater", "spec": {…}, "about": {"task": …, "labels": …}}

A tied tensor is written once, under the first of its paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.core import Model, Transformer
from headwater.core.init import constants
from headwater.errors import BadFile, NotFound
from headwater.parts import from_plain, to_plain
from headwater.weights.files import atomic, read_bounded
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
    for path, parameter in own.items():
        parameter.copy_(tensors[path])


def save_model(folder: str | Path, model: Transformer, about: Mapping[str, Any]) -> Path:
    """Write a model. Each file appears whole, the weights last; a folder in use stays usable."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": KIND, "spec": to_plain(model.spec), "about": dict(about)}
    text = json.dumps(config, indent=1, ensure_ascii=False).encode()
    if not (folder / "config.json").exists() or (folder / "config.json").read_bytes() != text:
        with atomic(folder / "config.json") as file:
            file.write(text)
    write_folder(folder, tensors_of(model))
    return folder


def is_native(folder: str | Path) -> bool:
    """Whether a folder holds a model in this layout."""
    path = Path(folder) / "config.json"
    return path.is_file() and parse_object(read_bounded(path, MOST_CONFIG), path).get("model_type") == KIND


def described(folder: str | Path) -> tuple[Model, dict[str, Any]]:
    """The spec of a folder in this layout, and what is said about it; no weight is read."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} must hold a model, it has no config.json; is this the right folder?")
    config = parse_object(read_bounded(path, MOST_CONFIG), path)
    if config.get("model_type") != KIND:
        raise BadFile(
            f"{path}: model_type must be {KIND!r}, it is {str(config.get('model_type'))[:40]!r}; load it by its family"
        )
    spec, about = from_plain(config.get("spec")), config.get("about", {})
    if not isinstance(spec, Model) or not isinstance(about, dict):
        raise BadFile(f"{path}: spec must be a Model and about a table; the file is not as it was written")
    return spec, about


def load_model(folder: str | Path) -> Native:
    """The inverse of save_model, ready for use (eval mode)."""
    spec, about = described(folder)
    file = open_folder(folder)
    check_room(spec, len(file), folder)
    model = spec.skeleton()
    model.to_empty(device="cpu")
    put(model, file, folder)
    constants(model)
    return Native(model.eval(), about)
