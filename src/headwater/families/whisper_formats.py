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

from headwater.audio.mel import mel_filters
from headwater.errors import BadFile, BadSetting
from headwater.families.config_writers import ConfigDict
from headwater.families.hf_folder import LoadedModel, ModelWeights, build_with_weights, transform_sizes
from headwater.families.registry import find_family
from headwater.families.whisper import alignment_heads, whisper_config
from headwater.i18n import _
from headwater.io.files import quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.text.load import load_tokenizer
from headwater.text.loaders.ranks import ranked_spec
from headwater.text.tokenizer import Tokenizer
from headwater.weights.ctranslate2 import CTranslate2File, read_ctranslate2
from headwater.weights.ggml import GgmlFile, write_ggml
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


# ------------------------------------------------------------------------------------ OpenAI's names; ggml files

_OPENAI_PARTS = {
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.out": "self_attn.out_proj",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn.query": "encoder_attn.q_proj",
    "cross_attn.key": "encoder_attn.k_proj",
    "cross_attn.value": "encoder_attn.v_proj",
    "cross_attn.out": "encoder_attn.out_proj",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
}
_HF_PARTS = {new: old for old, new in _OPENAI_PARTS.items()}
_OPENAI_BODY = {
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "decoder.positional_embedding": "model.decoder.embed_positions.weight",
    "decoder.token_embedding.weight": "model.decoder.embed_tokens.weight",
}
_HF_BODY = {new: old for old, new in _OPENAI_BODY.items()}
_OPENAI_LAYER = re.compile(r"(encoder|decoder)\.blocks\.(\d{1,3})\.(.+)\.(weight|bias)")
_HF_LAYER = re.compile(r"model\.(encoder|decoder)\.layers\.(\d{1,3})\.(.+)\.(weight|bias)")
_OPENAI_NORMS = (("encoder.ln_post.", "model.encoder.layer_norm."), ("decoder.ln.", "model.decoder.layer_norm."))
LANGUAGES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
STAMPS = 1501


def openai_to_hf(name: str) -> str:
    """The name of a tensor of OpenAI's checkpoints in the Hugging Face layout."""
    match = _OPENAI_LAYER.fullmatch(name)
    if match is not None and match[3] in _OPENAI_PARTS:
        return f"model.{match[1]}.layers.{int(match[2])}.{_OPENAI_PARTS[match[3]]}.{match[4]}"
    for old, new in _OPENAI_NORMS:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return _OPENAI_BODY.get(name, f"model.{name}")


def hf_to_openai(name: str) -> str:
    """The inverse of openai_to_hf()."""
    match = _HF_LAYER.fullmatch(name)
    if match is not None and match[3] in _HF_PARTS:
        return f"{match[1]}.blocks.{int(match[2])}.{_HF_PARTS[match[3]]}.{match[4]}"
    for old, new in _OPENAI_NORMS:
        if name.startswith(new):
            return old + name.removeprefix(new)
    return _HF_BODY.get(name, name.removeprefix("model."))


def openai_configs(tensors: Mapping[str, Tensor], dims: Mapping[str, Any], where: object) -> dict[str, ConfigDict]:
    """config.json and generation_config.json of an OpenAI checkpoint, from the shapes of its tensors and its dims."""
    heads = [dims.get(name) for name in ("n_audio_head", "n_text_head")]
    if not all(type(head) is int and head > 0 for head in heads):
        raise BadFile(_("{folder}: the sizes in dims must be positive integers", folder=where))
    config = config_from_shapes(tensors, (int(str(heads[0])), int(str(heads[1]))), where)
    spec = find_family("whisper").read_spec(HFConfig(dict(config), where), "language")
    return {"config.json": config, "generation_config.json": {"alignment_heads": alignment_heads(spec)}}


def special_tokens(vocab: int, num_pieces: int) -> list[str]:
    """The special tokens that follow the pieces of a vocabulary of this size; the languages fill what is left."""
    after = ["translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"]
    num_languages = vocab - num_pieces - 2 - len(after) - STAMPS
    languages = LANGUAGES.split()[: max(0, num_languages)]
    stamps = [f"{n * 0.02:.2f}" for n in range(STAMPS)]
    return [f"<|{name}|>" for name in ("endoftext", "startoftranscript", *languages, *after, *stamps)]


def load_ggml(path: Path) -> LoadedModel:
    """The Whisper of a ggml file."""
    file = GgmlFile(path)
    tensors = {openai_to_hf(name): file[name] for name in file}
    for name in ("model.encoder.conv1.bias", "model.encoder.conv2.bias"):
        if name in tensors:
            tensors[name] = tensors[name].flatten()
    heads = max(1, file.sizes["audio_heads"]), max(1, file.sizes["text_heads"])
    model, config = build_whisper(tensors, heads, path)
    tokenizer = Tokenizer(ranked_spec(file.pieces, special_tokens(config["vocab_size"], len(file.pieces))), where=path)
    generation = {"alignment_heads": alignment_heads(model.spec)}
    return LoadedModel(model, tokenizer, config, path, "language", generation_config=generation)


def save_ggml(loaded: LoadedModel, path: Path) -> Path:
    """Write a Whisper as a ggml file; matrices are rounded to 16 bits."""
    config = whisper_config(loaded.spec)
    tokenizer = loaded.tokenizer
    end = None if tokenizer is None else tokenizer.token_to_id("<|endoftext|>")
    if config is None or tokenizer is None or end is None:
        raise BadSetting(_("{path}: only a Whisper with its tokenizer is written as a ggml file", path=path))
    family = find_family("whisper")
    names = family.body_names + family.head_names["hidden_states"]
    tensors = names.export(ModelWeights(loaded.model), **transform_sizes(loaded.spec))
    sizes = {
        "vocab": config["vocab_size"],
        "audio_positions": config["max_source_positions"],
        "audio_width": config["d_model"],
        "audio_heads": config["encoder_attention_heads"],
        "audio_layers": config["encoder_layers"],
        "text_positions": config["max_target_positions"],
        "text_width": config["d_model"],
        "text_heads": config["decoder_attention_heads"],
        "text_layers": config["decoder_layers"],
        "mels": config["num_mel_bins"],
        "type": 1,
    }
    pieces = [tokenizer.piece_bytes(token) for token in range(end)]
    openai = {hf_to_openai(name): tensors[name] for name in tensors if not name.startswith("proj_out")}
    write_ggml(path, sizes, mel_filters(config["num_mel_bins"]), pieces, openai)
    return path
