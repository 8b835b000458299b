"""GGUF files in: settings, weights, tokenizer and chat template from one file. Quantised weights stay as they are.

GGUF keeps the rotary rows of LLaMA's queries and keys as neighbouring pairs, ours are two halves: `paired` turns them.
With the wrong order a model still writes fluent text, only worse; the likelihood of a known text tells.
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

from headwater.core import Model, NoScaling, PerFrequency, RMSNorm, Rotary, Transformer
from headwater.core.init import constants
from headwater.errors import BadFile, BadSetting, Unavailable, nearest
from headwater.families.export import Misfit, as_public, differences, is_described
from headwater.families.family import FAMILIES
from headwater.families.folder import Loaded, ModelWeights, sizes, ties, value_of
from headwater.fast.packed import PACKED, PackedLinear, PackedTable
from headwater.parts import swap
from headwater.text.gguf_text import from_gguf, to_gguf
from headwater.weights.files import shown
from headwater.weights.finite import check_finite, check_scales
from headwater.weights.gguf import GgufFile
from headwater.weights.gguf_write import write_gguf
from headwater.weights.names import Names, table
from headwater.weights.room import check_room
from headwater.weights.settings import Settings

BODY = """
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
PAIRED = table(BODY.format(q=": paired by heads", k=": paired by kv_heads"))
HALVED = table(BODY.format(q="", k=""))

# GGUF's word for a setting, and config.json's.
SETTINGS = {
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
SILENT = {"vocab_size", "rope.dimension_count", "attention.value_length", "rope.scaling.type", "rope.scaling.factor",
          "rope.scaling.original_context_length", "rope.scaling.finetuned"}  # fmt: skip

ROLES = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}


PROBE = "The quick brown fox: 1234 → 天地玄黄，naïve\n\tx = y\n"  # a text that a tokenizer must still cut as before


@dataclass(frozen=True)
class Layout:
    model_type: str
    names: Names


LAYOUTS = {"llama": Layout("llama", PAIRED), "qwen2": Layout("qwen2", HALVED), "qwen3": Layout("qwen3", HALVED)}


def load_gguf(path: str | Path) -> Loaded:
    file = GgufFile(path)
    layout, config, spec = plan_of(file)
    model = build(spec, layout.names, file)
    tokenizer = from_gguf(file.metadata, path)
    return Loaded(model, tokenizer, config, Path(path), "language")


def plan_of(file: GgufFile) -> tuple[Layout, dict[str, Any], Model]:
    """What the header alone tells: how the tensors are laid out, the settings as a config.json, and the spec."""
    path = file.where
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in LAYOUTS:
        said = nearest(architecture, LAYOUTS)
        raise BadFile(f"{path}: the architecture {architecture[:60]!r} is not read from GGUF here; {said}")
    layout = LAYOUTS[architecture]
    config = config_of(file, architecture, layout.model_type)
    c = Settings(dict(config), path)
    spec = FAMILIES[layout.model_type].read(c, "language")
    c.done()
    return layout, config, swap(spec, Rotary, lambda rotary: _factors(rotary, file))


