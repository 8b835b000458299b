"""What peft's adapters have in common: tensors by module, those that must be there, modules trained whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headwater.errors import BadFile, BadSetting
from headwater.families.adapter_names import PublicNames
from headwater.families.hf_folder import LoadedModel
from headwater.i18n import _
from headwater.io.files import quote
from headwater.tuning.base import ChangedModule, TuningMethod
from headwater.tuning.full import Full
from headwater.tuning.linear import TunedLinear
from headwater.weights.name_map import format_names
from headwater.weights.safetensors import SafetensorsFile

PREFIX = "base_model.model."


class AdapterFile(NamedTuple):
    """An adapter that was read: its methods, and its tensors by our names."""

    methods: tuple[TuningMethod, ...]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class PeftFiles:
    """What write_peft_folder writes: the config and the tensors."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def group_tensors(
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


def read_saved(
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


def changed_layers(loaded: LoadedModel, name: str, kinds: tuple[type, ...] = (TunedLinear,)) -> dict[str, Any]:
    """The changes of layers of these kinds by path; other changes of the adapter are refused."""
    changes = {}
    for path, module in loaded.model.named_modules():
        if isinstance(module, ChangedModule) and name in module.changes:
            if not isinstance(module, kinds):
                raise BadSetting(_("export: {path} is no linear layer; choose another layout", path=path))
            changes[path] = module.changes[name]
    return changes


def saved_modules(
    names: PublicNames, loaded: LoadedModel, methods: Sequence[TuningMethod]
) -> tuple[list[str], dict[str, Tensor]]:
    """The modules whose own parameters were trained, and their tensors."""
    paths = [path for method in methods for path in method.paths(loaded.model)]
    tensors = {names.parameter_name(path): loaded.model.get_parameter(path).detach() for path in paths}
    modules = sorted({name.rpartition(".")[0] for name in tensors})
    return modules, {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
