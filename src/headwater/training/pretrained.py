"""The initial model of a run: built from scratch, or fine-tuned from a pretrained model with a new head."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from headwater.core import Embeddings, Learned, Model
from headwater.errors import BadSetting
from headwater.families.load import find_model, load, load_spec
from headwater.i18n import _, join
from headwater.parts import swap
from headwater.quantization.layers import QuantizedEmbedding, QuantizedModule
from headwater.tasks import Task
from headwater.text.tokenizer import Tokenizer
from headwater.weights.native import named_tensors


def init_model(spec: Model, init_from: str, task: Task[Any], labels: list[str], seed: int) -> nn.Module:
    """The initial model: built from spec, or with init_from the pretrained model, with a new head where it must."""
    if not init_from:
        return spec.build(seed=seed)
    loaded = load(init_from)
    body = loaded.model
    dequantize_model(body)
    _check_stacks(body.spec, init_from, task)
    if task.can_keep_head(body.spec, loaded.config.get("metadata", {}), labels):
        return clone_parameters(body)
    return replace_head(body, spec, seed)


@torch.no_grad()
def replace_head(body: Any, target_spec: Model, seed: int) -> nn.Module:
    """The pretrained stacks with the head and the number of token types of target_spec, newly initialized."""
    token_types = max((part.token_types for part in _all_parts(target_spec) if isinstance(part, Embeddings)), default=0)
    stacks = swap(body.spec, Embeddings, lambda embed: replace(embed, token_types=max(token_types, embed.token_types)))
    tied = tuple(pair for pair in body.spec.tied if not pair[0].startswith("head."))
    built: Any = replace(stacks, head=target_spec.head, tied=tied).build(seed=seed)
    known = {name: value for name, value in named_tensors(body).items() if not name.startswith("head.")}
    for name, parameter in built.named_parameters():
        if name in known:
            parameter[: len(known[name])] = known[name]
            parameter[len(known[name]) :] = known[name][-1:]  # a new token type starts as its last one
        elif name.endswith("embed.token_types.weight"):
            parameter.zero_()
    return built


def dequantize_model(model: Any) -> None:
    """Replace quantized layers by trainable ones; a table that was tied to the head is tied again."""
    quantized = [(path, module) for path, module in model.named_modules() if isinstance(module, QuantizedModule)]
    for path, module in quantized:
        plain = _dequantize_module(module)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, plain)
    tables = [path for path, module in quantized if isinstance(module, QuantizedEmbedding)]
    head = dict(quantized).get("head.out")
    if head is not None and tables and torch.equal(head.blocks, dict(quantized)[tables[0]].blocks):
        model.spec = replace(model.spec, tied=(("head.out", tables[0]),))
        model.tie_weights()


def _dequantize_module(module: QuantizedModule) -> nn.Module:
    if isinstance(module, QuantizedEmbedding):
        return nn.Embedding.from_pretrained(module.weight, freeze=False)
    bias = getattr(module, "bias", None)
    built = nn.Linear(module.columns, module.rows, bias is not None, device="meta")
    built.weight = nn.Parameter(module.weight)
    if bias is not None:
        built.bias = nn.Parameter(bias.detach().clone())
    return built


@torch.no_grad()
def clone_parameters(model: nn.Module) -> nn.Module:
    """Copy the parameters: those mapped from a file are read-only."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _check_stacks(spec: Model, init_from: str, task: Task[Any]) -> None:
    """The pretrained model must have the stacks that the task needs."""
    present = (spec.encoder is not None, spec.decoder is not None)
    if task.stacks is None or task.stacks == present:
        return
    needed_names, present_names = (
        join(_(" and "), (name for name, there in zip((_("an encoder"), _("a decoder")), some, strict=True) if there))
        for some in (task.stacks, present)
    )
    raise BadSetting(
        _(
            "--init-from {init_from}: {task} needs {names}, the model has {names2}; start from another",
            init_from=init_from,
            task=task.objective or task.name,
            names=needed_names,
            names2=present_names,
        )
    )


# ----------------------------------------------------------------------------- spec and tokenizer of a pretrained model


@lru_cache(maxsize=4)
def pretrained_spec(init_from: str) -> Model:
    """The spec of a pretrained model; no weight is read."""
    return load_spec(init_from)


def pretrained_tokenizer(init_from: str) -> Tokenizer:
    """The tokenizer of a pretrained model."""
    path = find_model(init_from)
    if path.suffix == ".gguf":
        from headwater.text.loaders.gguf import tokenizer_from_gguf
        from headwater.weights.gguf import GgufFile

        return tokenizer_from_gguf(GgufFile(path).metadata, path)
    from headwater.text.load import load_tokenizer

    return load_tokenizer(path)


def max_positions(spec: Model) -> int:
    """The maximum sequence length of a model with learned positions; 0: no limit."""
    tables = [part for part in _all_parts(spec) if isinstance(part, Learned)]
    return min((table.size - table.offset for table in tables), default=0)


def _all_parts(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [part for item in dict.fromkeys(value) for part in _all_parts(item)]
    if not is_dataclass(value):
        return []
    return [value, *(part for f in fields(value) for part in _all_parts(getattr(value, f.name)))]
