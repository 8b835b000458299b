"""Codec folders: config.json and model.safetensors, in the native layout or that of a published codec.

    {"model_type": "headwater_codec", "spec": {…}}       the native layout: tensors under their module paths
    {"model_type": "vqgan", …}                           a published layout: tensors under its names

A model that speaks in a codec's ids has it in the folder `codec` beside its own files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwater.codecs.base import Codec, CodecSpec
from headwater.codecs.registry import CODEC_FAMILIES, CodecFamily
from headwater.errors import BadFile, BadSetting, NotFound, Unavailable, nearest
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.parts import from_dict, to_dict
from headwater.weights.checks import check_finite, memory_limit
from headwater.weights.hf_config import MAX_CONFIG_BYTES, HFConfig
from headwater.weights.native import copy_into, named_tensors
from headwater.weights.safetensors import LazyStateDict
from headwater.weights.shards import open_weights, save_weights

CODEC_TYPE = "headwater_codec"
CODEC_FOLDER = "codec"
# of a codec in the files of a model: the key of its config, and the prefix of its tensors
NESTED_CODECS = {"codec_config": "codec_model.", "audio_encoder": "audio_encoder."}  # Bark, MusicGen


def find_codec(folder: str | Path) -> Path:
    """The codec beside a model: its folder `codec`."""
    path = Path(folder) / CODEC_FOLDER
    if not (path / "config.json").is_file():
        raise NotFound(
            _("{folder} must hold the codec of its tokens in {name}/, it has none", folder=folder, name=CODEC_FOLDER)
        )
    return path


def load_codec(folder: str | Path) -> Codec:
    """Load a codec, native or published, in eval mode."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(_("{folder}: a codec folder must have a config.json, it has none", folder=folder))
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    model_type = config.get("model_type")
    if model_type == CODEC_TYPE:
        codec = _on_meta(_native_spec(config, path), path)
        tensors: Mapping[str, Tensor] = open_weights(folder)
        _allocate(codec)
        copy_into(codec, tensors, folder)
    else:
        codec = _load_published(folder / "config.json", config, open_weights(folder))
    return _checked(codec, folder)


def has_nested_codec(folder: str | Path) -> bool:
    """Whether a model folder holds a codec among its own tensors, as Bark's does."""
    path = Path(folder) / "config.json"
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path) if path.is_file() else {}
    return any(isinstance(config.get(key), dict) for key in NESTED_CODECS)


def load_nested_codec(folder: str | Path) -> Codec:
    """Load the codec among the tensors of a model, in eval mode."""
    folder = Path(folder)
    path = folder / "config.json"
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    checkpoint = open_weights(folder)
    for key, prefix in NESTED_CODECS.items():
        values = config.get(key)
        if isinstance(values, dict):
            return _checked(_load_published(path, values, PrefixedTensors(checkpoint, prefix)), folder)
    raise NotFound(_("{path} must describe a codec in {keys}, it does not", path=path, keys=" / ".join(NESTED_CODECS)))


class PrefixedTensors(LazyStateDict):
    """The tensors of a checkpoint whose names begin with a prefix, without it."""

    def __init__(self, tensors: LazyStateDict, prefix: str) -> None:
        self.where = tensors.where
        self._tensors = tensors
        self._prefix = prefix
        self._names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def meta_tensor(self, name: str) -> Tensor:
        return self._tensors.meta_tensor(self._prefix + name)


def _checked(codec: Codec, folder: Path) -> Codec:
    """A loaded codec in eval mode; values that are not finite are refused."""
    for name, parameter in codec.named_parameters():
        check_finite(parameter.detach(), name, folder)
    return codec.eval()


def is_codec(folder: str | Path) -> bool:
    """Whether a folder holds a codec in the native layout."""
    path = Path(folder) / "config.json"
    return (
        path.is_file() and parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path).get("model_type") == CODEC_TYPE
    )


