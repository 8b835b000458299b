"""Adapters in the layout of peft: adapter_config.json and adapter_model.safetensors, read strictly and written.

peft adapts whole modules of transformers. Where such a module holds several layers of ours (GPT-2's c_attn is q, k and
v), reading gives each of them A and its own rows of B; writing stacks the As and puts the Bs on a diagonal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicModule, PublicNames, group_by_module
from headwater.families.hf_folder import LoadedModel
from headwater.families.peft_config import CONFIG_NAME, WEIGHTS_NAME, PeftConfig
from headwater.i18n import _
from headwater.io.files import atomic_write, quote
from headwater.tuning.base import DEFAULT_NAME, ChangedModule, TuningMethod, tuning_of
from headwater.tuning.full import Full
from headwater.tuning.linear import TunedLinear
from headwater.tuning.lowrank import DoRA, LoRA, LowRank, LowRankDirection
from headwater.weights.checks import check_finite
from headwater.weights.name_map import format_names
from headwater.weights.safetensors import SafetensorsFile, write_safetensors

PREFIX = "base_model.model."
LORA_SUFFIXES = {".lora_A.weight": "lora_a", ".lora_B.weight": "lora_b", ".lora_magnitude_vector": "magnitude"}


class AdapterFile(NamedTuple):
    """An adapter that was read: its methods, and its tensors by our names."""

    methods: tuple[TuningMethod, ...]
    tensors: dict[str, Tensor]


class LowRankWeights(NamedTuple):
    """The tensors of one adapted module, and its scale s: W + s · B A."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    scale: float


# ------------------------------------------------------------------------------------------------------------- reading


def read_peft_folder(loaded: LoadedModel, folder: str | Path) -> AdapterFile:
    """The adapter of a peft folder for a model; every key of the config and every tensor is accounted for."""
    folder = Path(folder)
    config = PeftConfig.read(folder)
    file = SafetensorsFile(folder / WEIGHTS_NAME)
    for name in file:
        check_finite(file[name], name, file.where)
    readers = {"LORA": _read_lora}
    if config.peft_type not in readers:
        raise BadFile(
            _(
                "{where}: peft_type must be {known}, got {kind}",
                where=config.where,
                known=", ".join(readers),
                kind=quote(config.peft_type),
            )
        )
    return readers[config.peft_type](PublicNames.of(loaded), loaded, config, file)


def _read_lora(names: PublicNames, loaded: LoadedModel, config: PeftConfig, file: SafetensorsFile) -> AdapterFile:
    by_module, saved = _group_tensors(file, LORA_SUFFIXES)
    known = [module.name for module in names.modules(loaded.model)]
    expected = config.targets(known, names.model_type, "lora")
    dora = config.get("use_dora", bool, False)
    needed = {"lora_a", "lora_b", "magnitude"} if dora else {"lora_a", "lora_b"}
    check_complete(names, by_module, expected, needed, file.where)

    methods: dict[tuple[int, float], list[str]] = {}
    tensors: dict[str, Tensor] = {}
    for name, parts in by_module.items():
        module = names.find_module(name)
        assert module is not None, "every module was expected"
        rank, alpha = _rank_and_alpha(config, name, parts, file.where)
        pieces = {kind: names.split_rows(module, t) for kind, t in parts.items() if kind != "lora_a"}
        for index, path in enumerate(module.paths):
            methods.setdefault((rank, alpha), []).append(path)
            tensors[f"{path}.lora_a"] = parts["lora_a"].float()
            for kind, split in pieces.items():
                if split is None:
                    raise BadFile(_("{where}: {name} has the wrong number of rows", where=file.where, name=quote(name)))
                tensors[f"{path}.{kind}"] = split[index].float()
    method = DoRA if dora else LoRA
    lora = [method(rank, alpha, tuple(paths)) for (rank, alpha), paths in methods.items()]
    full, saved_tensors = _read_saved(names, saved, file.where)
    return AdapterFile((*lora, *full), tensors | saved_tensors)


