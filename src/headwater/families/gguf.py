"""Load and save GGUF models: config, weights, tokenizer and chat template in one file; weights stay quantized.

GGUF stores the RoPE rows of LLaMA's queries and keys as interleaved pairs, this package as two halves: `deinterleave`
converts them. In the wrong order a model still writes fluent text; only its perplexity shows the mistake.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.core import Model, NoScaling, RMSNorm, Rotary, Transformer
from headwater.core.init import init_buffers
from headwater.errors import BadFile, BadSetting, Unavailable, nearest
from headwater.families.export import FamilyMismatch, config_matches_spec, export_to_family, spec_differences
from headwater.families.hf_folder import (
    LoadedModel,
    ModelWeights,
    detect_ties,
    load_tensor,
    param_sources,
    transform_sizes,
)
from headwater.families.registry import FAMILIES
from headwater.i18n import _
from headwater.io.files import quote
from headwater.parts import swap
from headwater.quantization.layers import BLOCK_FORMATS, QuantizedEmbedding, QuantizedLinear, replace_module
from headwater.text.loaders.gguf import tokenizer_from_gguf, tokenizer_to_gguf
from headwater.variants.rope_scaling import PerFrequencyScaling
from headwater.weights.checks import check_finite, check_finite_scales, check_memory
from headwater.weights.gguf import GgufFile, write_gguf
from headwater.weights.hf_config import HFConfig
from headwater.weights.name_map import NameMap, name_map

NAME_TEMPLATE = """
    token_embd              decoder.embed.tokens
    blk.{{i}}.attn_norm     decoder.layers.{{i}}.self_attn_norm
    blk.{{i}}.attn_q        decoder.layers.{{i}}.self_attn.q       {q}
    blk.{{i}}.attn_k        decoder.layers.{{i}}.self_attn.k       {k}
    blk.{{i}}.attn_v        decoder.layers.{{i}}.self_attn.v
    blk.{{i}}.attn_output   decoder.layers.{{i}}.self_attn.out
    blk.{{i}}.attn_q_norm   decoder.layers.{{i}}.self_attn.q_norm
    blk.{{i}}.attn_k_norm   decoder.layers.{{i}}.self_attn.k_norm
    blk.{{i}}.ffn_norm      decoder.layers.{{i}}.ffn_norm
    blk.{{i}}.ffn_gate      decoder.layers.{{i}}.ffn.gate
    blk.{{i}}.ffn_up        decoder.layers.{{i}}.ffn.up
    blk.{{i}}.ffn_down      decoder.layers.{{i}}.ffn.down
    output_norm             decoder.final_norm
    output                  head.out
    rope_freqs              -
