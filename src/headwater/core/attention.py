"""Multi-head attention: positions read one another (self), or read what another stack has written (cross).

B batch, H heads, G key/value heads, Q queries, S keys, D model, K width of a query or key head, V of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.cache import NoCache, Slot
from headwater.core.kernels import Fused
from headwater.core.kinds import Attending, Layer, Norm, Placing
from headwater.core.masks import Everyone, Rule, Sight
from headwater.core.norms import NoNorm
from headwater.core.positions import NoPosition
from headwater.errors import BadInput
from headwater.machine.linear import Linear, maps
from headwater.parts import must, part


@dataclass(frozen=True)
class Lane:
    """What all layers with one rule and one position share in a call: made once, before the first of them runs."""

    sight: Sight
    mask: Tensor | None
    angles: Any

    @staticmethod
    def of(sight: Sight, places: Tensor, dtype: torch.dtype) -> Lane:
        spared = sight.block or (sight.causal and sight.position.bias(places[:, :1], places[:, :1]) is None)
        return Lane(sight, None if spared else sight.mask(dtype), sight.position.angles(places, dtype))


@dataclass(frozen=True)
class Call:
    """What one forward call carries beside the hidden states."""

    lanes: tuple[Lane, ...]
    cache: Any = field(default_factory=NoCache)
    memory: Tensor | None = None  # [B, S, D] what the encoder wrote
    cross: Lane | None = None


@part
class Attention(Layer):
    """Self-attention. kv_heads below heads groups the queries; head_dim is d_model / heads unless given.

    bias names the projections that have one, out of "qkvo". scale is 1/√head_dim unless given.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    bias: str = ""
    sees: Rule = Everyone()
    position: Placing = NoPosition()
    qk_norm: Norm = NoNorm()
    scale: float | None = None
    dropout: float = 0.0
    kernel: Attending = Fused()

    def __post_init__(self) -> None:
        kv = self.kv_heads if self.kv_heads is not None else self.heads
        must(self.heads >= 1, self, "heads must be at least 1", self.heads, "8 is usual")
        must(kv >= 1 and self.heads % kv == 0, self, f"kv_heads must divide heads ({self.heads})", kv, "use a divisor")
        must(set(self.bias) <= set("qkvo"), self, "bias must name projections out of 'qkvo'", self.bias, "'' is none")
        must(0 <= self.dropout < 1, self, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")
        acts = getattr(self.position, "acts", None)
        must(acts != "embedding", self, "position must act on attention", self.position, "give it to the embedding")
        for name in ("head_dim", "v_head_dim"):
            must(getattr(self, name) != 0, self, f"{name} must be at least 1", 0, "leave it out for d_model / heads")

    def build(self, d_model: int) -> AttentionLayer:
        return AttentionLayer(self, d_model)


@part
class CrossAttention(Attention):
    """Queries from here, keys and values from the memory the encoder wrote. It has no rule and no position."""

    def __post_init__(self) -> None:
        super().__post_init__()
        free = self.sees == Everyone() and self.position == NoPosition()
        must(free, self, "sees and position must be left out", (self.sees, self.position), "they do nothing here")

    def build(self, d_model: int) -> AttentionLayer:
        return CrossAttentionLayer(self, d_model)


class AttentionLayer(nn.Module):
    lane: int = 0  # set by the stack: which of the call's lanes is mine
    nth: int = 0  # set by the stack: which of the attentions in its block this is

    def __init__(self, spec: Attention, d_model: int) -> None:
        super().__init__()
        if spec.head_dim is None:
            fits = d_model % spec.heads == 0
            must(fits, spec, f"heads must divide d_model ({d_model})", spec.heads, "choose a divisor, or give head_dim")
        self.spec, self.heads, self.kv_heads = spec, spec.heads, spec.kv_heads or spec.heads
        self.head_dim = spec.head_dim or d_model // spec.heads
        self.v_head_dim = spec.v_head_dim or self.head_dim
        self.q = Linear(d_model, self.heads * self.head_dim, "q" in spec.bias)
        self.k = Linear(d_model, self.kv_heads * self.head_dim, "k" in spec.bias)
        self.v = Linear(d_model, self.kv_heads * self.v_head_dim, "v" in spec.bias)
        self.out = Linear(self.heads * self.v_head_dim, d_model, "o" in spec.bias)
        self.q_norm, self.k_norm = spec.qk_norm.build(self.head_dim), spec.qk_norm.build(self.head_dim)
        scale = spec.scale if spec.scale is not None else self.head_dim**-0.5
        self.kernel = spec.kernel.build(scale, spec.dropout)

    def forward(self, x: Tensor, call: Call, step: int) -> Tensor:
        lane = call.lanes[self.lane]
        q, k, v = maps(x, self.q, self.k, self.v)
        q, k, v = self.q_norm(split(q, self.heads)), self.k_norm(split(k, self.kv_heads)), split(v, self.kv_heads)
        q, k = lane.sight.position.turn(q, k, lane.angles)
        k, v = call.cache.extend(self.lane, self.slot(step), k, v)
        return self.joined(self.kernel(q, k, v, lane.sight, lane.mask))

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = maps(x, self.k, self.v)
        return self.k_norm(split(k, self.kv_heads)), split(v, self.kv_heads)

    def joined(self, mixed: Tensor) -> Tensor:
        """[B, H, Q, V] -> [B, Q, H·V] -> [B, Q, D]"""
        return self.out(mixed.transpose(1, 2).flatten(2))

    def slot(self, step: int) -> Slot:
        return step, self.nth


class CrossAttentionLayer(AttentionLayer):
    def forward(self, x: Tensor, call: Call, step: int) -> Tensor:
        memory, lane = call.memory, call.cross
        if memory is None or lane is None:
            raise BadInput("cross_attn: it reads a source, got none; call model(ids, source=...)")
        k, v = call.cache.cross(self.slot(step), lambda: self.keys(memory))
        return self.joined(self.kernel(self.q_norm(split(self.q(x), self.heads)), k, v, lane.sight, lane.mask))


def split(x: Tensor, heads: int) -> Tensor:
    """[B, Q, H·K] -> [B, H, Q, K]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
