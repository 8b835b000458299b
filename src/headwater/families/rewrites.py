"""The same function in other parts: changes of spec and weights together that change no answer.

    scale     tokens(id) · √d_model           ->  a table that is scaled already, no longer tied to the output
    bias      no bias on the output           ->  a bias of zeros
    sines     sine, cosine, sine, cosine, …   ->  all sines, then all cosines: the features change places everywhere

A family of transformers may have only the second form of a model that was trained here in the first. The first two are
exact; the third adds the same numbers in another order, so answers agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwater.core import LanguageHead, Model, Sinusoidal, SinusoidalHalves, Tokens, Transformer
from headwater.core.init import constants
from headwater.families.writer import first
from headwater.fast.packed import Packed
from headwater.parts import swap

Weights = dict[str, Tensor]  # every weight under each of its paths, tied or not


@dataclass(frozen=True)
class Rewrite:
    """name: for the report. spec: the other form, or the same where there is nothing to change."""

    name: str
    spec: Callable[[Model], Model]
    weights: Callable[[Model, Weights], Weights]


@torch.no_grad()
def rewritten(model: Transformer, changes: Sequence[Rewrite]) -> Transformer:
    """The model in another form. Weights that do not change are shared with the first."""
    if not changes:
        return model
    spec = model.spec
    weights = {path: p.detach() for path, p in model.named_parameters(remove_duplicate=False)}
    weights |= {f"{path}.weight": m.weight for path, m in model.named_modules() if isinstance(m, Packed)}
    for change in changes:
        weights, spec = change.weights(spec, weights), change.spec(spec)
    made = spec.skeleton()
    for path, _ in list(made.named_parameters()):
        owner, _, name = path.rpartition(".")
        setattr(made.get_submodule(owner), name, torch.nn.Parameter(weights[path]))
    made.tie()
    constants(made)
    return made.eval()


# --------------------------------------------------------------------------------------------- scale of the embedding

INPUTS = ("encoder.embed.tokens", "decoder.embed.tokens")


def _unscaled(spec: Model) -> Model:
    tied = tuple(pair for pair in spec.tied if set(pair) <= set(INPUTS))
    scales = {path: _scale(spec, path) for path in INPUTS if _scale(spec, path) is not None}
    if set(scales.values()) == {1.0} or any(scales[path] != scales[home] for path, home in tied):
        return spec
    return replace(swap(spec, Tokens, lambda embed: replace(embed, scale=1.0)), tied=tied)


def _scale(spec: Model, path: str) -> float | None:
    stack: Any = getattr(spec, path.partition(".")[0])
    return None if stack is None else getattr(stack.embed, "scale", 1.0)


def _scaled_tables(spec: Model, weights: Weights) -> Weights:
    tables = {f"{path}.weight": _scale(spec, path) for path in INPUTS}
    return {path: t * scale if (scale := tables.get(path)) else t for path, t in weights.items()}


# ------------------------------------------------------------------------------------------------- bias of the output


def _with_bias(spec: Model) -> Model:
    plain = isinstance(spec.head, LanguageHead) and not spec.head.bias
    return replace(spec, head=replace(spec.head, bias=True)) if plain else spec  # type: ignore[type-var]


def _zero_bias(spec: Model, weights: Weights) -> Weights:
    table = weights["head.out.weight"]
    return weights | {"head.out.bias": table.new_zeros(len(table))}


# --------------------------------------------------------------------------------------------------- order of the sines


def _halved(spec: Model) -> Model:
    if first(spec, Sinusoidal) is None or not isinstance(spec.head, LanguageHead):
        return spec
    if any(kind not in _AXES for kind in _kinds(spec)):
        return spec
    return swap(spec, Sinusoidal, lambda sines: SinusoidalHalves(sines.base))


def _kinds(spec: Model) -> set[str]:
    """The paths of the weights, without what differs from layer to layer."""
    return {_kind(path) for path, _ in spec.skeleton().named_parameters()}


def _kind(path: str) -> str:
    """decoder.layers.3.self_attn.out.weight -> attn.out.weight"""
    *_, owner, name, last = ("", "", *path.replace("self_attn", "attn").replace("cross_attn", "attn").split("."))
    owner = "" if owner.isdigit() or owner in ("encoder", "decoder") else f"{owner}."
    return f"norm.{last}" if name.endswith("norm") and owner != "attn." else f"{owner}{name}.{last}"


# Which axis of a weight runs over the features of the residual stream; None: it has none.
_AXES: dict[str, int | None] = {
    "embed.tokens.weight": 1, "embed.kinds.weight": 1, "norm.weight": 0, "norm.bias": 0,
    **{f"attn.{name}.weight": 1 for name in "qkv"}, **{f"attn.{name}.bias": None for name in "qkv"},
    "attn.out.weight": 0, "attn.out.bias": 0,
    "ffn.up.weight": 1, "ffn.up.bias": None, "ffn.gate.weight": 1, "ffn.gate.bias": None,
    "ffn.down.weight": 0, "ffn.down.bias": 0, "head.out.weight": 1, "head.out.bias": None,
}  # fmt: skip


def _reordered(spec: Model, weights: Weights) -> Weights:
    stack: Any = spec.decoder or spec.encoder
    order = torch.cat((torch.arange(0, stack.d_model, 2), torch.arange(1, stack.d_model, 2)))
    order = order.to(weights["head.out.weight"].device)
    axes = {path: _AXES[_kind(path)] for path in weights}
    return {path: t if (axis := axes[path]) is None else t.index_select(axis, order) for path, t in weights.items()}


REWRITES = (
    Rewrite("bias", _with_bias, _zero_bias),
    Rewrite("sines", _halved, _reordered),
    Rewrite("scale", _unscaled, _scaled_tables),
)
