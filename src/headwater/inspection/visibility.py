"""Who sees whom: which tokens reach which outputs of an attention layer, measured rather than read from its mask.

A query sees a key if its output has a gradient with respect to that token. So every attention is measured alike:
windows, blocks, hashed chunks, sums, mixtures. The layer is built small and with random weights, but with the model's
window, block and chunk sizes.

    measure_visibility("longformer:window=8", length=32)      one attention by name
    measure_visibility(model)                                 each kind of attention of a model
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core.attention import Attention, AttentionLayer, CrossAttentionLayer
from headwater.core.embeddings import Embeddings
from headwater.core.masks import Bidirectional, Causal
from headwater.core.model import Model, Transformer
from headwater.core.norms import NoNorm
from headwater.core.positions import NoPosition
from headwater.core.stack import Block, Branch, Stack
from headwater.errors import BadSetting
from headwater.families.attentions import choose_attention
from headwater.i18n import _
from headwater.inspection import plot_style
from headwater.inspection.figures import plot
from headwater.inspection.inputs import InspectedModel, ModelLike
from headwater.inspection.results import InspectionResult
from headwater.variants.transformer_xl import RecurrentAttention, segment_memory

DEFAULT_LENGTH = 64
MAX_LENGTH = 512
WIDTH = 16  # of the small layer


@dataclass(frozen=True, eq=False)
class Visibility(InspectionResult):
    """One attention: seen [queries, keys] is True where a query sees a key. where: the layers that have it."""

    name: str
    where: str
    seen: np.ndarray

    @property
    def fraction(self) -> float:
        return float(self.seen.mean())

    def lines(self) -> list[str]:
        max_seen = int(self.seen.sum(1).max())
        return [
            _(
                "{where}: {name}, a token sees at most {max_seen} of {length}",
                where=self.where,
                name=self.name,
                max_seen=max_seen,
                length=len(self.seen),
            )
        ]


@dataclass(frozen=True, eq=False)
class Visibilities(InspectionResult):
    """Each kind of attention of a model, or of several names."""

    attentions: tuple[Visibility, ...]

    def lines(self) -> list[str]:
        return [line for each in self.attentions for line in each.lines()]


def measure_visibility(model: ModelLike | str, length: int = DEFAULT_LENGTH, causal: bool = False) -> Visibilities:
    """Who sees whom in each kind of attention of a model.

    model   a model, or the name of an attention as --attention takes it: "longformer:window=8", "lsh:chunk=4"
    length  tokens of the row that is measured
    causal  of a name: in a decoder
    """
    if not 1 <= length <= MAX_LENGTH:
        raise BadSetting(_("length must be from 1 to {max}, got {length}; 64 is usual", max=MAX_LENGTH, length=length))
    if isinstance(model, str):
        plain = Attention(2, head_dim=WIDTH // 2, mask=Causal() if causal else Bidirectional())
        chosen = choose_attention(model, plain, causal)
        return Visibilities(tuple(Visibility(model, _type_name(each), measure(each, length)) for each in chosen))
    return Visibilities(tuple(_of_model(InspectedModel.wrap(model).model, length)))


def _of_model(model: Transformer, length: int) -> list[Visibility]:
    layers_of: dict[Attention, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, AttentionLayer) and not isinstance(module, CrossAttentionLayer):
            layers_of.setdefault(small(module.spec), []).append(path)
    return [
        Visibility(_type_name(attention), _layers(paths), measure(attention, length))
        for attention, paths in layers_of.items()
    ]


def _layers(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"


def _type_name(attention: Attention) -> str:
    """The part that decides who sees whom: the attention, its kernel or its mask."""
    for part in (attention, attention.kernel):
        if type(part).__name__ not in ("Attention", "SDPA", "Eager"):
            return type(part).__name__
    return type(attention.mask).__name__


def small(attention: Attention) -> Attention:
    """The same attention with few and narrow heads, without norms and dropout, and without positions if it can be."""
    narrow = replace(attention, heads=2, kv_heads=None, head_dim=WIDTH // 2, v_head_dim=None, scale=None)
    plain = replace(narrow, bias="", qk_norm=NoNorm(), dropout=0.0)
    try:
        return replace(plain, position=NoPosition())
    except BadSetting:  # an attention that needs its own position encoding
        return plain


def measure(attention: Attention, length: int) -> np.ndarray:
    """[queries, keys] of one layer."""
    embed = Embeddings(length)
    stack = Stack(WIDTH, embed, (Block((Branch("self_attn", small(attention)),)),))
    is_causal = attention.mask.window_size[1] == 0
    spec = Model(decoder=stack) if is_causal else Model(encoder=stack)
    model = spec.build(seed=0).double().eval()
    return _seen(model, _segments(attention, length), length)


def _segments(attention: Attention, length: int) -> list[tuple[int, int]]:
    """The row in one piece; with a memory in segments, so that the picture shows where the memory ends."""
    size = min(attention.memory, length // 4) if isinstance(attention, RecurrentAttention) else length
    return list(pairwise([*range(0, length, max(1, size)), length]))


def _seen(model: Transformer, segments: list[tuple[int, int]], length: int) -> np.ndarray:
    """Row i of a batch of equal rows gives the gradient of output i with respect to every input."""
    inputs: list[Tensor] = []

    def keep_input(_module: object, _arguments: object, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1]

    handle = model.output_stack.embed.register_forward_hook(keep_input)
    ids = torch.arange(length).repeat(length, 1)
    if len(segments) == 1:
        states = model(ids)
    else:
        memory = segment_memory(model, keep_gradients=True)
        states = torch.cat([model.decode(ids[:, a:b], cache=memory) for a, b in segments], 1)
    handle.remove()
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    index = torch.arange(length)
    (states[index, index] @ direction).sum().backward()
    gradients = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs], 1)
    return (gradients.abs().amax(-1) > 0).numpy()


# ---------------------------------------------------------------------------------------------------------- the figure


@plot.register
def _draw_visibilities(result: Visibilities) -> Any:
    """One square per attention: a query per row, a key per column, dark where the query sees the key."""
    count = len(result.attentions)
    if not count:
        raise BadSetting(_("visibility: this model has no attention to plot"))
    columns = min(3, count)
    rows = -(-count // columns)
    figure = plot_style.new_figure(3.6 * columns, 3.8 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis, each in zip(axes, result.attentions, strict=False):
        axis.imshow(each.seen, cmap="Greys", vmin=0, vmax=1.4, interpolation="nearest")
        axis.set(title=each.name, xlabel=f"key ({each.fraction:.0%} seen)", ylabel="query")
        axis.title.set_fontsize(9)
    return figure


@plot.register
def _draw_visibility(result: Visibility) -> Any:
    return plot(Visibilities((result,)))
