"""IA3, prefix and prompt tuning in the layout of peft: adapters that are vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwater.core import Transformer
from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicNames, group_by_module
from headwater.families.hf_folder import LoadedModel
from headwater.families.peft_common import PREFIX, AdapterFile, PeftFiles, check_complete, group_tensors, read_saved
from headwater.families.peft_config import USUAL_TARGETS, PeftConfig
from headwater.i18n import _
from headwater.io.files import quote
from headwater.tuning import IA3, PrefixTuning, PromptTuning
from headwater.tuning.hooks import StackChanges
from headwater.tuning.prefix import PrefixTable
from headwater.tuning.prompt import VirtualTokens
from headwater.tuning.scaling import InputScale
from headwater.weights.safetensors import SafetensorsFile

PROMPT = "prompt_embeddings"

# ----------------------------------------------------------------------------------------------------------------- IA3


def read_ia3(names: PublicNames, loaded: LoadedModel, config: PeftConfig, file: SafetensorsFile) -> AdapterFile:
    """Vectors that scale outputs [out, 1], and of feed_forward modules inputs [1, in]."""
    by_module, saved = group_tensors(file, {".ia3_l": "ia3_l"})
    known = [module.name for module in names.modules(loaded.model)]
    expected = config.targets(known, names.model_type, "ia3")
    check_complete(names, by_module, expected, {"ia3_l"}, file.where)
    usual = USUAL_TARGETS[names.model_type].feed_forward.split() if names.model_type in USUAL_TARGETS else []
    feed_forward = config.values.get("feedforward_modules")
    inputs = {
        names.paths_of(name)
        for name in expected
        if config.matches(name, usual if feed_forward is None else feed_forward)
    }

    paths: dict[bool, list[str]] = {True: [], False: []}  # whether the input is scaled
    tensors: dict[str, Tensor] = {}
    for name, parts in by_module.items():
        module = names.find_module(name)
        assert module is not None, "every module was expected"
        vector = parts["ia3_l"].flatten().float()
        is_input = module.paths in inputs
        pieces = [vector] * len(module.paths) if is_input else names.split_rows(module, vector)
        if pieces is None:
            raise BadFile(_("{where}: {name} has the wrong number of rows", where=file.where, name=quote(name)))
        for path, piece in zip(module.paths, pieces, strict=True):
            paths[is_input].append(path)
            tensors[f"{path}.ia3_l"] = piece
    full, saved_tensors = read_saved(names, saved, file.where)
    return AdapterFile((IA3(tuple(paths[False]), tuple(paths[True])), *full), tensors | saved_tensors)


def ia3_files(names: PublicNames, changes: Mapping[str, Any]) -> PeftFiles:
    """The config and the tensors of IA3."""
    tensors: dict[str, Tensor] = {}
    modules: dict[bool, list[str]] = {True: [], False: []}
    for module, paths in group_by_module(names, list(changes)).items():
        here = [changes[path] for path in paths]
        kinds = {type(change) for change in here}
        if len(kinds) > 1 or (kinds == {InputScale} and not all(torch.equal(here[0].ia3_l, c.ia3_l) for c in here)):
            raise BadSetting(_("export: {name} must be scaled as a whole", name=module.name))
        if kinds == {InputScale}:
            vector = here[0].ia3_l.detach()[None]
        else:
            rows = len(here[0].ia3_l)
            ones = torch.ones(rows)
            pieces = [changes[path].ia3_l.detach() if path in changes else ones for path in module.paths]
            vector = names.join_rows(module, pieces)[:, None]
        modules[kinds == {InputScale}].append(module.name)
        tensors[f"{PREFIX}{module.name}.ia3_l"] = vector.contiguous()
    config = {
        "peft_type": "IA3",
        "target_modules": sorted(modules[False] + modules[True]),
        "feedforward_modules": sorted(modules[True]),
    }
    return PeftFiles(config, tensors)


# ------------------------------------------------------------------------------------------- prefix and prompt tuning


def read_prefix(names: PublicNames, loaded: LoadedModel, config: PeftConfig, file: SafetensorsFile) -> AdapterFile:
    """A table [P, L · 2 · G · D] of keys and values."""
    table, count = _prompt_embeddings(config, file)
    stack = _stack_name(loaded.model)
    if _is_encoder_decoder(loaded.model):  # peft cuts the table in fours: the self-attention of layer i has pair 2 i
        layers = len(loaded.model.output_stack.layers)
        if table.shape[1] % (2 * layers):
            raise BadFile(_("{where}: {name} has the wrong number of rows", where=file.where, name=PROMPT))
        pairs = table.view(count, layers, -1)
        table = pairs[:, [2 * i % layers for i in range(layers)]].flatten(1)
    return AdapterFile((PrefixTuning(count),), {f"{stack}.table": table})


def prefix_files(model: Transformer, name: str) -> PeftFiles:
    """The config and the table of prefix tuning, computed where it was trained through an MLP."""
    (prefix,) = _stack_changes(model, name)
    assert isinstance(prefix, PrefixTable)
    table = prefix.flat().detach()
    layers = len(prefix.keys)
    if _is_encoder_decoder(model):
        pairs = table.view(prefix.count, layers, -1)
        written = torch.zeros_like(pairs)
        for i in range(layers):
            written[:, 2 * i % layers] = pairs[:, i]
        if not torch.equal(written[:, [2 * i % layers for i in range(layers)]], pairs):
            raise BadSetting(
                _(
                    "export: peft has one prefix for layers i and i + {half} of an encoder-decoder; "
                    "choose another layout",
                    half=layers // 2,
                )
            )
        table = written.flatten(1)
    config = {
        **_sizes(model, prefix.count, prefix.heads * prefix.head_dim, layers, prefix.heads),
        "peft_type": "PREFIX_TUNING",
        "prefix_projection": False,
    }
    return PeftFiles(config, {PROMPT: table.contiguous()})


def read_prompt(names: PublicNames, loaded: LoadedModel, config: PeftConfig, file: SafetensorsFile) -> AdapterFile:
    """A table [P, D] of virtual tokens; of an encoder-decoder [2 P, D], of which the encoder reads the first half."""
    table, count = _prompt_embeddings(config, file, halves=_is_encoder_decoder(loaded.model))
    if str(config.values.get("task_type")) in ("SEQ_CLS", "QUESTION_ANS") and loaded.model.decoder is None:
        raise BadFile(
            _("{where}: peft's classifier reads the first virtual token, which is not supported", where=config.where)
        )
    stack = "encoder" if loaded.model.encoder is not None else "decoder"
    return AdapterFile((PromptTuning(count),), {f"{stack}.table": table[:count]})


def prompt_files(model: Transformer, name: str) -> PeftFiles:
    """The config and the vectors of prompt tuning, computed where they were trained through an MLP."""
    (prompt,) = _stack_changes(model, name)
    assert isinstance(prompt, VirtualTokens)
    table = prompt.flat().detach()
    stack: Any = model.output_stack
    heads = stack.spec.layers[0].branches[0].layer.heads
    config = {**_sizes(model, prompt.count, table.shape[1], len(stack.layers), heads), "peft_type": "PROMPT_TUNING"}
    if _is_encoder_decoder(model):
        table = torch.cat((table, torch.zeros_like(table)))
    return PeftFiles(config, {PROMPT: table.contiguous()})


def _prompt_embeddings(config: PeftConfig, file: SafetensorsFile, halves: bool = False) -> tuple[Tensor, int]:
    """The one tensor of the file, and the number of virtual tokens."""
    count = config.get("num_virtual_tokens", int, 0)
    if set(file) != {PROMPT}:
        raise BadFile(_("{where}: it must hold {name} alone", where=file.where, name=PROMPT))
    table = file[PROMPT].float()
    if table.dim() != 2 or count < 1 or len(table) != count * (2 if halves else 1):
        raise BadFile(
            _(
                "{where}: {name} must have {count} rows, it is {shape}",
                where=file.where,
                name=PROMPT,
                count=count,
                shape=list(table.shape),
            )
        )
    return table, count


def _stack_changes(model: Transformer, name: str) -> list[Any]:
    return [changes[name] for changes in model.modules() if isinstance(changes, StackChanges) and name in changes]


def _is_encoder_decoder(model: Transformer) -> bool:
    return model.encoder is not None and model.decoder is not None


def _stack_name(model: Transformer) -> str:
    return "encoder" if model.decoder is None else "decoder"


def _sizes(model: Transformer, count: int, width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "num_virtual_tokens": count,
        "token_dim": width,
        "num_layers": layers,
        "num_attention_heads": heads,
        "num_transformer_submodules": 2 if _is_encoder_decoder(model) else 1,
    }
