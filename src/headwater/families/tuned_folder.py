"""The folder of a tuned model: what its adapter learned, and the name and the fingerprint of the base; not the base.

    {"model_type": "headwater", "spec": {…}, "metadata": {…},
     "adapter": {"base": "smollm2", "base_path": "../…", "fingerprint": "…", "methods": [{"kind": "LoRA", …}]}}

adapter.safetensors has the learned tensors under the paths of the model, without the words base and changes.NAME.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from headwater.core import Model, Transformer
from headwater.errors import BadFile, Fault, NotFound
from headwater.families.hf_folder import LoadedModel, find_tokenizer
from headwater.families.new_head import replace_head
from headwater.families.whisper import cut_window, window_slots
from headwater.i18n import _
from headwater.io.files import atomic_write, quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.parts import from_dict, to_dict
from headwater.tuning.api import HasTransformer, adapter_tensors, base_fingerprint, set_adapter_tensors, tune
from headwater.tuning.base import DEFAULT_NAME, TuningMethod, tuning_of
from headwater.tuning.merge import can_merge, merge
from headwater.weights.checks import check_finite
from headwater.weights.native import MAX_CONFIG_BYTES, MODEL_TYPE, quantized_layers, read_native_spec
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

ADAPTER_NAME = "adapter.safetensors"

Loader = Callable[[str], LoadedModel]
LoadedBase = TypeVar("LoadedBase", bound=HasTransformer)


class TunedConfig(NamedTuple):
    """The config.json of a tuned model."""

    spec: Model
    metadata: dict[str, Any]
    base: str
    base_path: str  # of the base's folder, relative to this one; empty for a known name
    fingerprint: str
    methods: tuple[TuningMethod, ...]


def save_tuned_folder(
    folder: str | Path, model: Transformer, metadata: Mapping[str, Any], name: str = DEFAULT_NAME
) -> Path:
    """Write what an adapter has learned. The weights are written last, so that a folder in use stays valid."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tuning = tuning_of(model)
    assert tuning is not None, "the model is tuned"
    has_path = bool(tuning.base) and Path(tuning.base).exists()
    base_path = os.path.relpath(tuning.base, folder) if has_path else ""
    config = {
        "model_type": MODEL_TYPE,
        "spec": to_dict(model.spec),
        "metadata": dict(metadata),
        "adapter": {
            "base": tuning.base,
            "base_path": base_path,
            "fingerprint": tuning.fingerprint,
            "methods": [to_dict(method) for method in tuning.adapters[name]],
        },
    }
    text = json.dumps(config, indent=1, ensure_ascii=False).encode()
    if not (folder / "config.json").exists() or (folder / "config.json").read_bytes() != text:
        with atomic_write(folder / "config.json") as file:
            file.write(text)
    tensors = {path: tensor.contiguous() for path, tensor in adapter_tensors(model, name).items()}
    write_safetensors(folder / ADAPTER_NAME, tensors)
    return folder


def read_tuned_config(folder: str | Path) -> TunedConfig | None:
    """The config of a tuned model's folder; None for a folder with whole weights."""
    path = Path(folder) / "config.json"
    adapter = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path).get("adapter")
    if adapter is None:
        return None
    spec, metadata = read_native_spec(folder)
    is_valid = isinstance(adapter, dict) and isinstance(adapter.get("methods"), list)
    texts: list[Any] = [adapter.get(key) for key in ("base", "base_path", "fingerprint")] if is_valid else []
    methods = tuple(from_dict(method) for method in adapter["methods"]) if is_valid else ()
    if not texts or not all(isinstance(text, str) for text in texts) or not methods:
        raise BadFile(_("{path}: adapter must name its base, fingerprint and methods; the file was changed", path=path))
    if not all(isinstance(method, TuningMethod) for method in methods):
        raise BadFile(_("{path}: methods must be tuning methods; the file was changed", path=path))
    base, base_path, fingerprint = texts
    return TunedConfig(spec, metadata, base, base_path, fingerprint, methods)


def load_tuned_folder(folder: str | Path, load: Loader, *, merged: bool = True) -> LoadedModel:
    """Load a tuned model: its base first, then the adapter.

    load: headwater.load. merged: where the adapter can become weights of the base, and the base is not quantized, it
    does; the result is a model as any other.
    """
    folder = Path(folder)
    config = read_tuned_config(folder)
    if config is None:
        raise BadFile(_("{folder}: its config.json names no adapter; load it as a model", folder=folder))
    base = load_base(config, folder, load)
    model = attach_adapter(base.model, config, folder)
    if merged:
        merge_if_float(model)
    tokenizer = find_tokenizer(folder) or base.tokenizer
    if model.spec.head == base.spec.head:
        tuned = replace(base, model=model, tokenizer=tokenizer, config={**base.config, "metadata": config.metadata})
    else:
        labels = [str(label) for label in config.metadata.get("labels", [])]
        native_config = {"model_type": MODEL_TYPE, "metadata": config.metadata}
        tuned = LoadedModel(model, tokenizer, native_config, folder, labels=labels)
    tuned.path = folder
    return tuned


def merge_if_float(model: Transformer) -> None:
    """Merge an adapter that can become weights of the base, where the base is not quantized."""
    if can_merge(model) and not quantized_layers(model):
        merge(model)


def load_base(config: TunedConfig, folder: Path, load: Callable[[str], LoadedBase]) -> LoadedBase:
    """The base of a tuned model, by its name or by its path from the folder; another base is refused."""
    names = [config.base]
    if config.base_path:
        names.insert(0, str(folder / config.base_path))
    existing = [name for name in names if Path(name).exists()]
    try:
        base = load((existing or names[-1:])[0])
    except NotFound as error:
        raise NotFound(
            _(
                "{folder}: its base {base} is missing ({reason}); put it back",
                folder=folder,
                base=quote(config.base),
                reason=error,
            )
        ) from None
    if base_fingerprint(base.model) != config.fingerprint:
        raise BadFile(
            _(
                "{folder}: it was tuned from {base}, whose weights are others now; restore them, or tune again",
                folder=folder,
                base=quote(config.base),
            )
        )
    return base


def attach_adapter(base: Transformer, config: TunedConfig, folder: Path) -> Transformer:
    """A base with the adapter of a folder, frozen and in eval mode."""
    model = base if base.spec.head == config.spec.head else replace_head(base, config.spec, seed=0)
    slots = window_slots(config.spec)
    if slots < window_slots(model.spec):
        cut_window(model, slots)
    file = SafetensorsFile(folder / ADAPTER_NAME)
    for name in file:
        check_finite(file[name], name, file.where)
    try:
        tune(model, *config.methods)
        set_adapter_tensors(model, file, file.where)
    except Fault as fault:
        raise BadFile(_("{folder}: the adapter does not fit its base: {reason}", folder=folder, reason=fault)) from None
    tuning = tuning_of(model)
    assert tuning is not None
    tuning.base = config.base
    tuning.fingerprint = config.fingerprint
    model.requires_grad_(False)
    return model.eval()