def config_of(file: GgufFile, architecture: str, model_type: str) -> dict[str, Any]:
    """The metadata as a config.json. A setting of the architecture that nobody reads is refused by name."""
    config: dict[str, Any] = {"model_type": model_type}
    for key, value in file.metadata.items():
        head, _, name = key.partition(".")
        if head != architecture or name in SILENT:
            continue
        if name not in SETTINGS:
            raise BadFile(f"{file.where}: the setting {key[:80]!r} is not known here and may change what it computes")
        config[SETTINGS[name]] = value
    _check_numbers(file, architecture)
    _check_scaling(file, architecture)
    if "token_embd.weight" not in file.stored:
        raise BadFile(f"{file.where}: it has no token_embd.weight, and so no tokens; is it a whole model?")
    config["vocab_size"] = file.stored["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.stored
    for role, key in ROLES.items():
        if f"tokenizer.ggml.{role}_token_id" in file.metadata:
            config[key] = file.metadata[f"tokenizer.ggml.{role}_token_id"]
    if config.get("head_dim") == config.get("hidden_size", 0) // max(1, config.get("num_attention_heads") or 1):
        del config["head_dim"]
    return config


def _check_numbers(file: GgufFile, architecture: str) -> None:
    """Before anything is reckoned with them. Some programs write one number a layer: such models are not read here."""
    numbers = (*SETTINGS, "rope.dimension_count", "rope.scaling.factor")
    for key in (*(f"{architecture}.{name}" for name in numbers), *(f"tokenizer.ggml.{r}_token_id" for r in ROLES)):
        value = file.metadata.get(key, 0)
        if type(value) not in (int, float):
            raise BadFile(f"{file.where}: {key} must be a number, got {shown(value)}; it is no model that is read here")


def _check_scaling(file: GgufFile, architecture: str) -> None:
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind not in ("none", "linear") or file.metadata.get(f"{architecture}.rope.scaling.factor", 1) not in (0, 1):
        raise BadFile(f"{file.where}: rope scaling {kind!r} in a GGUF file is not read here; load the public folder")
    turned = file.metadata.get(f"{architecture}.rope.dimension_count")
    heads, width = (file.metadata.get(f"{architecture}.{k}") for k in ("attention.head_count", "embedding_length"))
    whole = file.metadata.get(f"{architecture}.attention.key_length") or (heads and width and width // heads)
    if turned not in (None, whole):
        raise BadFile(f"{file.where}: rope.dimension_count must be the head width {whole}, got {turned}")


def _factors(rotary: Rotary, file: GgufFile) -> Rotary:
    """LLaMA 3.1 and later: the scaling of each frequency is in the file as a tensor."""
    if "rope_freqs.weight" not in file:
        return rotary
    factors = file["rope_freqs.weight"].float()
    check_finite(factors, "rope_freqs.weight", file.where)
    return replace(rotary, scaling=PerFrequency(tuple(factors.flatten().tolist())))


def build(spec: Model, names: Names, file: GgufFile) -> Transformer:
    """The model of a spec with the file's tensors; every name and shape is checked before the first is put in place."""
    check_room(spec, len(file), file.where)
    sources = {ours: theirs for theirs in file if (found := names.find_theirs(theirs)) for ours in found.ours()}
    model = replace(spec, tied=()).skeleton()
    model.spec = spec = replace(spec, tied=ties(model, spec.tied, file, sources))
    model.tie()
    wanted, by = dict(model.named_parameters()), sizes(spec)
    tied = {f"{path}.weight": f"{home}.weight" for path, home in spec.tied}
    reading = names.read(file, wanted, tied=tied, spare=(), **by)
    for name in wanted:
        path, _, last = name.rpartition(".")
        packed = _packed(model.get_submodule(path), name, names, file, by) if last == "weight" else None
        if packed is None:
            setattr(model.get_submodule(path), last, nn.Parameter(value_of(reading, name)))
        else:
            _put(model, path, packed)
    for path, home in spec.tied:
        source = model.get_submodule(home)
        if isinstance(source, PackedTable):  # two modules with the same blocks
            _put(model, path, PackedLinear(source.blocks, source.kind))
        else:
            model.get_submodule(path).weight = source.weight
    constants(model)
    return model.eval()


def _packed(module: Any, name: str, names: Names, file: GgufFile, by: Mapping[str, int]) -> nn.Module | None:
    found = names.find_ours(name)
    assert found is not None
    kind = file.stored[found.theirs()].kind
    if kind.name not in PACKED or not isinstance(module, nn.Linear | nn.Embedding):
        return None
    blocks = file.blocks(found.theirs())
    check_scales(blocks, kind, name, file.where)
    rows = found.row.steps.read(blocks, 1, by) or []
    return PackedTable(rows[0], kind) if isinstance(module, nn.Embedding) else PackedLinear(rows[0], kind)


def gguf_form(loaded: Loaded) -> Loaded:
    """The model as one of the families that GGUF has a name for, or a fault that says what they lack."""
    if loaded.config.get("model_type") in LAYOUTS and loaded.head == "language" and is_described(loaded):
        return loaded
    found = as_public(loaded, list(LAYOUTS))
    if isinstance(found, Misfit):
        other = found.difference
        raise BadSetting(
            f"a GGUF file is written of {', '.join(LAYOUTS)} language models: {found.name} has {other.theirs} as "
            f"{other.where}, this model has {other.ours}; save it as a folder"
        )
    return found.model


def save_gguf(loaded: Loaded, path: str | Path, kind: str = "F16") -> Path:
    """Write a model of LLaMA's kin as one GGUF file: F32, F16 or Q8_0, with its tokenizer and chat template inside.

    The file is written aside, read back and compared; then it is put in place.
    """
    path = Path(path)
    if path.exists():
        raise BadFile(f"{path}: it must be a new file, there is one already; choose another name")
    loaded = gguf_form(loaded)
    if loaded.tokenizer is None:
        raise BadSetting("a GGUF file holds the model's tokenizer, this model has none; save it as a folder")
    if not isinstance(_rotary(loaded).scaling, NoScaling):
        raise BadSetting("a GGUF file is written without rope scaling, this model has some; save it as a folder")
    model_type = loaded.config["model_type"]
    tensors = LAYOUTS[model_type].names.write(ModelWeights(loaded.model), **sizes(loaded.spec))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as aside:
        made = Path(aside) / path.name
        write_gguf(made, {**_metadata(loaded, model_type), **to_gguf(loaded.tokenizer)}, tensors, kind)
        _check_written(loaded, made, path)
        os.replace(made, path)
    return path


def _check_written(loaded: Loaded, made: Path, path: Path) -> None:
    """A GGUF file has no word for some settings of its families (another activation, a bias): those are refused."""
    try:
        again = load_gguf(made)
    except BadFile:
        raise BadSetting(
            f"{path}: a GGUF file of {loaded.config['model_type']} has no room for all tensors of this model, such as "
            "biases; save it as a folder"
        ) from None
    ours = swap(loaded.spec, RMSNorm, lambda norm: replace(norm, eps=_stored(norm.eps)))
    ours = swap(ours, Rotary, lambda rotary: replace(rotary, theta=_stored(rotary.theta)))
    if found := differences(ours, replace(again.spec, tied=ours.tied)):
        other = found[0]
        raise BadSetting(
            f"{path}: a GGUF file of {loaded.config['model_type']} has {other.theirs} as {other.where}, this model "
            f"has {other.ours}; save it as a folder"
        )
    if again.tokenizer.encode(PROBE) != loaded.tokenizer.encode(PROBE):
        raise Unavailable(f"{path}: the tokenizer reads back changed from a GGUF file; save the model as a folder")


def _stored(number: float) -> float:
    """A number as GGUF keeps it, in 32 bits."""
    return float(torch.tensor(number, dtype=torch.float32))


def _rotary(loaded: Loaded) -> Rotary:
    stack: Any = loaded.spec.decoder
    found: Rotary = stack.layers[0].branches[0].layer.position
    return found


def _metadata(loaded: Loaded, model_type: str) -> dict[str, Any]:
    """config.json as GGUF's settings."""
    stack: Any = loaded.spec.decoder
    config = loaded.config
    attn, rotary = stack.layers[0].branches[0].layer, stack.layers[0].branches[0].layer.position
    told = {
        "rope_theta": rotary.theta,
        "head_dim": attn.head_dim or stack.d_model // attn.heads,
        "sliding_window": None,
    }
    found = {theirs: config.get(ours, told.get(ours)) for theirs, ours in SETTINGS.items()}
    found["attention.head_count_kv"] = attn.kv_heads or attn.heads
    found["rope.freq_base"], found["attention.key_length"] = rotary.theta, told["head_dim"]
    found["rope.dimension_count"], found["vocab_size"] = told["head_dim"], config["vocab_size"]
    name = str(config.get("_name_or_path") or loaded.where.name)
    general = {"general.architecture": model_type, "general.name": name, "general.file_type": 1}
    return {**general, **{f"{model_type}.{key}": value for key, value in found.items() if value is not None}}


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
