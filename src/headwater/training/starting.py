"""The model a run begins with: from scratch, or the body of another, with a new head where the task asks for one."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from headwater.core import LanguageHead, Learned, Model, Several, Tokens
from headwater.errors import BadSetting
from headwater.families.loading import find_model, load, spec_of
from headwater.fast.packed import Packed, PackedTable
from headwater.parts import swap
from headwater.text.tokenizer import Tokenizer
from headwater.weights.native import tensors_of

SHAPES = {  # what a task needs: (encoder, decoder)
    "text-to-text": (True, True), "spans": (True, True), "denoise": (True, True), "causal": (False, True),
    "packed": (False, True), "masked": (True, False), "masked-next": (True, False)}  # fmt: skip


def begin(spec: Model, start: str, task: str, labels: list[str], seed: int) -> nn.Module:
    """A built model. spec: what would be built from scratch; of a model to start from, its body is kept."""
    if not start:
        return spec.build(seed=seed)
    loaded = load(start)
    body = loaded.model
    unpack(body)
    _refuse_shape(body.spec, start, task)
    if _same_task(loaded, task, labels):
        return _own_memory(body)
    return with_head(body, spec, seed)


@torch.no_grad()
def with_head(body: Any, wanted: Model, seed: int) -> nn.Module:
    """The same stacks under the wanted head, which has its first weights, and with as many kinds of text."""
    kinds = max((part.kinds for part in _parts(wanted) if isinstance(part, Tokens)), default=0)
    stacks = swap(body.spec, Tokens, lambda embed: replace(embed, kinds=max(kinds, embed.kinds)))
    tied = tuple(pair for pair in body.spec.tied if not pair[0].startswith("head."))
    made: Any = replace(stacks, head=wanted.head, tied=tied).build(seed=seed)
    known = {name: value for name, value in tensors_of(body).items() if not name.startswith("head.")}
    for name, parameter in made.named_parameters():
        if name in known:
            parameter[: len(known[name])] = known[name]
            parameter[len(known[name]) :] = known[name][-1:]  # a kind it had not is at first like its last
        elif name.endswith("embed.kinds.weight"):
            parameter.zero_()
    return made


def unpack(model: Any) -> None:
    """Quantised layers as plain ones that can learn; a table that was shared with the head is shared again."""
    packed = [(path, module) for path, module in model.named_modules() if isinstance(module, Packed)]
    for path, module in packed:
        plain = _plain(module)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, plain)
    tables = [path for path, module in packed if isinstance(module, PackedTable)]
    head = dict(packed).get("head.out")
    if head is not None and tables and torch.equal(head.blocks, dict(packed)[tables[0]].blocks):
        model.spec = replace(model.spec, tied=(("head.out", tables[0]),))
        model.tie()


def _plain(module: Packed) -> nn.Module:
    if isinstance(module, PackedTable):
        return nn.Embedding.from_pretrained(module.weight, freeze=False)
    bias = getattr(module, "bias", None)
    made = nn.Linear(module.columns, module.rows, bias is not None, device="meta")
    made.weight = nn.Parameter(module.weight)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made


@torch.no_grad()
def _own_memory(model: nn.Module) -> nn.Module:
    """Weights mapped from a file are read-only; what learns needs memory of its own."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _same_task(loaded: Any, task: str, labels: list[str]) -> bool:
    """Whether the head is kept: that of the same labels, or of words where words are said."""
    if task in SHAPES:
        return isinstance(loaded.model.spec.head, Several if task == "masked-next" else LanguageHead)
    about = loaded.config.get("about", {})
    return about.get("task") == task and list(about.get("labels", [])) == labels


def _refuse_shape(spec: Model, start: str, task: str) -> None:
    has = spec.encoder is not None, spec.decoder is not None
    if task in SHAPES and has != SHAPES[task]:
        names = [" and ".join(n for n, there in zip(("an encoder", "a decoder"), some, strict=True) if there)
                 for some in (SHAPES[task], has)]  # fmt: skip
        raise BadSetting(f"--from {start}: {task} needs {names[0]}, the model has {names[1]}; start from another")


# ------------------------------------------------------------------------------------------- what is known before


@lru_cache(maxsize=4)
def spec_to_start_from(start: str) -> Model:
    """Its parts; no weight is read."""
    return spec_of(start)


def tokenizer_of_start(start: str) -> Tokenizer:
    """The tokenizer that belongs to a model."""
    path = find_model(start)
    if path.suffix == ".gguf":
        from headwater.text.gguf_text import from_gguf
        from headwater.weights.gguf import GgufFile

        return from_gguf(GgufFile(path).metadata, path)
    from headwater.text.load import load as load_tokenizer

    return load_tokenizer(path)


def places(spec: Model) -> int:
    """How many tokens it can read at once: 0 where there is no end."""
    tables = [part for part in _parts(spec) if isinstance(part, Learned)]
    return min((table.size - table.first for table in tables), default=0)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [part for item in dict.fromkeys(value) for part in _parts(item)]
    if not is_dataclass(value):
        return []
    return [value, *(part for f in fields(value) for part in _parts(getattr(value, f.name)))]
