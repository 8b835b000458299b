"""A stack: an embedding, blocks of branches around one residual stream, the positions they share, a last norm.

One branch:   x ──┬── norm ── layer ── out_norm ── dropout ── + ── post_norm ──
                  └───────────────────────────────────────────┘

Pre-norm fills only `norm`, post-norm (the paper) only `post_norm`, sandwich both `norm` and `out_norm`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwater.core.attention import AttentionLayer, Call, CrossAttentionLayer, Lane
from headwater.core.dropout import Dropout
from headwater.core.embed import Rows
from headwater.core.kinds import Embedding, Layer, Layers, Norm
from headwater.core.masks import Everyone, Sight
from headwater.core.norms import NoNorm
from headwater.core.positions import Position
from headwater.parts import must, part


@part
class Branch:
    """One layer beside the residual stream; role is its name in the block: self_attn, cross_attn, ffn."""

    role: str
    layer: Layer
    norm: Norm = NoNorm()
    out_norm: Norm = NoNorm()
    post_norm: Norm = NoNorm()

    def __post_init__(self) -> None:
        must(self.role.isidentifier(), self, "role must be a name", self.role, "such as self_attn or ffn")


def pre(norm: Any, **layer: Any) -> Branch:
    """pre(RMSNorm(), ffn=FeedForward(64)): the norm on the way in."""
    return Branch(*_one(layer), norm=norm)


def post(norm: Any, **layer: Any) -> Branch:
    """post(LayerNorm(), ffn=FeedForward(64)): the norm on the sum."""
    return Branch(*_one(layer), post_norm=norm)


def sandwich(norm: Any, **layer: Any) -> Branch:
    """sandwich(RMSNorm(), ffn=FeedForward(64)): a norm on the way in and one on the way out."""
    return Branch(*_one(layer), norm=norm, out_norm=norm)


def _one(layer: dict[str, Any]) -> tuple[str, Any]:
    must(len(layer) == 1, "Branch", "one role=layer must be given", sorted(layer), "such as ffn=FeedForward(2048)")
    return next(iter(layer.items()))


@part
class Block(Layers):
    """Branches one after another: each reads what the one before it wrote."""

    branches: tuple[Branch, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_block(self)

    def build(self, d_model: int) -> BlockLayer:
        return BlockLayer(self, d_model)


@part
class ParallelBlock(Layers):
    """Branches side by side: all read the same stream, and their sum is added to it (GPT-J, GPT-NeoX)."""

    branches: tuple[Branch, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_block(self)
        alone = all(branch.post_norm == NoNorm() for branch in self.branches)
        must(alone, self, "branches must not have a post_norm", "one", "there is one sum for all of them; use norm")

    def build(self, d_model: int) -> BlockLayer:
        return ParallelBlockLayer(self, d_model)


def _check_block(block: Block | ParallelBlock) -> None:
    roles = [branch.role for branch in block.branches]
    must(len(roles) == len(set(roles)) and bool(roles), block, "roles must be given and differ", roles, "rename one")
    must(0 <= block.dropout < 1, block, "dropout must be from 0 up to 1", block.dropout, "0.1 is usual")


@part
class Stack:
    """d_model is said here and nowhere below. order: which layer runs at each step, for shared layers (ALBERT);
    empty means each once, in turn.
    """

    d_model: int
    embed: Embedding
    layers: tuple[Layers, ...]
    final_norm: Norm = NoNorm()
    order: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        must(self.d_model >= 1, self, "d_model must be at least 1", self.d_model, "512 is usual")
        must(len(self.layers) <= 10_000, self, "there may be at most 10000 layers", len(self.layers), "use fewer")
        known = all(type(i) is int and 0 <= i < len(self.layers) for i in self.order)
        must(known, self, f"order must name layers below {len(self.layers)}", self.order, "correct it")
        must(0 <= self.dropout < 1, self, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")

    def build(self) -> TransformerStack:
        return TransformerStack(self)


class BlockLayer(nn.Module):
    def __init__(self, spec: Block | ParallelBlock, d_model: int) -> None:
        super().__init__()
        for branch in spec.branches:
            self.add_module(branch.role, branch.layer.build(d_model))
            for slot in ("norm", "out_norm", "post_norm"):
                self.add_module(f"{branch.role}_{slot}", getattr(branch, slot).build(d_model))
        ends = ("", "_norm", "_out_norm", "_post_norm")
        self.names = tuple(tuple(branch.role + end for end in ends) for branch in spec.branches)
        self.dropout = Dropout(spec.dropout)

    def forward(self, x: Tensor, call: Call, step: int) -> Tensor:
        for layer, norm, out_norm, post_norm in self.names:
            y = getattr(self, layer)(getattr(self, norm)(x), call, step)
            x = self.joined(getattr(self, post_norm), x, getattr(self, out_norm)(y))
        return x

    def joined(self, norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """norm(x + dropout(y)), in one pass where the norm knows how."""
        if hasattr(norm, "takes_branch"):
            return norm(x, y, self.dropout.p if self.training else 0.0)
        return norm(self.dropout.added(x, y))


class ParallelBlockLayer(BlockLayer):
    def forward(self, x: Tensor, call: Call, step: int) -> Tensor:
        total = x
        for layer, norm, out_norm, _ in self.names:
            y = getattr(self, layer)(getattr(self, norm)(x), call, step)
            total = self.dropout.added(total, getattr(self, out_norm)(y))
        return total


class TransformerStack(nn.Module):
    """lanes: the pairs (rule, index of a position) that occur; each attention layer knows the number of its own.

    recompute: forget what happens inside each layer and work it out again on the way back (gradient checkpointing).
    """

    def __init__(self, spec: Stack) -> None:
        super().__init__()
        self.spec, self.recompute = spec, False
        self.embed = spec.embed.build(spec.d_model)
        self.layers = nn.ModuleList(layer.build(spec.d_model) for layer in spec.layers)
        self.order = spec.order or tuple(range(len(spec.layers)))
        self.positions = nn.ModuleList()
        self.lanes: list[tuple[Any, int]] = []
        self._share()
        self.final_norm, self.dropout = spec.final_norm.build(spec.d_model), Dropout(spec.dropout)
        self.nowhere = Position()

    def _share(self) -> None:
        """Equal positions of equal heads become one module, owned here: T5's table, the angles of RoPE."""
        owned: list[Any] = []
        for layer in self.layers:
            attentions = [m for m in layer.modules() if isinstance(m, AttentionLayer)]
            for nth, attention in enumerate(attentions):
                attention.nth = nth
                if isinstance(attention, CrossAttentionLayer):
                    continue
                spec = attention.spec
                key = (spec.position, attention.head_dim, attention.heads)
                if key not in owned or not spec.position.shared:
                    owned.append(key)
                    self.positions.append(spec.position.build(attention.head_dim, attention.heads))
                at = len(owned) - 1 if not spec.position.shared else owned.index(key)
                if (spec.sees, at) not in self.lanes:
                    self.lanes.append((spec.sees, at))
                attention.lane = self.lanes.index((spec.sees, at))

    def slots(self, lane: int) -> dict[tuple[int, int], tuple[int, int, int]]:
        """The slots a cache needs in one lane: (step, nth) -> (kv_heads, head_dim, v_head_dim)."""
        found = {}
        for step, index in enumerate(self.order):
            for a in self.layers[index].modules():
                if isinstance(a, AttentionLayer) and not isinstance(a, CrossAttentionLayer) and a.lane == lane:
                    found[a.slot(step)] = a.kv_heads, a.head_dim, a.v_head_dim
        return found

    def forward(self, rows: Rows, cache: Any, memory: Rows | None = None) -> Tensor:
        """[B, Q, D] the states of these rows; cross-attention reads memory.states [B, S, D]."""
        places = rows.places_after(cache.count)
        aligned = cache.aligned and rows.places is None and rows.gapless
        x = self.embed(rows, places)
        lanes = []
        for number, (rule, at) in enumerate(self.lanes):
            k_places, keep = cache.keys(number, places, rows.keep)
            docs = rows.documents
            sight = Sight(rule, self.positions[at], places, k_places, keep, docs, docs, aligned)  # type: ignore[arg-type]
            lanes.append(Lane.of(sight, places, x.dtype))
        cache.advance(places.shape[1], rows.keep)
        call = Call(tuple(lanes), cache)
        if memory is not None:
            call = replace(call, memory=memory.states, cross=self._across(places, rows, memory, x.dtype))
        again = self.recompute and torch.is_grad_enabled() and cache.made_for is None  # a cache must not be told twice
        run: Callable[..., Tensor] = self._again if again else self._once
        for step, index in enumerate(self.order):
            x = run(self.layers[index], x, call, step)
        return self.dropout(self.final_norm(x))

    def _across(self, places: Tensor, rows: Rows, memory: Rows, dtype: torch.dtype) -> Lane:
        """What cross-attention may see: all of the source that is real and, where packed, of the same document."""
        assert memory.states is not None
        there = torch.arange(memory.states.shape[1], device=places.device)[None]
        docs = (rows.documents, memory.documents)
        return Lane.of(Sight(Everyone(), self.nowhere, places, there, memory.keep, *docs), places, dtype)

    @staticmethod
    def _once(layer: nn.Module, x: Tensor, call: Call, step: int) -> Tensor:
        return layer(x, call, step)

    @staticmethod
    def _again(layer: nn.Module, x: Tensor, call: Call, step: int) -> Tensor:
        return checkpoint(layer, x, call, step, use_reentrant=False)