def _group_tensors(
    file: SafetensorsFile, suffixes: Mapping[str, str]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of an adapter by module and kind, and those that were trained whole (modules_to_save)."""
    by_module: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, Tensor] = {}
    for name in file:
        if not name.startswith("base_model."):
            raise BadFile(_("{where}: the tensor {name} is not known", where=file.where, name=quote(name)))
        short = name.removeprefix(PREFIX).removeprefix("base_model.")
        suffix = next((suffix for suffix in suffixes if short.endswith(suffix)), None)
        if suffix is None:
            saved[short] = file[name]
        else:
            by_module.setdefault(short.removesuffix(suffix), {})[suffixes[suffix]] = file[name]
    return by_module, saved


def check_complete(
    names: PublicNames,
    by_module: Mapping[str, Mapping[str, Tensor]],
    expected: Sequence[str],
    needed: set[str],
    where: object,
) -> None:
    """The file must have all tensors of all modules that the config names, and no others.

    Modules are compared by our paths: models without a head have names without the prefix of the body.
    """
    expected_paths = {names.paths_of(name): name for name in expected}
    file_paths = {name: names.paths_of(name) for name in by_module}
    missing = [name for paths, name in expected_paths.items() if paths not in file_paths.values()]
    unknown = [name for name, paths in file_paths.items() if paths not in expected_paths]
    partial = [f"{name}.{kind}" for name, parts in by_module.items() for kind in sorted(needed ^ set(parts))]
    problems = {_("missing"): missing, _("not of this model"): unknown, _("missing or unexpected"): partial}
    for problem, which in problems.items():
        if which:
            raise BadFile(
                _(
                    "{where}: the adapter does not fit: {count} {problem}: {names}",
                    where=where,
                    count=len(which),
                    problem=problem,
                    names=format_names(which),
                )
            )


def _rank_and_alpha(config: PeftConfig, name: str, parts: Mapping[str, Tensor], where: object) -> tuple[int, float]:
    """The rank and the alpha of a module; that of rsLoRA is folded into it: alpha / √r = (alpha √r) / r."""
    a = parts["lora_a"]
    b = parts["lora_b"]
    rank = int(config.pattern_value("rank_pattern", name, config.get("r", int, 8)))
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise BadFile(
            _(
                "{where}: {name} must have rank {rank}, its tensors are {a} and {b}",
                where=where,
                name=quote(name),
                rank=rank,
                a=list(a.shape),
                b=list(b.shape),
            )
        )
    alpha = config.pattern_value("alpha_pattern", name, config.get("lora_alpha", (int, float), 8))
    return rank, alpha * rank**0.5 if config.get("use_rslora", bool, False) else alpha


def _read_saved(
    names: PublicNames, saved: Mapping[str, Tensor], where: object
) -> tuple[list[TuningMethod], dict[str, Tensor]]:
    """Parameters that were trained whole, by our names."""
    tensors = {}
    for name, tensor in saved.items():
        path = names.find_parameter(name)
        if path is None:
            raise BadFile(_("{where}: the tensor {name} is not known", where=where, name=quote(name)))
        tensors[path] = tensor.float()
    return [Full(tuple(tensors))] if tensors else [], tensors


# ------------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class PeftFiles:
    """What write_peft_folder writes: the config and the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


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
    common = {"base_model_name_or_path": base or None, "inference_mode": True, "task_type": _task_type(loaded)}
    if not all(isinstance(method, LoRA | Full) for method in methods):
        raise BadSetting(_("export: peft has no layout for {methods}; choose another layout", methods=methods))
    config, tensors = _lora_files(names, changed_linears(loaded, name))
    modules, saved_tensors = _saved_modules(names, loaded, methods)
    if modules:
        config["modules_to_save"] = modules
    return PeftFiles({**config, **common}, {**tensors, **saved_tensors})


def changed_linears(loaded: LoadedModel, name: str) -> dict[str, Any]:
    """The changes of linear layers by path; other changes of the adapter are refused."""
    changes = {}
    for path, module in loaded.model.named_modules():
        if isinstance(module, ChangedModule) and name in module.changes:
            if not isinstance(module, TunedLinear):
                raise BadSetting(_("export: {path} is no linear layer; choose another layout", path=path))
            changes[path] = module.changes[name]
    return changes


def _lora_files(names: PublicNames, changes: Mapping[str, LowRank]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of low-rank changes."""
    dora = any(isinstance(change, LowRankDirection) for change in changes.values())
    modules = {m.name: join_low_rank(names, m, changes) for m in group_by_module(names, list(changes))}
    if not modules:
        raise BadSetting(_("export: the adapter changes no linear layer; choose another layout"))
    tensors: dict[str, Tensor] = {}
    for module, weights in modules.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = weights.a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = weights.b.contiguous()
        if weights.magnitude is not None:
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = weights.magnitude.contiguous()

    # The most frequent rank and alpha stand for all, the others are patterns.
    ranks = {module: len(weights.a) for module, weights in modules.items()}
    alphas = {module: weights.scale * len(weights.a) for module, weights in modules.items()}
    ((rank, _count),) = Counter(ranks.values()).most_common(1)
    ((alpha, _count),) = Counter(alphas.values()).most_common(1)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {module: value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "use_dora": dora,
        "bias": "none",
    }
    return config, tensors


@torch.no_grad()
def join_low_rank(names: PublicNames, module: PublicModule, changes: Mapping[str, LowRank]) -> LowRankWeights:
    """The low-rank change of a public module, from those of our layers in it; a layer without one adds nothing."""
    here = [changes.get(path) for path in module.paths]
    present = [change for change in here if change is not None]
    first = present[0]
    outs = _row_counts(module, here)
    same_a = len(present) == len(here) and all(
        torch.equal(change.lora_a, first.lora_a) and change.scale == first.scale for change in present
    )
    if same_a:
        a = first.lora_a.detach()
        blocks = [change.lora_b.detach() for change in present]
    else:
        a = torch.cat([change.lora_a.detach() for change in present])
        blocks = [torch.zeros(out, len(a)) for out in outs]
        column = 0
        for block, change in zip(blocks, here, strict=True):
            if change is not None:
                r = len(change.lora_a)
                block[:, column : column + r] = change.lora_b.detach() * (change.scale / first.scale)
                column += r
    magnitude = None
    if isinstance(first, LowRankDirection):
        if len(present) != len(here):
            raise BadSetting(_("export: {name} must be adapted whole by DoRA: its q, k and v", name=module.name))
        lengths = [change.magnitude.detach() for change in present if isinstance(change, LowRankDirection)]
        magnitude = names.join_rows(module, lengths)
    return LowRankWeights(a, names.join_rows(module, blocks), magnitude, first.scale)


def _row_counts(module: PublicModule, changes: Sequence[LowRank | None]) -> list[int]:
    """The rows of each of our layers in a module, which is split evenly: one that is not adapted has as many."""
    known = [len(change.lora_b) for change in changes if change is not None]
    return [known[0] if change is None else len(change.lora_b) for change in changes]


def _saved_modules(
    names: PublicNames, loaded: LoadedModel, methods: Sequence[TuningMethod]
) -> tuple[list[str], dict[str, Tensor]]:
    """The modules whose own parameters were trained, and their tensors."""
    paths = [path for method in methods for path in method.paths(loaded.model)]
    tensors = {names.parameter_name(path): loaded.model.get_parameter(path).detach() for path in paths}
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    return modules, {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}


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
