"""A pretrained model with a new head: its stacks keep their weights, in whatever format they are."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from headwater.core import Embeddings, Model, Transformer
from headwater.parts import swap
from headwater.quantization.layers import replace_module
from headwater.weights.native import named_tensors, quantized_layers


@torch.no_grad()
def replace_head(body: Transformer, target_spec: Model, seed: int) -> Transformer:
    """The pretrained stacks with the head and the number of token types of target_spec, newly initialized."""
    token_types = max((part.token_types for part in all_parts(target_spec) if isinstance(part, Embeddings)), default=0)
    stacks = swap(body.spec, Embeddings, lambda embed: replace(embed, token_types=max(token_types, embed.token_types)))
    tied = tuple(pair for pair in body.spec.tied if not pair[0].startswith("head."))
    built = replace(stacks, head=target_spec.head, tied=tied).build(seed=seed)
    known = {name: value for name, value in named_tensors(body).items() if not name.startswith("head.")}
    for name, parameter in built.named_parameters():
        if name in known:
            parameter[: len(known[name])] = known[name]
            parameter[len(known[name]) :] = known[name][-1:]  # a new token type starts as its last one
        elif name.endswith("embed.token_types.weight"):
            parameter.zero_()
    for path, layer in quantized_layers(body).items():
        if not path.startswith("head."):
            replace_module(built, path, layer)
    return built


def all_parts(value: Any) -> list[Any]:
    """A part and all parts in it; of equal ones in a tuple the first."""
    if isinstance(value, tuple):
        return [part for item in dict.fromkeys(value) for part in all_parts(item)]
    if not is_dataclass(value):
        return []
    return [value, *(part for f in fields(value) for part in all_parts(getattr(value, f.name)))]
