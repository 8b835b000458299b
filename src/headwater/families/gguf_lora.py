"""LoRA adapters as GGUF files, which llama.cpp and Ollama load beside a GGUF model (--lora).

    general.type = adapter, adapter.type = lora, adapter.lora.alpha
    blk.0.attn_q.weight.lora_a   A [r, in]
    blk.0.attn_q.weight.lora_b   B [out, r], its rows in the order of the weight in GGUF
    token_embd.weight.lora_a     Aᵀ [vocab, r], whose rows are looked up

The scale is alpha / r with one alpha for all tensors, so other scales are folded into B. DoRA, biases and a trained
head have no place in such a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.families.export import FamilyMismatch, config_matches_spec, match_family
from headwater.families.gguf import GGUF_ARCHITECTURES
from headwater.families.hf_folder import LoadedModel, transform_sizes
from headwater.families.peft_common import AdapterFile, changed_layers
from headwater.i18n import _
from headwater.io.files import quote
from headwater.tuning.base import DEFAULT_NAME, method_names, tuning_of
from headwater.tuning.embedding import LowRankTable, TunedEmbedding
from headwater.tuning.linear import TunedLinear
from headwater.tuning.lowrank import LoRA, LowRank, LowRankDirection
from headwater.weights.checks import check_finite
from headwater.weights.gguf import GgufFile, write_gguf

TOKEN_TABLE = "token_embd.weight"
SUFFIXES = {".lora_a": "lora_a", ".lora_b": "lora_b"}


def write_gguf_lora(loaded: LoadedModel, path: str | Path, name: str = DEFAULT_NAME) -> Path:
    """Write the LoRA of a model as a GGUF file in float32."""
    path = Path(path)
    if path.exists():
        raise BadFile(_("{path}: it must be a new file, it exists already; choose another name", path=path))
    architecture = gguf_architecture(loaded)
    changes = changed_layers(loaded, name, (TunedLinear, TunedEmbedding))
    tuning = tuning_of(loaded.model)
    methods = () if tuning is None else tuning.adapters[name]
    plain = all(
        isinstance(change, LowRank | LowRankTable) and not isinstance(change, LowRankDirection)
        for change in changes.values()
    )
    if not changes or not plain or not all(isinstance(method, LoRA) for method in methods):
        raise BadSetting(
            _(
                "a GGUF adapter holds LoRA alone, this one is {methods}; merge it, or export it as peft",
                methods=method_names(methods),
            )
        )
    if loaded.spec.tied and any(path in changes for pair in loaded.spec.tied for path in pair):
        raise BadSetting(_("a GGUF adapter cannot change an output layer and an embedding that are tied; merge it"))
    first = next(iter(changes.values()))
    alpha = first.scale * len(first.lora_a)
    metadata = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "general.name": name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(alpha),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(path, metadata, _gguf_tensors(loaded, architecture, changes, alpha), "F32")
    return path


def _gguf_tensors(
    loaded: LoadedModel, architecture: str, changes: Mapping[str, LowRank | LowRankTable], alpha: float
) -> dict[str, Tensor]:
    """A and B of every layer by their names in GGUF."""
    names = GGUF_ARCHITECTURES[architecture].names
    sizes = transform_sizes(loaded.spec)
    tensors: dict[str, Tensor] = {}
    for layer, change in changes.items():
        match = names.match_param(f"{layer}.weight")
        if match is None:
            raise BadSetting(_("{path} has no public name in {model_type}", path=layer, model_type=architecture))
        factor = change.scale * len(change.lora_a) / alpha
        b = match.rule.transforms.of_rows().inverse([change.lora_b.detach() * factor], sizes)
        a = change.lora_a.detach()
        tensors[f"{match.checkpoint_name()}.lora_a"] = (a.t() if isinstance(change, LowRankTable) else a).contiguous()
        tensors[f"{match.checkpoint_name()}.lora_b"] = b.contiguous()
    return tensors


def gguf_architecture(loaded: LoadedModel) -> str:
    """The GGUF architecture of a model; BadSetting where there is none."""
    model_type = str(loaded.config.get("model_type"))
    if model_type in GGUF_ARCHITECTURES and config_matches_spec(loaded):
        return model_type
    match = match_family(loaded.spec, list(GGUF_ARCHITECTURES))
    if isinstance(match, FamilyMismatch) or match.rewrites:
        known = ", ".join(GGUF_ARCHITECTURES)
        raise BadSetting(
            _("a GGUF adapter needs a {known} language model, this is another one; export it as peft", known=known)
        )
    return match.family


def read_gguf_lora(loaded: LoadedModel, path: Path) -> AdapterFile:
    """The LoRA of a GGUF file for a model."""
    file = GgufFile(path)
    about = [str(file.metadata.get(key)) for key in ("general.type", "adapter.type", "general.architecture")]
    architecture = gguf_architecture(loaded)
    alpha = file.metadata.get("adapter.lora.alpha")
    if about != ["adapter", "lora", architecture] or not isinstance(alpha, int | float) or alpha <= 0:
        raise BadFile(
            _(
                "{path}: it must be a LoRA of {architecture} with an alpha, it is {about}",
                path=path,
                architecture=architecture,
                about=quote(about),
            )
        )
    names = GGUF_ARCHITECTURES[architecture].names
    sizes = transform_sizes(loaded.spec)
    methods: dict[int, list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for layer, parts in _layers(file).items():
        match = names.match_checkpoint(layer)
        a = parts.get("lora_a")
        b = parts.get("lora_b")
        if layer == TOKEN_TABLE and a is not None:
            a = a.t()
        if match is None or a is None or b is None or a.dim() != 2 or b.dim() != 2 or len(a) != b.shape[1]:
            raise BadFile(_("{where}: {name} must have A [r, in] and B [out, r]", where=path, name=quote(layer)))
        rows = match.rule.transforms.of_rows().forward(b, 1, sizes)
        if rows is None:
            raise BadFile(_("{where}: {name} has the wrong number of rows", where=path, name=quote(layer)))
        target = match.param_names()[0].removesuffix(".weight")
        methods.setdefault(len(a), []).append(target)
        tensors |= {f"{target}.lora_a": a.contiguous(), f"{target}.lora_b": rows[0].contiguous()}
    if not tensors:
        raise BadFile(_("{path}: it has no tensors; was it written completely?", path=path))
    return AdapterFile(tuple(LoRA(r, float(alpha), tuple(paths)) for r, paths in methods.items()), tensors)


def _layers(file: GgufFile) -> dict[str, dict[str, Any]]:
    """A and B by the name of the weight they change."""
    layers: dict[str, dict[str, Any]] = {}
    for name in file:
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            raise BadFile(_("{where}: the tensor {name} is not known", where=file.where, name=quote(name)))
        tensor = file[name].float()
        check_finite(tensor, name, file.where)
        layers.setdefault(name.removesuffix(suffix), {})[SUFFIXES[suffix]] = tensor
    return layers
