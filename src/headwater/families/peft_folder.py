"""Adapters in the layout of peft: adapter_config.json and adapter_model.safetensors, read strictly and written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicNames
from headwater.families.hf_folder import LoadedModel
from headwater.families.peft_common import AdapterFile, PeftFiles, changed_layers, saved_modules
from headwater.families.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftConfig
from headwater.families.peft_lora import lora_files, read_lora
from headwater.families.peft_vectors import ia3_files, prefix_files, prompt_files, read_ia3, read_prefix, read_prompt
from headwater.i18n import _
from headwater.io.files import atomic_write, quote
from headwater.tuning import IA3, Full, LoRA, PrefixTuning, PromptTuning
from headwater.tuning.base import DEFAULT_NAME, method_names, tuning_of
from headwater.tuning.embedding import TunedEmbedding
from headwater.tuning.linear import TunedLinear
from headwater.weights.checks import check_finite
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

Reader = Callable[[PublicNames, LoadedModel, PeftConfig, SafetensorsFile], AdapterFile]
READERS: dict[str, Reader] = {
    "LORA": read_lora,
    "IA3": read_ia3,
    "PREFIX_TUNING": read_prefix,
    "PROMPT_TUNING": read_prompt,
    "P_TUNING": read_prompt,
}


def read_peft_folder(loaded: LoadedModel, folder: str | Path) -> AdapterFile:
    """The adapter of a peft folder for a model; every key of the config and every tensor is accounted for."""
    folder = Path(folder)
    config = PeftConfig.read(folder)
    file = SafetensorsFile(folder / WEIGHTS_NAME)
    for name in file:
        check_finite(file[name], name, file.where)
    if config.peft_type not in READERS:
        raise BadFile(
            _(
                "{where}: peft_type must be {known}, got {kind}",
                where=config.where,
                known=", ".join(READERS),
                kind=quote(config.peft_type),
            )
        )
    return READERS[config.peft_type](PublicNames.of(loaded), loaded, config, file)


def write_peft_folder(loaded: LoadedModel, folder: str | Path, name: str = DEFAULT_NAME, base: str = "") -> Path:
    """Write an adapter as a peft folder. base: the name or folder of the base, for those who load it."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadFile(
            _("{folder}: it must be a new or empty folder, it holds files; choose another name", folder=folder)
        )
    files = peft_files(loaded, name, base)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / WEIGHTS_NAME, files.tensors)
    with atomic_write(folder / CONFIG_NAME) as file:
        file.write(json.dumps(files.config, indent=2, ensure_ascii=False).encode())
    return folder


def peft_files(loaded: LoadedModel, name: str, base: str) -> PeftFiles:
    """The config and the tensors of an adapter in peft's layout."""
    tuning = tuning_of(loaded.model)
    if tuning is None:
        raise BadSetting(_("export: the model has no adapter; load one, or call headwater.tune"))
    methods = tuning.adapters[tuning.check_name(name)]
    names = PublicNames.of(loaded)
    changing = [method for method in methods if not isinstance(method, Full)]
    if changing and all(isinstance(method, LoRA) for method in changing):
        changes = changed_layers(loaded, name, (TunedLinear, TunedEmbedding))
        files = lora_files(names, loaded.model, changes)
    elif changing and all(isinstance(method, IA3) for method in changing):
        files = ia3_files(names, changed_layers(loaded, name))
    elif len(methods) == 1 and isinstance(methods[0], PrefixTuning):
        files = prefix_files(loaded.model, name)
    elif len(methods) == 1 and isinstance(methods[0], PromptTuning):
        files = prompt_files(loaded.model, name)
    else:
        raise BadSetting(
            _("export: peft has no layout for {methods}; choose another layout", methods=method_names(methods))
        )

    modules, saved_tensors = saved_modules(names, loaded, methods)
    if modules:
        files.config["modules_to_save"] = modules
    common = {"base_model_name_or_path": base or None, "inference_mode": True, "task_type": _task_type(loaded)}
    return PeftFiles({**files.config, **common}, {**files.tensors, **saved_tensors})


def _task_type(loaded: LoadedModel) -> str | None:
    """peft's word for the kind of model."""
    kinds = {
        "sequence_classification": "SEQ_CLS",
        "token_classification": "TOKEN_CLS",
        "question_answering": "QUESTION_ANS",
    }
    if loaded.spec.decoder is not None and loaded.head in ("language", ""):
        return "CAUSAL_LM" if loaded.spec.encoder is None else "SEQ_2_SEQ_LM"
    return kinds.get(loaded.head, "FEATURE_EXTRACTION" if loaded.head == "hidden_states" else None)
