"""headwater.tune: change a built model by path pattern, so that only what is new learns; and its adapters by name."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.errors import BadInput, BadSetting, Fault
from headwater.i18n import _
from headwater.parts import must
from headwater.quantization.layers import replace_module
from headwater.tuning.base import (
    DEFAULT_NAME,
    ChangedModule,
    Tuning,
    TuningMethod,
    file_name,
    learned_parameters,
    tuning_of,
)
from headwater.tuning.hooks import StackChange, StackChanges
from headwater.weights.native import copy_tensors

MAX_FINGERPRINTED = 4096  # numbers of a tensor that its fingerprint reads


class HasTransformer(Protocol):
    """What headwater.load gives."""

    @property
    def model(self) -> Transformer: ...


AnyTransformer = TypeVar("AnyTransformer", bound=Transformer)
AnyModel = TypeVar("AnyModel", bound=Transformer | HasTransformer)


def tune(model: AnyModel, *methods: TuningMethod, name: str = DEFAULT_NAME, seed: int = 0) -> AnyModel:
    """Change a model in place, and return it: its own weights are frozen, and only what the methods add learns.

    model    what headwater.load gives, or a model alone
    methods  LoRA(r=8, target="*.self_attn.*"), Full("head.*"), …
    name     of the adapter; a model may have several, of which the last one acts
    seed     of the initial weights
    """
    transformer = model if isinstance(model, Transformer) else getattr(model, "model", None)
    if not isinstance(transformer, Transformer):
        raise BadInput(
            _("tune needs a model, got {name}; give what load, train or build returns", name=type(model).__name__)
        )
    must(bool(methods), "tune", _("it needs a method"), "none", _("such as LoRA(r=8)"))
    for method in methods:
        must(
            isinstance(method, TuningMethod), "tune", _("methods must be parts"), type(method).__name__, _("LoRA(r=8)")
        )
    check_new_name(transformer, name)

    tuning = tuning_of(transformer)
    if tuning is None:
        path = getattr(model, "path", "")
        tuning = Tuning(base=str(path), fingerprint=base_fingerprint(transformer))
        transformer.__dict__["tuning"] = tuning
    learned_before = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    transformer.requires_grad_(False)
    tuning.adapters[name] = methods
    generator = torch.Generator().manual_seed(seed)
    try:
        for method in methods:
            method.apply(transformer, name, generator)
    except Fault:
        remove_adapter(transformer, name)
        for parameter in learned_before:
            parameter.requires_grad_(True)
        raise
    tuning.selection.active = name
    transformer.train(transformer.training)  # the new modules too
    return model


def remove_adapter(model: Transformer, name: str = DEFAULT_NAME) -> None:
    """Take an adapter out of a model; without its last one the model is as it was before tune()."""
    tuning = tuning_of(model)
    if tuning is None:
        raise BadSetting(_("remove_adapter: the model has no adapter"))
    tuning.check_name(name)
    for path, module in list(model.named_modules()):
        if isinstance(module, ChangedModule):
            if name in module.changes:
                del module.changes[name]
            if not module.changes:
                replace_module(model, path, module.base)
        if isinstance(module, StackChanges) and name in module:
            change = module[name]
            assert isinstance(change, StackChange)
            change.remove_hooks()
            del module[name]
    del tuning.adapters[name]
    if tuning.selection.active == name:
        tuning.selection.active = None
    if not tuning.adapters:
        del model.__dict__["tuning"]


def check_new_name(model: Transformer, name: str) -> None:
    """A name is a Python identifier, and new to the model."""
    must(name.isidentifier(), "tune", _("the name of an adapter must be an identifier"), name, _("such as polite"))
    tuning = tuning_of(model)
    if tuning is not None and name in tuning.adapters:
        raise BadSetting(_("tune: the model has an adapter {name!r} already; give the new one another name", name=name))


def use_adapter(model: Transformer, name: str | None) -> None:
    """Let one adapter of a model act, or none."""
    tuning = tuning_of(model) or Tuning()
    tuning.selection.active = name if name is None else tuning.check_name(name)


def adapter_tensors(model: nn.Module, name: str = DEFAULT_NAME) -> dict[str, Tensor]:
    """What an adapter has learned, by the names in files, detached."""
    return {path: parameter.detach() for path, parameter in learned_parameters(model, name).items()}


def set_adapter_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], where: object, name: str = DEFAULT_NAME
) -> None:
    """Copy tensors into an adapter; every name and shape must fit before the first value is written."""
    copy_tensors(learned_parameters(model, name), tensors, where)


def copy_adapter(model: AnyTransformer) -> AnyTransformer:
    """A copy of a tuned model that has its own adapters and shares the frozen weights."""
    shared = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.requires_grad]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def base_fingerprint(model: nn.Module) -> str:
    """A hash of the model without its adapters: name, shape and up to 4096 evenly spaced numbers of each tensor.

    Any training changes every matrix it touches, so two bases of one fingerprint are the same weights.
    """
    digest = hashlib.sha256()
    tensors = {
        **dict(model.named_parameters()),
        **{path: b for path, b in model.named_buffers() if path.endswith("blocks")},
    }
    for path in sorted(path for path in tensors if ".changes." not in path):
        flat = tensors[path].detach().flatten()
        step = max(1, flat.numel() // MAX_FINGERPRINTED)
        sample = flat[::step][:MAX_FINGERPRINTED].contiguous().cpu()
        digest.update(f"{file_name(path)} {list(tensors[path].shape)}".encode())
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
