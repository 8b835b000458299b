"""The native model folder: config.json with the model spec, model.safetensors with parameter paths.

    {"model_type": "headwater", "spec": {…}, "metadata": {"task": …, …}, "quantization": {"head.out": "Q8_0", …}}

A tied tensor is written once, under the first of its paths. Layers named in "quantization" keep their weights in
quantized blocks, [rows, bytes per row] under path.blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import headwater.variants  # noqa: F401  (registers its parts: a spec may have them)
from headwater.core import Model, Transformer
from headwater.core.init import init_buffers
from headwater.errors import BadFile, NotFound
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.parts import from_dict, to_dict
from headwater.quantization.layers import (
    BLOCK_FORMATS,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedModule,
    replace_module,
)
from headwater.weights.checks import check_finite, check_finite_scales, check_memory
from headwater.weights.shards import open_weights, save_weights

MODEL_TYPE = "headwater"
MAX_CONFIG_BYTES = 16 << 20


class NativeModel(NamedTuple):
    """A loaded model and the metadata of its folder."""

    model: Transformer
    metadata: dict[str, Any]  # task, labels, special tokens


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter under its first path, detached."""
    return {path: p.detach() for path, p in model.named_parameters()}


def copy_into(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: object) -> None:
    """Copy tensors into a model's parameters. Every path and shape is checked before the first value is written."""
    copy_tensors(dict(model.named_parameters()), tensors, where)


@torch.no_grad()
def copy_tensors(params: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: object) -> None:
    """Copy tensors into the parameters of the same names; there must be one for each."""
    # names
    if missing := sorted(set(params) - set(tensors)):
        raise BadFile(_("{where} must hold this model's tensors, {key} is missing", where=where, key=missing[0]))
    if unknown := sorted(set(tensors) - set(params)):
        raise BadFile(
            _("{where} must hold this model's tensors, {key} is not one of them", where=where, key=unknown[0])
        )

    # shapes and dtypes
    for path, parameter in params.items():
        if parameter.shape != tensors[path].shape:
            raise BadFile(
                _(
                    "{where}: {path} must be {expected}, it is {shape}",
                    where=where,
                    path=path,
                    expected=tuple(parameter.shape),
                    shape=tuple(tensors[path].shape),
                )
            )
        if not tensors[path].is_floating_point():
            raise BadFile(
                _(
                    "{where}: {path} must be floating point, it is {dtype}; it belongs to another model",
                    where=where,
                    path=path,
                    dtype=tensors[path].dtype,
                )
            )

    for path, parameter in params.items():
        parameter.copy_(tensors[path])


def save_native(folder: str | Path, model: Transformer, metadata: Mapping[str, Any]) -> Path:
    """Write a model. Each file is written atomically, the weights last, so that a folder in use stays valid."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    quantized = quantized_layers(model)
    config = {"model_type": MODEL_TYPE, "spec": to_dict(model.spec), "metadata": dict(metadata)}
    if quantized:
        config["quantization"] = {path: module.block_format.name for path, module in quantized.items()}
    text = json.dumps(config, indent=1, ensure_ascii=False).encode()
    if not (folder / "config.json").exists() or (folder / "config.json").read_bytes() != text:
        with atomic_write(folder / "config.json") as file:
            file.write(text)
    save_weights(folder, named_tensors(model) | quantized_blocks(quantized))
    return folder


def quantized_layers(model: torch.nn.Module) -> dict[str, QuantizedModule]:
    """The quantized layers of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedModule)}


def quantized_blocks(layers: Mapping[str, QuantizedModule]) -> dict[str, Tensor]:
    """The blocks of quantized layers by tensor name; blocks that tied layers share are listed once."""
    first_path = {module.blocks.data_ptr(): path for path, module in reversed(list(layers.items()))}
    return {f"{path}.blocks": layers[path].blocks for path in first_path.values()}


