"""Load an adapter into a model, and save one: tuned runs and peft folders, recognized by their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.errors import BadFile, BadSetting, Fault, NotFound, nearest
from headwater.families.bottleneck_folder import WEIGHTS_NAME as BOTTLENECK_WEIGHTS
from headwater.families.bottleneck_folder import is_bottleneck_folder, read_bottleneck_folder, write_bottleneck_folder
from headwater.families.gguf_lora import read_gguf_lora, write_gguf_lora
from headwater.families.hf_folder import LoadedModel
from headwater.families.load import load
from headwater.families.peft_common import AdapterFile
from headwater.families.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftConfig
from headwater.families.peft_folder import read_peft_folder, write_peft_folder
from headwater.families.tuned_folder import ADAPTER_NAME, load_tuned_folder, read_tuned_config, save_tuned_folder
from headwater.i18n import _
from headwater.tuning.api import (
    base_fingerprint,
    check_new_name,
    remove_adapter,
    set_adapter_tensors,
    tune,
    use_adapter,
)
from headwater.tuning.base import DEFAULT_NAME, method_names, tuning_of
from headwater.tuning.merge import can_merge, merge
from headwater.weights.checks import check_finite
from headwater.weights.gguf import GgufFile
from headwater.weights.native import quantized_layers
from headwater.weights.safetensors import LazyStateDict, SafetensorsFile

LAYOUTS: dict[str, Callable[[LoadedModel, Path, str, str], Path]] = {
    "headwater": lambda loaded, path, name, base: save_tuned_folder(
        path, loaded.model, loaded.config.get("metadata", {}), name
    ),
    "peft": lambda loaded, path, name, base: write_peft_folder(loaded, path, name, base),
    "adapters": lambda loaded, path, name, base: write_bottleneck_folder(loaded, path, name),
    "gguf": lambda loaded, path, name, base: write_gguf_lora(loaded, path, name),
}


def load_adapter(model: LoadedModel, path: str | Path, *, name: str = DEFAULT_NAME) -> LoadedModel:
    """Put an adapter into a model, in place, frozen: headwater.load_adapter(model, "runs/polite", name="polite").

    model  the base, from headwater.load
    path   a tuned run, its model folder, a peft folder, or a .gguf file with a LoRA
    name   of the adapter in the model; a model may have several, of which the last one acts
    """
    folder = Path(path)
    check_new_name(model.model, name)
    adapter = read_adapter(model, folder)
    before = tuning_of(model.model)
    active = None if before is None else before.selection.active
    learned = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
    try:
        tune(model, *adapter.methods, name=name)
        set_adapter_tensors(model.model, adapter.tensors, folder, name)
    except Fault as fault:
        tuning = tuning_of(model.model)
        if tuning is not None and name in tuning.adapters:
            remove_adapter(model.model, name)
        use_adapter(model.model, active)
        for parameter in learned:
            parameter.requires_grad_(True)
        raise BadFile(
            _("{folder}: the adapter does not fit this model: {reason}", folder=folder, reason=fault)
        ) from None
    model.model.requires_grad_(False)
    model.model.eval()
    return model


def merge_if_possible(model: LoadedModel) -> LoadedModel:
    """Merge the adapter of a model into its weights where it can become weights, and none of them is quantized."""
    if can_merge(model.model) and not quantized_layers(model.model):
        merge(model.model)
    return model


def read_adapter(model: LoadedModel, folder: Path) -> AdapterFile:
    """The adapter of a folder for a model, by the files that it has."""
    folder = adapter_folder(folder)
    if folder.suffix == ".gguf" and folder.is_file():
        return read_gguf_lora(model, folder)
    if is_bottleneck_folder(folder):
        return read_bottleneck_folder(model, folder)
    if (folder / CONFIG_NAME).is_file():
        return read_peft_folder(model, folder)
    if (folder / "config.json").is_file():
        return _read_tuned(model, folder)
    raise NotFound(
        _(
            "{folder} has no adapter: it needs {peft} (peft) or a config.json of a tuned run",
            folder=folder,
            peft=CONFIG_NAME,
        )
    )


def adapter_folder(path: Path) -> Path:
    """The folder of an adapter's files: of a run, the folder of its model."""
    return path / "model" if (path / "model" / "config.json").is_file() else path


