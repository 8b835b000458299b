"""Who sees whom: which tokens reach which outputs of an attention layer, measured rather than read from its mask.

A query sees a key if its output has a gradient with respect to that token. So every attention is measured alike:
windows, blocks, hashed chunks, sums, mixtures. The layer is built small and with random weights, but with the model's
window, block and chunk sizes, and its random blocks.

    measure_visibility("longformer:window=8", length=32)      one attention by name
    measure_visibility(model)                                 each kind of attention of a model
    measure_row(layer_attentions(model)[0], 2000, 700)        what one position sees in a long text

What was measured is then explained (Edge): a key is near, a global token, in a random block, remembered, …
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
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
from headwater.variants.bigbird import BigBirdAttention
from headwater.variants.hierarchy import HierarchicalStack
from headwater.variants.linear_attention import LinearAttention
from headwater.variants.linformer import Linformer
from headwater.variants.longformer import LongformerAttention
from headwater.variants.lsh_attention import LSHAttention
from headwater.variants.performer import Performer
from headwater.variants.transformer_xl import RecurrentAttention, segment_memory
from headwater.variants.transient_global import TransientGlobalAttention

DEFAULT_LENGTH = 64
MAX_LENGTH = 512  # of a measured matrix
MAX_ROW_LENGTH = 4096  # of one measured row
WIDTH = 16  # of the small layer


class Edge(IntEnum):
    """Why a query sees a key. UNSEEN: it does not."""

    UNSEEN = 0
    NEAR = 1  # by itself: full attention, a window, a neighbouring block or chunk
    GLOBAL = 2  # one of the two is a global token, or in the first or last block
    RANDOM = 3  # in a random block, of some head
    SUMMARY = 4  # through the summary of its block or chunk
    MEMORY = 5  # remembered from an earlier segment
    HASHED = 6  # in the same or the next chunk, sorted by hash
    MIXED = 7  # through sums of keys and values, or learned mixtures of positions


@dataclass(frozen=True, eq=False)
class Visibility(InspectionResult):
    """One attention: edges [queries, keys] of Edge. where: the layers that have it."""

    name: str
    where: str
    edges: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """[queries, keys] True where a query sees a key."""
        return self.edges > Edge.UNSEEN

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
        kinds = [LayerAttention("", attention) for attention in choose_attention(model, plain, causal)]
        return Visibilities(tuple(Visibility(model, kind.name, measure_edges(kind, length)) for kind in kinds))
    paths: dict[LayerAttention, list[str]] = {}
    for layer in layer_attentions(InspectedModel.wrap(model).model):
        paths.setdefault(replace(layer, path=""), []).append(layer.path)
    return Visibilities(
        tuple(Visibility(kind.name, _layers(where), measure_edges(kind, length)) for kind, where in paths.items())
    )


def _layers(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} … {paths[-1]}"


# ----------------------------------------------------------------------------------------------- what is to be measured


@dataclass(frozen=True)
class LayerAttention:
    """The attention of a layer, made small.

    step: the number of the layer, where that matters: random blocks are others in each. chunk: of a hierarchical stack,
    whose layers see their own chunk.
    """

    path: str
    attention: Attention
    step: int = 0
    chunk: int | None = None

    @property
    def name(self) -> str:
        """The part that decides who sees whom: the stack, the attention, its kernel or its mask."""
        if self.chunk is not None:
            return HierarchicalStack.__name__
        for part in (self.attention, self.attention.kernel):
            if type(part).__name__ not in ("Attention", "SDPA", "Eager"):
                return type(part).__name__
        return type(self.attention.mask).__name__


def layer_attentions(model: Transformer) -> list[LayerAttention]:
    """The self-attention of each layer; a hierarchical stack is one, for its chunks see each other at its end only."""
    layers = []
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is None:
            continue
        chunk = stack.spec.chunk if isinstance(stack.spec, HierarchicalStack) else None
        for step, index in enumerate(stack.order):
            for path, module in stack.layers[index].named_modules():
                if isinstance(module, AttentionLayer) and not isinstance(module, CrossAttentionLayer):
                    where = f"{side}.layers.{step}.{path}" if chunk is None else side
                    number = step if isinstance(module.spec, BigBirdAttention) else 0
                    layers.append(LayerAttention(where, small(module.spec), number, chunk))
        if chunk is not None:
            del layers[-len(stack.order) + 1 :]
    return layers


def small(attention: Attention) -> Attention:
    """The same attention with few and narrow heads, without norms and dropout, and without positions if it can be."""
    attention = replace(attention, head_dim=WIDTH // 2, v_head_dim=None, scale=None)
    attention = replace(attention, bias="", qk_norm=NoNorm(), dropout=0.0)
    heads = (
        attention.heads if isinstance(attention, BigBirdAttention) else 2
    )  # its heads have random blocks of their own
    attention = replace(attention, heads=heads, kv_heads=None)
    try:
        return replace(attention, position=NoPosition())
    except BadSetting:  # an attention that needs its own position encoding
        return attention


# ------------------------------------------------------------------------------------------------------------ measuring


def measure_edges(layer: LayerAttention, length: int) -> np.ndarray:
    """[queries, keys] of Edge."""
    return explain(layer, _measure(layer, torch.arange(length), length), np.arange(length))


def measure_row(layer: LayerAttention, length: int, position: int) -> np.ndarray:
    """[keys] of Edge: what one position of a text of up to MAX_ROW_LENGTH tokens sees."""
    if not (1 <= length <= MAX_ROW_LENGTH and 0 <= position < length):
        raise BadSetting(
            _(
                "length must be from 1 to {max} and position below it, got {length} and {position}; correct one",
                max=MAX_ROW_LENGTH,
                length=length,
                position=position,
            )
        )
    return explain(layer, _measure(layer, torch.tensor([position]), length), np.array([position]))[0]


def measure(attention: Attention, length: int) -> np.ndarray:
    """[queries, keys] of one layer: True where a query sees a key."""
    return _measure(LayerAttention("", small(attention)), torch.arange(length), length)


def _measure(layer: LayerAttention, queries: Tensor, length: int) -> np.ndarray:
    attention = layer.attention
    stack = Stack(WIDTH, Embeddings(length), (Block((Branch("self_attn", attention),)),))
    if layer.chunk is not None:
        plain = (stack.d_model, stack.embed, stack.layers, stack.final_norm, stack.order, stack.dropout)
        stack = HierarchicalStack(*plain, chunk=layer.chunk, top=stack.layers)
    is_causal = attention.mask.window_size[1] == 0
    spec = Model(decoder=stack) if is_causal else Model(encoder=stack)
    model = spec.build(seed=0).double().eval()
    for module in model.modules():
        if isinstance(module, AttentionLayer):
            module.register_forward_pre_hook(lambda _module, arguments: (*arguments[:2], layer.step))
    return _seen(model, _segments(attention, length), queries, length)


def _segments(attention: Attention, length: int) -> list[tuple[int, int]]:
    """The row in one piece; with a memory in segments, so that the picture shows where the memory ends."""
    size = min(attention.memory, length // 4) if isinstance(attention, RecurrentAttention) else length
    return list(pairwise([*range(0, length, max(1, size)), length]))


def _seen(model: Transformer, segments: list[tuple[int, int]], queries: Tensor, length: int) -> np.ndarray:
    """A batch of equal rows, one for each query: the gradient of its output with respect to every input."""
    inputs: list[Tensor] = []

    def keep_input(_module: object, _arguments: object, output: Tensor) -> Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1]

    handle = model.output_stack.embed.register_forward_hook(keep_input)
    ids = torch.arange(length).repeat(len(queries), 1)
    if len(segments) == 1:
        states = model(ids)
    else:
        memory = segment_memory(model, keep_gradients=True)
        states = torch.cat([model.decode(ids[:, a:b], cache=memory) for a, b in segments], 1)
    handle.remove()
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0), dtype=states.dtype)
    (states[torch.arange(len(queries)), queries] @ direction).sum().backward()
    gradients = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in inputs], 1)
    gradients = gradients.unflatten(0, (len(queries), -1)).flatten(1, 2)[:, :length]  # of chunks: whole rows again
    return (gradients.abs().amax(-1) > 0).numpy()


# ----------------------------------------------------------------------------------------------------------- explaining


def explain(layer: LayerAttention, seen: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """[queries, keys] of Edge, from what was measured: seen [queries, keys], and the positions of the queries."""
    attention = layer.attention
    length = seen.shape[1]
    query = queries[:, None]
    key = np.arange(length)
    near = np.ones_like(seen)
    other = Edge.NEAR
    if layer.chunk is not None:
        near = query // layer.chunk == key // layer.chunk
        other = Edge.SUMMARY
    elif isinstance(attention, LongformerAttention | TransientGlobalAttention):
        back, ahead = attention.mask.window_size
        assert back is not None and ahead is not None
        near = (query - key <= back) & (key - query <= ahead)
        other = Edge.GLOBAL if isinstance(attention, LongformerAttention) else Edge.SUMMARY
    elif isinstance(attention, BigBirdAttention) and not attention.reads_all(length):
        near = abs(query // attention.block_size - key // attention.block_size) <= 1
        other = Edge.RANDOM
    elif isinstance(attention, RecurrentAttention):
        size = _segments(attention, length)[0][1]
        near = key >= query // size * size
        other = Edge.MEMORY
    elif isinstance(attention, LSHAttention) and length > attention.chunk:
        near = np.zeros_like(seen)
        other = Edge.HASHED
    elif isinstance(attention.kernel, LinearAttention | Performer | Linformer):
        near = np.zeros_like(seen)
        other = Edge.MIXED

    edges = np.where(seen, np.where(near, Edge.NEAR, other), Edge.UNSEEN).astype(np.uint8)
    if isinstance(attention, BigBirdAttention) and other == Edge.RANDOM:
        last = (length - 1) // attention.block_size
        ends = [np.isin(position // attention.block_size, (0, last)) for position in (query, key)]
        edges[(edges == Edge.RANDOM) & (ends[0] | ends[1])] = Edge.GLOBAL
    return edges


# ---------------------------------------------------------------------------------------------------------- the figure


EDGE_COLORS = (
    "#ffffff",
    "#2c5f9e",
    "#d97706",
    "#8a5fb0",
    "#3a8f6b",
    "#b4541a",
    "#c2477f",
    "#7b8f96",
)  # in order of Edge


def edge_name(edge: Edge) -> str:
    """What a legend says."""
    names = {
        Edge.UNSEEN: _("not seen"),
        Edge.NEAR: _("near"),
        Edge.GLOBAL: _("global"),
        Edge.RANDOM: _("random block"),
        Edge.SUMMARY: _("by a summary"),
        Edge.MEMORY: _("memory"),
        Edge.HASHED: _("same bucket"),
        Edge.MIXED: _("in a sum or mixture"),
    }
    return names[edge]


@plot.register
def _draw_visibilities(result: Visibilities) -> Any:
    """One square per attention: a query per row, a key per column, in the color of the edge."""
    count = len(result.attentions)
    if not count:
        raise BadSetting(_("visibility: this model has no attention to plot"))
    columns = min(3, count)
    rows = -(-count // columns)
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(EDGE_COLORS)
    figure = plot_style.new_figure(3.6 * columns, 3.8 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[count:]:
        axis.set_visible(False)
    for axis, each in zip(axes, result.attentions, strict=False):
        axis.imshow(each.edges, cmap=colors, vmin=-0.5, vmax=len(Edge) - 0.5, interpolation="nearest")
        for edge in sorted({*each.edges.ravel().tolist()} - {int(Edge.UNSEEN)}):
            axis.plot([], [], "s", color=EDGE_COLORS[edge], label=str(edge_name(Edge(edge))))
        axis.legend(loc="upper right", fontsize=6, framealpha=0.8)
        axis.set(title=each.name, xlabel=f"key ({each.fraction:.0%} seen)", ylabel="query")
        axis.title.set_fontsize(9)
    return figure


@plot.register
def _draw_visibility(result: Visibility) -> Any:
    return plot(Visibilities((result,)))
