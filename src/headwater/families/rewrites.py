"""Equivalence-preserving rewrites of a model: spec and weights change together, the outputs stay the same.

    embedding_scale     tokens(id) · √d_model          ->  a table already scaled, no longer tied to the output
    output_bias         no bias on the output          ->  a bias of zeros
    sinusoidal_halves   sine, cosine, sine, cosine, …  ->  all sines, then all cosines: features are permuted everywhere

A transformers family may have only the second form of a model. The first two are exact; the third adds the same numbers
in another order, so outputs agree up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwater.core import Embeddings, LMHead, Model, Sinusoidal, SinusoidalHalves, Transformer
from headwater.core.init import init_buffers
from headwater.families.config_writers import find_part
from headwater.parts import swap
from headwater.quantization.layers import QuantizedModule

Weights = dict[str, Tensor]  # every weight under each of its paths, tied ones too


@dataclass(frozen=True)
class Rewrite:
    """One rewrite. rewrite_spec returns the spec unchanged where it does not apply."""

    name: str
    rewrite_spec: Callable[[Model], Model]
    rewrite_weights: Callable[[Model, Weights], Weights]


@torch.no_grad()
def apply_rewrites(model: Transformer, rewrites: Sequence[Rewrite]) -> Transformer:
    """The model in another form. Weights that do not change are shared with the original."""
    if not rewrites:
        return model
    spec = model.spec
    weights = {path: p.detach() for path, p in model.named_parameters(remove_duplicate=False)}
    weights |= {f"{path}.weight": m.weight for path, m in model.named_modules() if isinstance(m, QuantizedModule)}
    for rewrite in rewrites:
        weights = rewrite.rewrite_weights(spec, weights)  # of the spec before the rewrite
        spec = rewrite.rewrite_spec(spec)

    rewritten = spec.on_meta()
    for path, _unused in list(rewritten.named_parameters()):
        owner, _, name = path.rpartition(".")
        setattr(rewritten.get_submodule(owner), name, torch.nn.Parameter(weights[path]))
    rewritten.tie_weights()
    init_buffers(rewritten)
    return rewritten.eval()


# ------------------------------------------------------------------------------------------------------ embedding scale

INPUT_EMBEDDINGS = ("encoder.embed.tokens", "decoder.embed.tokens")


def _fold_embedding_scale_spec(spec: Model) -> Model:
    tied = tuple(pair for pair in spec.tied if set(pair) <= set(INPUT_EMBEDDINGS))
    scales = {path: _embedding_scale(spec, path) for path in INPUT_EMBEDDINGS}
    if set(scales.values()) <= {1.0, None} or any(scales[path] != scales[owner] for path, owner in tied):
        return spec
    return replace(swap(spec, Embeddings, lambda embed: replace(embed, scale=1.0)), tied=tied)


def _embedding_scale(spec: Model, path: str) -> float | None:
    stack: Any = getattr(spec, path.partition(".")[0])
    return None if stack is None else getattr(stack.embed, "scale", 1.0)


def _fold_embedding_scale_weights(spec: Model, weights: Weights) -> Weights:
    scaled = dict(weights)
    for path in INPUT_EMBEDDINGS:
        scale = _embedding_scale(spec, path)
        if scale and f"{path}.weight" in weights:
            scaled[f"{path}.weight"] = weights[f"{path}.weight"] * scale
    return scaled


# ---------------------------------------------------------------------------------------------------------- output bias


def _add_output_bias_spec(spec: Model) -> Model:
    if not isinstance(spec.head, LMHead) or spec.head.bias:
        return spec
    return replace(spec, head=replace(spec.head, bias=True))


def _add_output_bias_weights(spec: Model, weights: Weights) -> Weights:
    table = weights["head.out.weight"]
    return weights | {"head.out.bias": table.new_zeros(len(table))}


# ---------------------------------------------------------------------------------------------------- sinusoidal halves


def _sinusoidal_halves_spec(spec: Model) -> Model:
    if find_part(spec, Sinusoidal) is None or not isinstance(spec.head, LMHead):
        return spec
    if any(kind not in _FEATURE_AXES for kind in _weight_kinds(spec)):
        return spec
    return swap(spec, Sinusoidal, lambda sines: SinusoidalHalves(sines.base))


def _weight_kinds(spec: Model) -> set[str]:
    """The kinds of weights that a model has."""
    return {_weight_kind(path) for path, _ in spec.on_meta().named_parameters()}


def _weight_kind(path: str) -> str:
    """A path without its layer: decoder.layers.3.self_attn.out.weight -> attn.out.weight."""
    names = path.replace("self_attn", "attn").replace("cross_attn", "attn").split(".")
    owner, name, suffix = ["", "", *names][-3:]
    if owner.isdigit() or owner in ("encoder", "decoder"):
        owner = ""
    if name.endswith("norm") and owner != "attn":
        return f"norm.{suffix}"
    return f"{owner}.{name}.{suffix}" if owner else f"{name}.{suffix}"


# The axis of a weight that runs over the features of the residual stream; None: it has none.
_FEATURE_AXES: dict[str, int | None] = {
    "embed.tokens.weight": 1,
    "embed.token_types.weight": 1,
    "norm.weight": 0,
    "norm.bias": 0,
    **{f"attn.{name}.weight": 1 for name in "qkv"},
    **{f"attn.{name}.bias": None for name in "qkv"},
    "attn.out.weight": 0,
    "attn.out.bias": 0,
    "ffn.up.weight": 1,
    "ffn.up.bias": None,
    "ffn.gate.weight": 1,
    "ffn.gate.bias": None,
    "ffn.down.weight": 0,
    "ffn.down.bias": 0,
    "head.out.weight": 1,
    "head.out.bias": None,
}


def _sinusoidal_halves_weights(spec: Model, weights: Weights) -> Weights:
    stack: Any = spec.decoder or spec.encoder
    order = torch.cat((torch.arange(0, stack.d_model, 2), torch.arange(1, stack.d_model, 2)))
    order = order.to(weights["head.out.weight"].device)
    permuted = {}
    for path, weight in weights.items():
        axis = _FEATURE_AXES[_weight_kind(path)]
        permuted[path] = weight if axis is None else weight.index_select(axis, order)
    return permuted


REWRITES = (
    Rewrite("output_bias", _add_output_bias_spec, _add_output_bias_weights),
    Rewrite("sinusoidal_halves", _sinusoidal_halves_spec, _sinusoidal_halves_weights),
    Rewrite("embedding_scale", _fold_embedding_scale_spec, _fold_embedding_scale_weights),
)
