"""Bottleneck adapters in the layout of the `adapters` library: adapter_config.json and adapter.safetensors.

    seq_bn          Pfeiffer    encoder.layer.0.output.adapters.NAME.adapter_down.0.weight
    double_seq_bn   Houlsby     … and encoder.layer.0.attention.output.adapters.NAME
    par_bn          Parallel

Settings that would compute something else are refused by name, and so are other tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicNames
from headwater.families.hf_folder import LoadedModel
from headwater.families.peft_common import AdapterFile
from headwater.families.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES
from headwater.families.registry import ACTIVATIONS
from headwater.i18n import _
from headwater.io.files import atomic_write, quote, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.tuning.api import adapter_tensors
from headwater.tuning.base import DEFAULT_NAME, method_names, tuning_of
from headwater.tuning.bottleneck import Houlsby, Parallel, Pfeiffer
from headwater.weights.checks import check_finite
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

WEIGHTS_NAME = "adapter.safetensors"
VERSION = "adapters.1.3.0"

# What these settings must be, for they change what is computed. UNUSED: those of training, or of what is switched off.
FIXED: dict[str, Any] = {
    "adapter_residual_before_ln": False, "cross_adapter": False, "inv_adapter": None, "leave_out": [],
    "ln_after": False, "ln_before": False, "original_ln_after": True, "output_adapter": True, "phm_layer": False,
    "residual_before_ln": True, "use_gating": False,
}  # fmt: skip
UNUSED = re.compile(
    r"dropout|factorized_.*|hypercomplex.*|init_.*|inv_adapter_.*|learn_phm|phm_.*|shared_.*|stochastic_depth"
)


class Placement(NamedTuple):
    """The settings that tell the methods apart."""

    mh_adapter: bool
    is_parallel: bool
    original_ln_before: bool


METHODS: dict[Placement, type[Houlsby]] = {
    Placement(False, False, True): Pfeiffer,
    Placement(True, False, False): Houlsby,
    Placement(False, True, False): Parallel,
}


class ModuleNames(NamedTuple):
    """The public modules that hold the adapters after attention and after the feed-forward layer."""

    prefix: str
    self_attn: str
    ffn: str


_BERT = "encoder.layer.{i}."
_LLAMA = ModuleNames("model.", "layers.{i}.attention_adapters", "layers.{i}.output_adapters")
MODULES = {
    "bert": ModuleNames("bert.", _BERT + "attention.output", _BERT + "output"),
    "roberta": ModuleNames("roberta.", _BERT + "attention.output", _BERT + "output"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
}
PARTS = {"adapter_down.0": "down", "adapter_up": "up"}


def is_bottleneck_folder(folder: Path) -> bool:
    """Whether a folder has an adapter in this layout."""
    return (folder / CONFIG_NAME).is_file() and (folder / WEIGHTS_NAME).is_file()


def read_bottleneck_folder(loaded: LoadedModel, folder: Path) -> AdapterFile:
    """The adapter of a folder for a model."""
    path = folder / CONFIG_NAME
    about = parse_json_object(read_limited(path, MAX_CONFIG_BYTES), path)
    method = _read_method(about.get("config"), path)
    name = str(about.get("name"))
    file = SafetensorsFile(folder / WEIGHTS_NAME)
    modules, stack = _module_names(loaded)
    pattern = re.compile(
        rf"(?:{re.escape(modules.prefix)})?({_pattern(modules.self_attn)}|{_pattern(modules.ffn)})"
        rf"\.adapters\.{re.escape(name)}\.({'|'.join(map(re.escape, PARTS))})\.(weight|bias)"
    )
    tensors: dict[str, Tensor] = {}
    for tensor_name in file:
        match = pattern.fullmatch(tensor_name)
        if match is None:
            raise BadFile(_("{where}: the tensor {name} is not known", where=file.where, name=quote(tensor_name)))
        check_finite(file[tensor_name], tensor_name, file.where)
        role = "self_attn" if re.fullmatch(_pattern(modules.self_attn), match[1]) else "ffn"
        (layer,) = re.findall(r"\d+", match[1])
        path_of_slot = f"{stack}.layers.{layer}.{role}_{method.slot}"
        tensors[f"{path_of_slot}.{PARTS[match[2]]}.{match[3]}"] = file[tensor_name].float()
    return AdapterFile((method,), tensors)


def _pattern(template: str) -> str:
    return re.escape(template).replace(re.escape("{i}"), r"\d{1,5}")


def _module_names(loaded: LoadedModel) -> tuple[ModuleNames, str]:
    """The public modules of a model, and the name of its stack here."""
    model_type = PublicNames.of(loaded).model_type
    if model_type not in MODULES:
        raise BadSetting(
            _(
                "the adapters library's layout is known for {known}, this model is {model_type}",
                known=", ".join(MODULES),
                model_type=model_type,
            )
        )
    return MODULES[model_type], "decoder" if loaded.model.encoder is None else "encoder"


def _read_method(config: object, where: Path) -> Houlsby:
    """The method of a config; whatever would compute something else is refused."""
    if not isinstance(config, Mapping):
        raise BadFile(
            _(
                "{where}: {key} must be {expected}, got {value}",
                where=where,
                key="config",
                expected="dict",
                value=quote(config),
            )
        )
    placement = Placement(*(bool(config.get(key)) for key in Placement._fields))
    known = {*FIXED, *Placement._fields, "non_linearity", "reduction_factor", "scaling"}
    method = METHODS.get(placement)
    wrong = [key for key, value in config.items() if key not in known and not UNUSED.fullmatch(key)]
    wrong += [key for key, value in FIXED.items() if config.get(key, value) != value]
    wrong += [] if method is not None else list(Placement._fields)
    reduction = config.get("reduction_factor")
    activation = ACTIVATIONS.get(str(config.get("non_linearity")), str(config.get("non_linearity")))
    wrong += (
        []
        if isinstance(reduction, int | float) and reduction >= 1 and reduction == int(reduction)
        else ["reduction_factor"]
    )
    wrong += [] if activation in ACTIVATIONS.values() else ["non_linearity"]
    if method is not None and config.get("scaling") != method.scale:
        wrong.append("scaling")
    if wrong or method is None:
        key = wrong[0]
        raise BadFile(
            _(
                "{where}: the setting {key} = {value} is not supported and may change the outputs",
                where=where,
                key=quote(key),
                value=quote(config.get(key)),
            )
        )
    return method(int(reduction), activation)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- writing


def write_bottleneck_folder(loaded: LoadedModel, folder: Path, name: str = DEFAULT_NAME) -> Path:
    """Write the bottleneck adapter of a model as a folder that the adapters library opens."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(
            _("{folder}: it must be a new or empty folder, it holds files; choose another name", folder=folder)
        )
    tuning = tuning_of(loaded.model)
    methods = () if tuning is None else tuning.adapters[name]
    if len(methods) != 1 or type(methods[0]) not in METHODS.values():
        raise BadSetting(
            _(
                "export: the adapters library has no layout for {methods}; choose another layout",
                methods=method_names(methods),
            )
        )
    method = methods[0]
    assert isinstance(method, Houlsby)
    modules, _stack = _module_names(loaded)
    prefix = "" if PublicNames.of(loaded).headless and modules.prefix != "model." else modules.prefix
    reverse = {ours: theirs for theirs, ours in PARTS.items()}
    tensors: dict[str, Tensor] = {}
    for path, tensor in adapter_tensors(loaded.model, name).items():
        _side, _layers, layer, slot, part, kind = path.split(".")
        template = modules.self_attn if slot.startswith("self_attn") else modules.ffn
        module = f"{prefix}{template.format(i=layer)}.adapters.{name}"
        tensors[f"{module}.{reverse[part]}.{kind}"] = tensor.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    with atomic_write(folder / CONFIG_NAME) as file:
        file.write(json.dumps(_about(loaded, method, name), indent=2, ensure_ascii=False).encode())
    return folder


def _about(loaded: LoadedModel, method: Houlsby, name: str) -> dict[str, Any]:
    """adapter_config.json."""
    (placement,) = (placement for placement, kind in METHODS.items() if kind is type(method))
    theirs = {"silu": "swish", "gelu_tanh": "gelu_new"}
    config = {
        **FIXED,
        **placement._asdict(),
        "dropout": 0.0,
        "init_weights": "bert",
        "non_linearity": theirs.get(method.activation, method.activation),
        "reduction_factor": method.reduction,
        "scaling": method.scale,
    }
    stack: Any = loaded.model.output_stack
    architectures = loaded.config.get("architectures") or [""]
    return {
        "config": config,
        "hidden_size": stack.spec.d_model,
        "model_class": architectures[0],
        "model_name": "",
        "model_type": PublicNames.of(loaded).model_type,
        "name": name,
        "version": VERSION,
    }