def is_native(folder: str | Path) -> bool:
    """Whether a folder holds a model in the native layout."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return False
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    return config.get("model_type") == MODEL_TYPE


def read_native_spec(folder: str | Path) -> tuple[Model, dict[str, Any]]:
    """The spec and the metadata of a native folder; no weight is read."""
    spec, metadata, _ = _read_config(folder)
    return spec, metadata


def _read_config(folder: str | Path) -> tuple[Model, dict[str, Any], dict[str, str]]:
    """The spec, the metadata and the block formats by layer path of a native folder."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise NotFound(_("{folder} must hold a model, it has no config.json; is this the right folder?", folder=folder))
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    if config.get("model_type") != MODEL_TYPE:
        raise BadFile(
            _(
                "{path}: model_type must be {expected!r}, it is {model_type!r}; load it with headwater.load",
                path=path,
                expected=MODEL_TYPE,
                model_type=str(config.get("model_type"))[:40],
            )
        )

    # the three parts of a native config
    spec = from_dict(config.get("spec"))
    metadata = config.get("metadata", {})
    quantization = config.get("quantization", {})
    if not isinstance(spec, Model) or not isinstance(metadata, dict) or not isinstance(quantization, dict):
        raise BadFile(
            _(
                "{path}: spec must be a Model, metadata and quantization JSON objects; the file was changed or damaged",
                path=path,
            )
        )
    for block_format in quantization.values():
        if block_format not in BLOCK_FORMATS:
            raise BadFile(
                _(
                    "{path}: quantization must name {block_formats}, got {block_format!r:.40}; was it written by "
                    "a newer version?",
                    path=path,
                    block_formats=", ".join(BLOCK_FORMATS),
                    block_format=block_format,
                )
            )
    return spec, metadata, quantization


def load_native(folder: str | Path) -> NativeModel:
    """Load a native folder: the inverse of save_native, in eval mode."""
    spec, metadata, quantization = _read_config(folder)
    checkpoint = open_weights(folder)
    check_memory(spec, len(checkpoint), folder)
    model = spec.on_meta()
    model.to_empty(device="cpu")

    # Quantized layers first: they replace modules; the remaining tensors are copied into the parameters.
    block_names = _load_quantized_layers(model, quantization, checkpoint, folder)
    tensors: Mapping[str, Tensor] = checkpoint
    if block_names:
        tensors = {name: checkpoint[name] for name in checkpoint if name not in block_names}
    copy_into(model, tensors, folder)
    for path, parameter in model.named_parameters():
        check_finite(parameter.detach(), path, folder)
    init_buffers(model)
    return NativeModel(model.eval(), metadata)


def _load_quantized_layers(
    model: Transformer, ggml_types: Mapping[str, str], checkpoint: Mapping[str, Tensor], where: object
) -> set[str]:
    """Replace the named layers by quantized ones; returns the names of the tensors they use."""
    modules = dict(model.named_modules())
    blocks_by_key: dict[str, Tensor] = {}
    for path, name in ggml_types.items():
        module = modules.get(path)
        ggml_type = BLOCK_FORMATS[name]
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise BadFile(
                _(
                    "{where}: quantization must name linear layers and embeddings, got {path!r:.80}; it belongs "
                    "to another model",
                    where=where,
                    path=path,
                )
            )

        # the blocks, which a tied layer may have under another path
        keys = [f"{tied_path}.blocks" for tied_path in _tied_paths(path, model.spec.tied)]
        key = next((key for key in keys if key in checkpoint), f"{path}.blocks")
        if key not in checkpoint:
            raise BadFile(_("{where} must hold this model's tensors, {key} is missing", where=where, key=key))
        blocks = blocks_by_key.setdefault(key, checkpoint[key])
        rows, columns = module.weight.shape
        shape = (rows, columns // ggml_type.block_size * ggml_type.type_size)
        if columns % ggml_type.block_size or tuple(blocks.shape) != shape or blocks.dtype != torch.uint8:
            raise BadFile(
                _(
                    "{where}: {key} must be uint8 {expected}, it is {dtype} {shape}",
                    where=where,
                    key=key,
                    expected=shape,
                    dtype=blocks.dtype,
                    shape=tuple(blocks.shape),
                )
            )
        check_finite_scales(blocks, ggml_type, key, where)

        if isinstance(module, nn.Embedding):
            replace_module(model, path, QuantizedEmbedding(blocks, ggml_type))
        else:
            replace_module(model, path, QuantizedLinear(blocks, ggml_type, module.bias))
    return set(blocks_by_key)


def _tied_paths(path: str, tied: tuple[tuple[str, str], ...]) -> list[str]:
    """A path and all that are tied to it, directly or through others."""
    paths = [path]
    for current in paths:  # the list grows during the loop
        paths += [p for pair in tied if current in pair for p in pair if p not in paths]
    return paths