"""
INTERLEAVED_ROPE_NAMES = name_map(NAME_TEMPLATE.format(q=": deinterleave by heads", k=": deinterleave by kv_heads"))
HALVES_ROPE_NAMES = name_map(NAME_TEMPLATE.format(q="", k=""))

# Metadata keys of GGUF (after the architecture), and the keys of config.json they stand for.
CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}
IGNORED_GGUF_KEYS = {
    "vocab_size",
    "rope.dimension_count",
    "attention.value_length",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}

TOKEN_ID_KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}

# A text that the tokenizer must encode as before, after it was written and loaded.
PROBE_TEXT = "The quick brown fox: 1234 → 天地玄黄，naïve\n\tx = y\n"


@dataclass(frozen=True)
class GgufArchitecture:
    """An architecture of GGUF: the family it is loaded as, and its tensor names."""

    model_type: str
    names: NameMap


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", INTERLEAVED_ROPE_NAMES),
    "qwen2": GgufArchitecture("qwen2", HALVES_ROPE_NAMES),
    "qwen3": GgufArchitecture("qwen3", HALVES_ROPE_NAMES),
}


def load_gguf(path: str | Path) -> LoadedModel:
    """Load the model and the tokenizer of a GGUF file."""
    file = GgufFile(path)
    architecture, config, spec = read_gguf_plan(file)
    model = build_gguf_model(spec, architecture.names, file)
    tokenizer = tokenizer_from_gguf(file.metadata, path)
    return LoadedModel(model, tokenizer, config, Path(path), "language")


def read_gguf_plan(file: GgufFile) -> tuple[GgufArchitecture, dict[str, Any], Model]:
    """The architecture, the equivalent config.json and the spec, from the metadata; no weight is read."""
    path = file.where
    name = str(file.metadata.get("general.architecture"))
    if name not in GGUF_ARCHITECTURES:
        raise BadFile(
            _(
                "{path}: the GGUF architecture {architecture!r} is not supported; {nearest}",
                path=path,
                architecture=name[:60],
                nearest=nearest(name, GGUF_ARCHITECTURES),
            )
        )
    architecture = GGUF_ARCHITECTURES[name]
    config = gguf_to_hf_config(file, name, architecture.model_type)
    hf_config = HFConfig(dict(config), path)
    spec = FAMILIES[architecture.model_type].read_spec(hf_config, "language")
    hf_config.refuse_unread()
    return architecture, config, swap(spec, Rotary, lambda rotary: _with_rope_factors(rotary, file))


def gguf_to_hf_config(file: GgufFile, architecture: str, model_type: str) -> dict[str, Any]:
    """The metadata as a config.json. A key of the architecture that is not known is rejected by name."""
    config: dict[str, Any] = {"model_type": model_type}
    for key, value in file.metadata.items():
        prefix, _unused, name = key.partition(".")
        if prefix != architecture or name in IGNORED_GGUF_KEYS:
            continue
        if name not in CONFIG_KEYS:
            raise BadFile(
                _(
                    "{where}: the setting {key!r} is not known and may change what the model computes",
                    where=file.where,
                    key=key[:80],
                )
            )
        config[CONFIG_KEYS[name]] = value
    _check_numbers(file, architecture)
    _check_rope_scaling(file, architecture)

    # what the tensors and the tokenizer determine
    if "token_embd.weight" not in file.infos:
        raise BadFile(_("{where}: token_embd.weight is missing; is it a complete model?", where=file.where))
    config["vocab_size"] = file.infos["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.infos
    for role, key in TOKEN_ID_KEYS.items():
        if f"tokenizer.ggml.{role}_token_id" in file.metadata:
            config[key] = file.metadata[f"tokenizer.ggml.{role}_token_id"]
    default_head_dim = config.get("hidden_size", 0) // max(1, config.get("num_attention_heads") or 1)
    if config.get("head_dim") == default_head_dim:
        del config["head_dim"]
    return config


def _check_numbers(file: GgufFile, architecture: str) -> None:
    """Numeric keys must hold one number. Some programs write one number per layer: such models are not supported."""
    names = (*CONFIG_KEYS, "rope.dimension_count", "rope.scaling.factor")
    keys = [f"{architecture}.{name}" for name in names]
    keys += [f"tokenizer.ggml.{role}_token_id" for role in TOKEN_ID_KEYS]
    for key in keys:
        value = file.metadata.get(key, 0)
        if type(value) not in (int, float):
            raise BadFile(
                _(
                    "{where}: {key} must be a number, got {value}; such a model is not supported",
                    where=file.where,
                    key=key,
                    value=quote(value),
                )
            )


def _check_rope_scaling(file: GgufFile, architecture: str) -> None:
    """Refuse RoPE scaling by a factor, and RoPE on a part of each head."""
    scaling_type = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = file.metadata.get(f"{architecture}.rope.scaling.factor", 1)
    if scaling_type not in ("none", "linear") or factor not in (0, 1):
        raise BadFile(
            _(
                "{where}: rope scaling {kind!r} in a GGUF file is not supported; load the Hugging Face folder instead",
                where=file.where,
                kind=scaling_type,
            )
        )
    rotary_dim = file.metadata.get(f"{architecture}.rope.dimension_count")
    heads = file.metadata.get(f"{architecture}.attention.head_count")
    d_model = file.metadata.get(f"{architecture}.embedding_length")
    head_dim = file.metadata.get(f"{architecture}.attention.key_length") or (heads and d_model and d_model // heads)
    if rotary_dim not in (None, head_dim):
        raise BadFile(
            _(
                "{where}: rope.dimension_count must be the head width {head_dim}, got {rotary_dim}",
                where=file.where,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
            )
        )


def _with_rope_factors(rotary: Rotary, file: GgufFile) -> Rotary:
    """RoPE scaling of LLaMA 3.1 and later: one factor per frequency, stored as a tensor."""
    if "rope_freqs.weight" not in file:
        return rotary
    factors = file["rope_freqs.weight"].float()
    check_finite(factors, "rope_freqs.weight", file.where)
    return replace(rotary, scaling=PerFrequencyScaling(tuple(factors.flatten().tolist())))


def build_gguf_model(spec: Model, names: NameMap, file: GgufFile) -> Transformer:
    """Build a model with the tensors of a GGUF file; every name and shape is checked before the first is read."""
    check_memory(spec, len(file), file.where)

    # A model on the meta device, its weights tied as in the file.
    model = replace(spec, tied=()).on_meta()
    spec = replace(spec, tied=detect_ties(model, spec.tied, file, param_sources(names, file)))
    model.spec = spec
    model.tie_weights()

    # The file under parameter names, every name and shape checked.
    params = dict(model.named_parameters())
    sizes = transform_sizes(spec)
    tied = {f"{path}.weight": f"{owner}.weight" for path, owner in spec.tied}
    tensors = names.load(file, params, tied=tied, ignored_prefixes=(), **sizes)

    # Parameters, or quantized layers in place of modules.
    for name in params:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        quantized = _quantized_layer(module, name, names, file, sizes) if attribute == "weight" else None
        if quantized is None:
            setattr(module, attribute, nn.Parameter(load_tensor(tensors, name)))
        else:
            replace_module(model, path, quantized)
    for path, owner in spec.tied:
        source: Any = model.get_submodule(owner)
        if isinstance(source, QuantizedEmbedding):  # two modules with the same blocks
            replace_module(model, path, QuantizedLinear(source.blocks, source.block_format))
        else:
            model.get_submodule(path).weight = source.weight
    init_buffers(model)
    return model.eval()


def _quantized_layer(
    module: nn.Module, name: str, names: NameMap, file: GgufFile, sizes: Mapping[str, int]
) -> nn.Module | None:
    """A quantized layer with the blocks of the file; None where the weight is not quantized, or in another format."""
    match = names.match_param(name)
    assert match is not None
    ggml_type = file.infos[match.checkpoint_name()].ggml_type
    if ggml_type.name not in BLOCK_FORMATS or not isinstance(module, nn.Linear | nn.Embedding):
        return None
    blocks = file.quantized_blocks(match.checkpoint_name())
    check_finite_scales(blocks, ggml_type, name, file.where)
    (rows,) = match.rule.transforms.forward(blocks, 1, sizes) or []
    if isinstance(module, nn.Embedding):
        return QuantizedEmbedding(rows, ggml_type)
    return QuantizedLinear(rows, ggml_type)


# --------------------------------------------------------------------------------------------------------------- saving


def to_gguf_family(loaded: LoadedModel) -> LoadedModel:
    """The model as a family that has a GGUF architecture; BadSetting with the reason where there is none."""
    if (
        loaded.config.get("model_type") in GGUF_ARCHITECTURES
        and loaded.head == "language"
        and config_matches_spec(loaded)
    ):
        return loaded
    exported = export_to_family(loaded, list(GGUF_ARCHITECTURES))
    if isinstance(exported, FamilyMismatch):
        difference = exported.difference
        raise BadSetting(
            _(
                "a GGUF file can hold only {architectures} language models: {family} has {family_value} as "
                "{where}, this model has {model_value}; save it as a folder",
                architectures=", ".join(GGUF_ARCHITECTURES),
                family=exported.family,
                family_value=difference.family_value,
                where=difference.path,
                model_value=difference.model_value,
            )
        )
    return exported.model


def save_gguf(loaded: LoadedModel, path: str | Path, outtype: str = "F16") -> Path:
    """Save a LLaMA-like model as one GGUF file: F32, F16 or Q8_0, with its tokenizer and chat template.

    The file is written to a temporary folder, loaded, compared, and then moved.
    """
    path = Path(path)
    if path.exists():
        raise BadFile(_("{path}: it must be a new file, it exists already; choose another name", path=path))
    loaded = to_gguf_family(loaded)
    if loaded.tokenizer is None:
        raise BadSetting(_("a GGUF file holds the model's tokenizer, this model has none; save it as a folder"))
    if not isinstance(_rotary_spec(loaded).scaling, NoScaling):
        raise BadSetting(_("a GGUF file is written without rope scaling, this model has some; save it as a folder"))
    model_type = loaded.config["model_type"]
    tensors = GGUF_ARCHITECTURES[model_type].names.export(ModelWeights(loaded.model), **transform_sizes(loaded.spec))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temp_dir:
        temp_path = Path(temp_dir) / path.name
        metadata = {**_gguf_metadata(loaded, model_type), **tokenizer_to_gguf(loaded.tokenizer)}
        write_gguf(temp_path, metadata, tensors, outtype)
        _check_written(loaded, temp_path, path)
        os.replace(temp_path, path)
    return path


def _check_written(loaded: LoadedModel, temp_path: Path, path: Path) -> None:
    """Check that a GGUF file reads back as the model it was written from.

    GGUF has no keys for some settings of its families (another activation, a bias): those are rejected.
    """
    try:
        reloaded = load_gguf(temp_path)
    except BadFile:
        raise BadSetting(
            _(
                "{path}: a GGUF file of {model_type} cannot hold all tensors of this model, such as biases; "
                "save it as a folder",
                path=path,
                model_type=loaded.config["model_type"],
            )
        ) from None

    # settings; GGUF stores numbers in 32 bits
    spec = swap(loaded.spec, RMSNorm, lambda norm: replace(norm, eps=_round_to_float32(norm.eps)))
    spec = swap(spec, Rotary, lambda rotary: replace(rotary, theta=_round_to_float32(rotary.theta)))
    if differences := spec_differences(spec, replace(reloaded.spec, tied=spec.tied)):
        difference = differences[0]
        raise BadSetting(
            _(
                "{path}: a GGUF file of {model_type} has {family_value} as {where}, this model has {model_value}; "
                "save it as a folder",
                path=path,
                model_type=loaded.config["model_type"],
                family_value=difference.family_value,
                where=difference.path,
                model_value=difference.model_value,
            )
        )

    # tokenizer
    assert loaded.tokenizer is not None and reloaded.tokenizer is not None
    if reloaded.tokenizer.encode(PROBE_TEXT) != loaded.tokenizer.encode(PROBE_TEXT):
        raise Unavailable(
            _("{path}: the tokenizer changed when read back from GGUF; save the model as a folder", path=path)
        )


def _round_to_float32(number: float) -> float:
    """A number as GGUF stores it, in 32 bits."""
    return float(torch.tensor(number, dtype=torch.float32))


def _rotary_spec(loaded: LoadedModel) -> Rotary:
    stack: Any = loaded.spec.decoder
    rotary: Rotary = stack.layers[0].branches[0].layer.position
    return rotary


def _gguf_metadata(loaded: LoadedModel, model_type: str) -> dict[str, Any]:
    """The metadata of a GGUF file, from config.json and the spec."""
    stack: Any = loaded.spec.decoder
    config = loaded.config
    attn = stack.layers[0].branches[0].layer
    head_dim = attn.head_dim or stack.d_model // attn.heads

    sizes = {gguf_key: config.get(hf_key) for gguf_key, hf_key in CONFIG_KEYS.items()}
    sizes["attention.head_count_kv"] = attn.kv_heads or attn.heads
    sizes["attention.key_length"] = head_dim
    sizes["rope.freq_base"] = attn.position.theta
    sizes["rope.dimension_count"] = head_dim
    sizes["vocab_size"] = config["vocab_size"]

    name = str(config.get("_name_or_path") or loaded.path.name)
    general = {"general.architecture": model_type, "general.name": name, "general.file_type": 1}
    return {**general, **{f"{model_type}.{key}": value for key, value in sizes.items() if value is not None}}
