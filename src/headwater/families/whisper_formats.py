"""Whisper's other file formats: CTranslate2 folders, ggml files (whisper.cpp) and OpenAI's checkpoints.

Each is given the tensor names and the config.json of the Hugging Face layout, and then read as such a folder is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadFile
from headwater.families.config_writers import ConfigDict
from headwater.families.hf_folder import LoadedModel, build_with_weights
from headwater.families.registry import find_family
from headwater.i18n import _
from headwater.io.files import quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.text.load import load_tokenizer
from headwater.weights.ctranslate2 import CTranslate2File, read_ctranslate2
from headwater.weights.hf_config import MAX_CONFIG_BYTES, HFConfig
from headwater.weights.safetensors import LazyStateDict

CTRANSLATE2_WEIGHTS = "model.bin"
MAX_LAYERS = 256


class NamedTensors(LazyStateDict):
    """Tensors by name, with the file they come from."""

    def __init__(self, tensors: Mapping[str, Tensor], where: object) -> None:
        self.where = where
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def meta_tensor(self, name: str) -> Tensor:
        return self._tensors[name].to("meta")


def build_whisper(tensors: Mapping[str, Tensor], heads: tuple[int, int], where: object) -> tuple[Any, ConfigDict]:
    """The model of tensors in the Hugging Face layout, and its config.json. heads: of encoder and decoder."""
    config = config_from_shapes(tensors, heads, where)
    family = find_family("whisper")
    reader = HFConfig(dict(config), where)
    spec = family.read_spec(reader, "language")
    reader.refuse_unread()
    return build_with_weights(spec, family, "language", NamedTensors(tensors, where)), config


def config_from_shapes(tensors: Mapping[str, Tensor], heads: tuple[int, int], where: object) -> ConfigDict:
    """config.json from the shapes of the tensors."""

    def shape(name: str, dims: int) -> torch.Size:
        if name not in tensors or tensors[name].dim() != dims or not tensors[name].numel():
            raise BadFile(
                _("{where}: it must hold the tensor {name} of {dims} dimensions", where=where, name=name, dims=dims)
            )
        return tensors[name].shape

    def num_layers(side: str) -> int:
        pattern = re.compile(rf"model\.{side}\.layers\.\d{{1,3}}\.fc1\.weight")
        return sum(pattern.fullmatch(name) is not None for name in tensors)

    d_model, mels, _width = shape("model.encoder.conv1.weight", 3)
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": shape("model.decoder.embed_tokens.weight", 2)[0],
        "d_model": d_model,
        "num_mel_bins": mels,
        "max_source_positions": shape("model.encoder.embed_positions.weight", 2)[0],
        "max_target_positions": shape("model.decoder.embed_positions.weight", 2)[0],
        "encoder_layers": num_layers("encoder"),
        "decoder_layers": num_layers("decoder"),
        "encoder_attention_heads": heads[0],
        "decoder_attention_heads": heads[1],
        "encoder_ffn_dim": shape("model.encoder.layers.0.fc1.weight", 2)[0],
        "decoder_ffn_dim": shape("model.decoder.layers.0.fc1.weight", 2)[0],
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }


# --------------------------------------------------------------------------------------------------- CTranslate2


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a CTranslate2 model."""
    return (folder / CTRANSLATE2_WEIGHTS).is_file() and not (folder / "pytorch_model.bin").exists()


def load_ctranslate2(folder: Path) -> LoadedModel:
    """The Whisper of a CTranslate2 folder: model.bin, config.json, tokenizer.json."""
    file = read_ctranslate2(folder / CTRANSLATE2_WEIGHTS, "WhisperSpec")
    heads = _ctranslate2_heads(file, "encoder"), _ctranslate2_heads(file, "decoder")
    model, config = build_whisper(ctranslate2_to_hf(file), heads, file.where)
    generation = _ctranslate2_generation(folder / "config.json")
    return LoadedModel(model, load_tokenizer(folder), config, folder, "language", generation_config=generation)


def _ctranslate2_heads(file: CTranslate2File, side: str) -> int:
    """The heads of a stack: as stored, or heads of 64 as every published size has them."""
    name = f"{side}/num_heads"
    width = f"{side}/layer_norm/gamma"
    if name in file and file[name].numel() == 1:
        return int(file[name])
    return max(1, file[width].numel() // 64) if width in file else 1


def _ctranslate2_generation(path: Path) -> dict[str, Any]:
    """generation_config.json from CTranslate2's config.json."""
    if not path.is_file():
        return {}
    config = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    names = {"alignment_heads": "alignment_heads", "suppress_ids": "suppress_tokens"}
    names["suppress_ids_begin"] = "begin_suppress_tokens"
    return {new: config[old] for old, new in names.items() if isinstance(config.get(old), list)}


_CT2_PARTS = {
    "self_attention/linear_0": "self_attn.{q_proj,k_proj,v_proj}",
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.{k_proj,v_proj}",
    "attention/linear_2": "encoder_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
_CT2_LAYER = re.compile(r"(encoder|decoder)/layer_(\d{1,3})/(.+)/(weight|bias|gamma|beta)")
_CT2_BODY = {"position_encodings/encodings": "embed_positions.weight", "embeddings/weight": "embed_tokens.weight"}
_CT2_SUFFIX = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def ctranslate2_to_hf(file: CTranslate2File) -> dict[str, Tensor]:
    """The variables under the names of the Hugging Face layout; q, k and v are split."""
    tensors: dict[str, Tensor] = {}
    for name in file:
        match = _CT2_LAYER.fullmatch(name)
        if match is not None and match[3] in _CT2_PARTS:
            stem = f"model.{match[1]}.layers.{int(match[2])}."
            tensors |= _split(file, name, stem, _CT2_PARTS[match[3]], _CT2_SUFFIX[match[4]])
            continue
        side, _slash, rest = name.partition("/")
        path, _slash, suffix = rest.rpartition("/")
        if rest in _CT2_BODY:
            tensors[f"model.{side}.{_CT2_BODY[rest]}"] = file[name]
        elif path in ("conv1", "conv2", "layer_norm") and suffix in _CT2_SUFFIX:
            tensors[f"model.{side}.{path}.{_CT2_SUFFIX[suffix]}"] = file[name]
    return tensors


def _split(file: CTranslate2File, name: str, stem: str, part: str, suffix: str) -> dict[str, Tensor]:
    """One tensor, or those that are stored in one; keys have no bias, so theirs must be zero."""
    tensor = file[name]
    head, brace, names = part.partition("{")
    if not brace:
        return {f"{stem}{part}.{suffix}": tensor}
    parts = names.removesuffix("}").split(",")
    if tensor.dim() == 0 or tensor.shape[0] % len(parts):
        raise BadFile(
            _("{where}: {name} must hold {count} matrices", where=file.where, name=quote(name), count=len(parts))
        )
    pieces = dict(zip(parts, tensor.chunk(len(parts)), strict=True))
    if suffix == "bias" and bool(pieces.pop("k_proj").any()):
        raise BadFile(
            _("{where}: the keys of Whisper have no bias, {name} has one", where=file.where, name=quote(name))
        )
    return {f"{stem}{head}{piece}.{suffix}": value for piece, value in pieces.items()}