def load_with_base(path: str | Path) -> LoadedModel:
    """An adapter with the base that it names, its weights as they are: nothing is merged."""
    folder = adapter_folder(Path(path))
    if (folder / "config.json").is_file() and not (folder / CONFIG_NAME).is_file():
        return load_tuned_folder(folder, load, merged=False)
    base = describe_adapter(folder).get("base", "")
    if not base:
        raise BadSetting(_("{folder} does not name its base; give the base too", folder=folder))
    return load_adapter(load(base), folder)


def describe_adapter(path: str | Path) -> dict[str, str]:
    """What an adapter is, from its files alone: layout, base, methods, tensors and weights."""
    folder = adapter_folder(Path(path))
    if folder.suffix == ".gguf" and folder.is_file():
        gguf = GgufFile(folder)
        about = {"layout": "gguf", "methods": str(gguf.metadata.get("adapter.type"))}
        return {**about, **_sizes(gguf)}
    if is_bottleneck_folder(folder):
        file = SafetensorsFile(folder / BOTTLENECK_WEIGHTS)
        return {"layout": "adapters", "methods": "bottleneck", **_sizes(file)}
    if (folder / CONFIG_NAME).is_file():
        config = PeftConfig.read(folder)
        about = {"layout": "peft", "base": config.base, "methods": config.peft_type}
        return {**about, **_sizes(SafetensorsFile(folder / WEIGHTS_NAME))}
    tuned = read_tuned_config(folder) if (folder / "config.json").is_file() else None
    if tuned is None:
        raise NotFound(
            _(
                "{folder} has no adapter: it needs {peft} (peft) or a config.json of a tuned run",
                folder=folder,
                peft=CONFIG_NAME,
            )
        )
    return {
        "layout": "headwater",
        "base": tuned.base,
        "methods": method_names(tuned.methods),
        **_sizes(SafetensorsFile(folder / ADAPTER_NAME)),
    }


def _sizes(file: LazyStateDict) -> dict[str, str]:
    """The number of tensors and of weights."""
    return {"tensors": f"{len(file):,}", "weights": f"{sum(file.meta_tensor(name).numel() for name in file):,}"}


def _read_tuned(model: LoadedModel, folder: Path) -> AdapterFile:
    """The adapter of a tuned run, for the base it was tuned from."""
    config = read_tuned_config(folder)
    if config is None:
        raise BadFile(_("{folder} is a whole model and no adapter; load it alone", folder=folder))
    if base_fingerprint(model.model) != config.fingerprint:
        raise BadFile(
            _(
                "{folder}: it was tuned from {base}, this is another base; load that one",
                folder=folder,
                base=config.base,
            )
        )
    file = SafetensorsFile(folder / ADAPTER_NAME)
    for tensor_name in file:
        check_finite(file[tensor_name], tensor_name, file.where)
    return AdapterFile(config.methods, dict(file.items()))


def save_adapter(model: LoadedModel, path: str | Path, *, layout: str = "peft", name: str = DEFAULT_NAME) -> Path:
    """Save an adapter of a model, without its base.

    model   a model with the adapter, from headwater.tune or load_adapter
    path    the folder or the .gguf file to write
    layout  "peft": adapter_config.json and adapter_model.safetensors; "adapters": of the library of that name,
            bottleneck adapters; "gguf": one file for llama.cpp; "headwater": a
            folder that headwater.load opens
    name    of the adapter in the model
    """
    if layout not in LAYOUTS:
        raise BadSetting(
            _(
                "layout must be {known}, got {layout!r}; {nearest}",
                known=", ".join(LAYOUTS),
                layout=layout,
                nearest=nearest(layout, LAYOUTS),
            )
        )
    tuning = tuning_of(model.model)
    if tuning is None:
        raise BadSetting(_("save_adapter: the model has no adapter; load one, or call headwater.tune"))
    tuning.check_name(name)
    base = tuning.base or str(model.path)
    return LAYOUTS[layout](model, Path(path), name, base)
