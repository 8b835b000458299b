"""Transformer-XL (Dai et al. 2019): relative positions that depend on the queries, and a memory of earlier segments.

A long text is read in segments. Each layer keeps the hidden states that entered it for the last `memory` tokens,
without their gradients, and the next segment attends to them:

    segment 1   a b c d            segment 2   [a b c d] e f g h        [ ] from memory, no gradient

    memory = segment_memory(model)
    for segment in segments:                 # ids [B, Q]: each row continues that of the segment before
        logits = model.decode(segment, cache=memory)
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, split_heads
from headwater.core.base import PositionSpec, check_positive
from headwater.core.cache import Cache, CacheKey, DynamicCache, KVPair
from headwater.core.masks import Causal
from headwater.core.model import Transformer
from headwater.core.positions import CosSin, PositionEncoding, SinusoidalEncoding
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

# ---------------------------------------------------------------------------------------------------------- positions


@part
class RelativeXL(PositionSpec):
    """Transformer-XL: score = (q + u)·k + (q + v)·R(distance), R = W sinusoids(distance); u, v, W of each layer.

    clamp: the greatest distance, farther keys count as that far; None: no limit. width: of the sinusoids; None: heads ·
    head_dim.
    """

    clamp: int | None = None
    width: int | None = None
    applies_to: ClassVar[str] = "attention"
    shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive(self, "clamp", _("leave it out for no limit"))
        check_positive(self, "width", _("leave it out for heads · head_dim"))

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return TransformerXLBias(self, width, heads)


class HeadVectors(nn.Module):
    """weight [H, D]: one learned vector for each head, added to the queries. A module, so that it can be tied."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, width))

    def forward(self, q: Tensor) -> Tensor:
        return q + self.weight[:, None]


