"""The initial model of a run: built from scratch, or fine-tuned from a pretrained model with a new head."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from headwater.core import Learned, Model, Transformer
from headwater.errors import BadSetting
from headwater.families.load import find_model, load, load_spec
from headwater.families.new_head import all_parts, replace_head
from headwater.i18n import _, join
from headwater.quantization.layers import QuantizedEmbedding, QuantizedModule
from headwater.tasks import Task
from headwater.text.tokenizer import Tokenizer
from headwater.training.config import TrainConfig
from headwater.training.tuned import is_tuned, tuning_methods
from headwater.tuning import base_fingerprint, tune, tuning_of
from headwater.tuning.base import check_merged
from headwater.variants.longformer import make_first_token_global


def init_model(spec: Model, config: TrainConfig, task: Task[Any], labels: list[str]) -> Transformer:
    """The initial model: built from spec, or with init_from the pretrained model, with a new head where it must.

    A model that is tuned by a method (--tune) keeps its weights as they are, quantized or mapped from a file.
    """
    if not config.init_from:
        if task.needs_pretrained:
            raise BadSetting(
                _("{task} tunes a model that can answer already; give one: --init-from smollm2", task=task.name)
            )
        return spec.build(seed=config.seed)
    loaded = load(config.init_from)
    body = loaded.model
    check_merged(body, f"--init-from {config.init_from}")
    fingerprint = base_fingerprint(body) if is_tuned(config) else ""
    if not is_tuned(config):
        dequantize_model(body)
    _check_stacks(body.spec, config.init_from, task)
    kept = task.can_keep_head(body.spec, loaded.config.get("metadata", {}), labels)
    model = task.adapt_model(body if kept else replace_head(body, spec, config.seed), config)
    if not is_tuned(config):
        if model.encoder is not None and model.decoder is not None:
            make_first_token_global(model)
        return clone_parameters(model) if kept else model
    tune(model, *tuning_methods(config, task.new_head(model.spec)), seed=config.seed)
    tuning = tuning_of(model)
    assert tuning is not None
    tuning.base = config.init_from
    tuning.fingerprint = fingerprint
    return model


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
def clone_parameters(model: Transformer) -> Transformer:
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
    tables = [part for part in all_parts(spec) if isinstance(part, Learned)]
    return min((table.size - table.offset for table in tables), default=0)