def read_codec_metadata(folder: str | Path) -> Any:
    """The metadata of a codec in the native layout."""
    path = Path(folder) / "config.json"
    metadata = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def read_codec_spec(folder: str | Path) -> CodecSpec:
    """The spec of a codec; no weight is read."""
    path = Path(folder) / "config.json"
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    if config.get("model_type") == CODEC_TYPE:
        return _native_spec(config, path)
    return find_codec_family(str(config.get("model_type")), path).read_spec(HFConfig(config, path))


def save_codec(
    codec: Codec, folder: str | Path, layout: str = CODEC_TYPE, metadata: Mapping[str, object] | None = None
) -> Path:
    """Write a codec, in the native layout or that of a published codec (vqgan, dall_e_dvae).

    metadata: of the run that trained it, in the native layout.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if layout == CODEC_TYPE:
        config: dict[str, object] = {
            "model_type": CODEC_TYPE,
            "spec": to_dict(codec.spec),
            "metadata": dict(metadata or {}),
        }
        tensors: Mapping[str, Tensor] = named_tensors(codec)
    else:
        family = find_codec_family(layout, "layout")
        config = family.write_config(codec.spec)
        tensors = family.names.export(named_tensors(codec))
    save_weights(folder, tensors)
    with atomic_write(folder / "config.json") as file:
        file.write(json.dumps(config, indent=1).encode())
    return folder


def find_codec_family(model_type: str, where: object) -> CodecFamily:
    """The published codec of a model_type."""
    if model_type not in CODEC_FAMILIES:
        raise BadFile(
            _(
                "{where}: {model_type!r} is no codec; {nearest}",
                where=where,
                model_type=model_type[:60],
                nearest=nearest(model_type, [*CODEC_FAMILIES, CODEC_TYPE]),
            )
        )
    return CODEC_FAMILIES[model_type]


def _load_published(where: Path, values: dict[str, object], checkpoint: LazyStateDict) -> Codec:
    """A codec in a published layout; a file may lack the tensors that the family calls optional."""
    family = find_codec_family(str(values.get("model_type")), where)
    config = HFConfig(values, where)
    config.ignore("model_type", "architectures")
    spec = family.read_spec(config)
    config.refuse_unread()
    codec = _on_meta(spec, where)
    matches = filter(None, map(family.names.match_checkpoint, checkpoint))
    present = {name for match in matches for name in match.param_names()}
    params = {
        name: parameter
        for name, parameter in codec.named_parameters()
        if name in present or not any(fnmatchcase(name, pattern) for pattern in family.optional)
    }
    tensors = family.names.load(checkpoint, params)
    _allocate(codec)
    with torch.no_grad():
        for name, parameter in codec.named_parameters():
            if name in params:
                parameter.copy_(tensors[name])
            else:
                parameter.zero_()
    return codec


def _native_spec(config: Mapping[str, object], where: object) -> CodecSpec:
    spec = from_dict(config.get("spec"))
    if not isinstance(spec, CodecSpec):
        raise BadFile(_("{where}: spec must be a codec; the file was changed or damaged", where=where))
    return spec


def _on_meta(spec: CodecSpec, where: object) -> Codec:
    """The shapes of a codec; one that does not fit into memory is refused before anything is allocated."""
    try:
        codec = spec.on_meta()
    except RuntimeError as error:
        raise BadSetting(
            _("{where}: a codec of these sizes cannot be built: {error}", where=where, error=error)
        ) from None
    size = sum(p.numel() * p.element_size() for p in codec.parameters())
    if size > memory_limit():
        raise Unavailable(
            _(
                "{where}: the codec needs {needed:,.1f} GB, more than this machine has; choose a smaller one",
                where=where,
                needed=size / 1e9,
            )
        )
    return codec


def _allocate(codec: nn.Module) -> None:
    """Memory for a module that was built on the meta device."""
    codec.to_empty(device="cpu")