class TransformerXLBias(PositionEncoding):
    """The relative position terms of one Transformer-XL layer."""

    has_query_bias = True

    def __init__(self, spec: RelativeXL, width: int, heads: int) -> None:
        super().__init__()
        sinusoids = spec.width or heads * width
        must(sinusoids % 2 == 0, spec, _("the width must be even"), sinusoids, _("choose an even d_model"))
        self.clamp = spec.clamp
        self.u = HeadVectors(heads, width)
        self.v = HeadVectors(heads, width)
        self.position_projection = nn.Linear(sinusoids, heads * width, bias=False)
        self.sinusoids = SinusoidalEncoding(sinusoids, 10000.0, halves=True)

    def rotate(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        return self.u(q), k

    def query_bias(self, q: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """R is computed once for each distance that occurs, not for each pair of positions."""
        distance = q_positions[:, :, None] - k_positions[:, None, :]  # [B|1, Q, S]
        if self.clamp is not None:
            distance = distance.clamp(max=self.clamp)
        lowest, highest = self._distance_range(q_positions, k_positions, distance)
        distances = torch.arange(lowest, highest + 1, device=q.device)
        r = self.position_projection(self.sinusoids.add(q.new_zeros(1), distances))
        r = r.unflatten(-1, q.shape[1::2]).transpose(0, 1)  # [H, distances, D]
        by_distance = self.v(q - self.u.weight[:, None]) @ r.mT  # [B, H, Q, distances]
        index = (distance - lowest)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        return by_distance.gather(-1, index)

    @staticmethod
    def _distance_range(q_positions: Tensor, k_positions: Tensor, distance: Tensor) -> tuple[int, int]:
        """The lowest and highest distance; bounds from the lengths alone while compiling or on the meta device."""
        if torch.compiler.is_compiling() or distance.device.type == "meta":
            bound = max(q_positions.shape[1], k_positions.shape[1])
            return -bound, bound
        return int(distance.min()), int(distance.max())


# ------------------------------------------------------------------------------------------------------------- memory


@part
class RecurrentAttention(Attention):
    """Attention with a memory of the last `memory` tokens of earlier segments (see segment_memory)."""

    memory: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "memory", _("512 is usual"))
        must(
            self.mask.window_size[1] == 0,
            self,
            _("mask must be causal, for memory holds what came before"),
            type(self.mask).__name__,
            _("use Causal() or SlidingWindow()"),
        )

    def keys_per_query(self, length: int) -> int:
        """Those of memory and of a segment that is as long."""
        return min(super().keys_per_query(length), 2 * self.memory)

    def build(self, d_model: int) -> AttentionLayer:
        return RecurrentAttentionLayer(self, d_model)


class RecurrentAttentionLayer(AttentionLayer):
    """The module of RecurrentAttention. With another cache than a SegmentMemory it is an ordinary attention layer."""

    spec: RecurrentAttention

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]"""
        if not isinstance(context.cache, SegmentMemory):
            return super().forward(x, context, step)
        group = context.mask_groups[self.mask_group]
        hidden_states = context.cache.remember(self.mask_group, self.cache_key(step), x)  # [B, M + Q, D]
        q = self.q_norm(split_heads(functional.linear(x, self.q), self.heads))  # [B, H, Q, K]
        k, v = self.project_kv(hidden_states)  # gradients reach both projections through the memory too
        q, _k = group.mask.position.rotate(q, q, group.cos_sin)
        return self.merge_heads(self.kernel(q, k, v, group.mask, group.attn_mask))


class MemoryGroup(DynamicCache):
    """The last tokens of one mask group, without their gradients unless keep_gradients."""

    def __init__(self, window: int, keep_gradients: bool = False) -> None:
        super().__init__(window)
        self.keep_gradients = keep_gradients

    def update(self, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        joined = super().update(key, k, v)
        if self.keep_gradients:
            return joined
        stored_k, stored_v = self.kv[key]
        self.kv[key] = stored_k.detach(), stored_v.detach()
        return joined


class SegmentMemory(Cache):
    """A KV cache of hidden states instead of keys and values: what a layer of Transformer-XL remembers.

    tensors() and load() are for checkpoints: a resumed run continues with the same memory.
    """

    def __init__(self, spec: object, groups: list[MemoryGroup], device: torch.device) -> None:
        super().__init__(spec, list(groups), device)
        self.groups = groups

    def remember(self, mask_group: int, key: CacheKey, x: Tensor) -> Tensor:
        """The hidden states [B, M + Q, D] of memory and segment; the last ones are kept."""
        empty = x.new_empty(*x.shape[:2], 0)[:, None]  # there are no values beside them
        joined, _values = self.update(mask_group, key, x[:, None], empty)
        return joined[:, 0]

    @property
    def num_rows(self) -> int | None:
        """The rows that it remembers; None: none yet."""
        return next((k.shape[0] for group in self.groups for k, _empty in group.kv.values()), None)

    def tensors(self) -> dict[str, Tensor]:
        """What is remembered, by name; empty before the first segment."""
        named = {"seen_tokens": self.seen_tokens}
        for index, group in enumerate(self.groups):
            if group.positions is not None:
                named[f"{index}.positions"] = group.positions
            for (step, attn_index), (hidden_states, _empty) in group.kv.items():
                named[f"{index}.{step}.{attn_index}"] = hidden_states
        return named if len(named) > 1 else {}

    def load(self, named: dict[str, Tensor]) -> None:
        """Restore what tensors() gave; that of another model is refused."""
        known = {f"{index}.positions" for index in range(len(self.group_caches))} | {"seen_tokens"}
        for name, tensor in named.items():
            index, *key = name.split(".")
            if name in known or not (index.isdigit() and int(index) < len(self.group_caches) and len(key) == 2):
                continue
            group = self.groups[int(index)]
            group.kv[int(key[0]), int(key[1])] = tensor, tensor.new_empty(*tensor.shape[:3], 0)
            group.positions = named[f"{index}.positions"]
            known.add(name)
        if named and known != named.keys():
            raise BadInput(_("memory: it is that of another model; start with an empty one"))
        self.seen_tokens = named.get("seen_tokens", self.seen_tokens)


def memory_size(model: Transformer) -> int:
    """The tokens that a model remembers of earlier segments; 0: it has no memory."""
    layers = [module for module in model.output_stack.modules() if isinstance(module, AttentionLayer)]
    sizes = {module.spec.memory for module in layers if isinstance(module, RecurrentAttentionLayer)}
    return max(sizes, default=0)


def segment_memory(model: Transformer, keep_gradients: bool = False) -> SegmentMemory:
    """An empty memory for a model whose layers all are RecurrentAttention. keep_gradients: to look at them."""
    stack = model.output_stack
    layers = [module for module in stack.layers.modules() if isinstance(module, AttentionLayer)]
    if not all(isinstance(module, RecurrentAttentionLayer) for module in layers):
        raise BadInput(_("memory: every layer must be RecurrentAttention; build the model with attention xl"))
    groups = [MemoryGroup(memory_size(model), keep_gradients) for _group in stack.mask_groups]
    return SegmentMemory(stack.spec, groups, next(model.parameters()).device)


def xl_attention(plain: Attention, memory: int, clamp: int | None = None) -> RecurrentAttention:
    """The attention of Transformer-XL with the sizes of another."""
    return RecurrentAttention(
        plain.heads,
        head_dim=plain.head_dim,
        mask=Causal(),
        position=RelativeXL(clamp),
        dropout=plain.dropout,
        memory=memory,
    )
