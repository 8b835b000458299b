"""Multi-head attention: self-attention, and cross-attention over the encoder output.

B batch, H heads, G key/value heads, Q queries, S keys, D model, K width of a query or key head, V of a value head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import (
    BranchLayerSpec,
    KernelConfig,
    KernelSpec,
    NormSpec,
    PositionSpec,
    check_dropout,
    check_positive,
)
from headwater.core.cache import CacheKey, KVCache, LayerCache
from headwater.core.kernels import SDPA, Kernel
from headwater.core.masks import AttentionMask, Bidirectional, MaskRule, WindowSize
from headwater.core.norms import NoNorm
from headwater.core.positions import CosSin, NoPosition
from headwater.errors import BadInput
from headwater.i18n import Message, _
from headwater.parts import must, part

if TYPE_CHECKING:
    from headwater.core.embeddings import ModelInputs


@dataclass(frozen=True)
class MaskGroup:
    """What all layers with the same mask rule and position encoding share in a forward pass, computed once.

    attn_mask: the mask tensor, None where a kernel needs none. cos_sin: the rotary tables (see PositionEncoding).
    """

    mask: AttentionMask
    attn_mask: Tensor | None
    cos_sin: CosSin | None

    @staticmethod
    def build(mask: AttentionMask, positions: Tensor, dtype: torch.dtype, needs_tensor: bool = True) -> MaskGroup:
        """Compute the mask tensor, unless no layer needs it, and the rotary tables."""
        needless = not needs_tensor or mask.block_size or (mask.is_causal and not mask.position.has_bias)
        attn_mask = None if needless else mask.additive(dtype)
        return MaskGroup(mask, attn_mask, mask.position.cos_sin(positions, dtype))


@dataclass(frozen=True)
class ForwardContext:
    """What a forward pass carries beside the hidden states: masks, KV cache, its inputs, encoder output."""

    mask_groups: tuple[MaskGroup, ...]
    cache: KVCache
    inputs: ModelInputs
    memory: Tensor | None = None  # [B, S, D] the encoder output
    cross_mask_group: MaskGroup | None = None


@part
class Attention(BranchLayerSpec):
    """Multi-head self-attention; with fewer kv_heads than heads, grouped-query or multi-query attention.

        query heads      ▢ ▢ ▢ ▢     ▢ ▢ ▢ ▢     ▢ ▢ ▢ ▢
                         │ │ │ │      ╲╱  ╲╱       ╲ ╲╱ ╱
        key/value heads  ▢ ▢ ▢ ▢      ▢    ▢          ▢
                           MHA          GQA          MQA

    head_dim defaults to d_model / heads, scale to 1/√head_dim. bias names the projections with a bias, out of "qkvo".
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    bias: str = ""
    mask: MaskRule = Bidirectional()
    position: PositionSpec = NoPosition()
    qk_norm: NormSpec = NoNorm()
    scale: float | None = None
    dropout: float = 0.0
    kernel: KernelSpec = SDPA()
    is_cross: ClassVar[bool] = False

    def __post_init__(self) -> None:
        kv = self.kv_heads if self.kv_heads is not None else self.heads
        check_positive(self, "heads", _("8 is usual"))
        must(
            kv >= 1 and self.heads % kv == 0,
            self,
            _("kv_heads must divide heads ({heads})", heads=self.heads),
            kv,
            _("use a divisor"),
        )
        must(
            set(self.bias) <= set("qkvo"),
            self,
            _("bias must name projections out of 'qkvo'"),
            self.bias,
            _("'' is none"),
        )
        check_dropout(self)
        applies_to = getattr(self.position, "applies_to", None)
        must(
            applies_to != "embedding",
            self,
            _("position must act on attention"),
            self.position,
            _("give it to the embedding"),
        )
        check_positive(self, "head_dim", _("leave it out for d_model / heads"))
        check_positive(self, "v_head_dim", _("leave it out for d_model / heads"))

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return self.kernel.unsupported

    def build_kernel(self, head_dim: int) -> Kernel:
        """Build the kernel for this layer."""
        scale = self.scale if self.scale is not None else head_dim**-0.5
        sizes = type(self).__name__, self.heads, head_dim, scale, self.dropout
        return self.kernel.build(KernelConfig(*sizes, self.mask, self.position, self.is_cross))

    @property
    def receptive_field(self) -> WindowSize:
        """How far back and ahead a token sees in this layer; None: without limit."""
        return self.mask.window_size

    def keys_per_query(self, length: int) -> int:
        """The number of keys that a token sees at most, in a row of this length."""
        back, ahead = self.mask.window_size
        return length if back is None or ahead is None else min(length, back + ahead + 1)

    def build(self, d_model: int) -> AttentionLayer:
        return AttentionLayer(self, d_model)


@part
class CrossAttention(Attention):
    """Cross-attention: queries from the decoder, keys and values from the encoder output; no rule, no position."""

    is_cross: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        unset = self.mask == Bidirectional() and self.position == NoPosition()
        must(
            unset, self, _("mask and position must be left out"), (self.mask, self.position), _("they do nothing here")
        )

    def build(self, d_model: int) -> AttentionLayer:
        return CrossAttentionLayer(self, d_model)


class AttentionLayer(nn.Module):
    """The projections and the kernel of multi-head self-attention."""

    mask_group: int = 0  # set by the stack: index of this layer's MaskGroup in the ForwardContext
    attn_index: int = 0  # set by the stack: index among the attention layers of its block
    uses_global_tokens: ClassVar[bool] = False
    calls_kernel: ClassVar[bool] = True  # False: it attends by itself, and gives the weights to kernel.weights

    def __init__(self, spec: Attention, d_model: int) -> None:
        super().__init__()
        if spec.head_dim is None:
            fits = d_model % spec.heads == 0
            must(
                fits,
                spec,
                _("heads must divide d_model ({d_model})", d_model=d_model),
                spec.heads,
                _("choose a divisor, or give head_dim"),
            )
        self.spec = spec
        self.heads = spec.heads
        self.kv_heads = spec.kv_heads or spec.heads
        self.head_dim = spec.head_dim or d_model // spec.heads
        self.v_head_dim = spec.v_head_dim or self.head_dim
        self.q = nn.Linear(d_model, self.heads * self.head_dim, "q" in spec.bias)
        self.k = nn.Linear(d_model, self.kv_heads * self.head_dim, "k" in spec.bias)
        self.v = nn.Linear(d_model, self.kv_heads * self.v_head_dim, "v" in spec.bias)
        self.out = nn.Linear(self.heads * self.v_head_dim, d_model, "o" in spec.bias)
        self.q_norm = spec.qk_norm.build(self.head_dim)
        self.k_norm = spec.qk_norm.build(self.head_dim)
        self.kernel = spec.build_kernel(self.head_dim)

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]. step: which application of a layer this is, the key of its KV cache."""
        group = context.mask_groups[self.mask_group]  # mask and rotary tables, computed once for all its layers

        q, k, v = functional.linears(x, self.q, self.k, self.v)
        q = self.q_norm(split_heads(q, self.heads))  # [B, H, Q, K]
        k = self.k_norm(split_heads(k, self.kv_heads))  # [B, G, Q, K]
        v = split_heads(v, self.kv_heads)  # [B, G, Q, V]
        q, k = group.mask.position.rotate(q, k, group.cos_sin)

        cache = LayerCache(context.cache, self.mask_group, self.cache_key(step))
        return self.merge_heads(self.kernel(q, k, v, group.mask, group.attn_mask, cache))

    @property
    def needs_mask_tensor(self) -> bool:
        """False: it reads the AttentionMask alone."""
        return self.kernel.needs_mask_tensor

    @property
    def is_recurrent(self) -> bool:
        """Whether the KV cache holds a state of this layer, of constant size, instead of keys and values."""
        return self.kernel.is_recurrent

    def project_kv(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, D] -> k [B, G, S, K], v [B, G, S, V]"""
        k, v = functional.linears(x, self.k, self.v)
        return self.k_norm(split_heads(k, self.kv_heads)), split_heads(v, self.kv_heads)

    def merge_heads(self, attn_output: Tensor) -> Tensor:
        """[B, H, Q, V] -> [B, Q, H·V] -> [B, Q, D]"""
        return functional.linear(attn_output.transpose(1, 2).flatten(2), self.out)

    def cache_key(self, step: int) -> CacheKey:
        """The key of this layer's entry in the KV cache."""
        return step, self.attn_index


class CrossAttentionLayer(AttentionLayer):
    """Attention over the encoder output; its keys and values are computed once and kept in the KV cache."""

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        memory = context.memory
        group = context.cross_mask_group
        if memory is None or group is None:
            raise BadInput(_("cross_attn: it reads a source, got none; call model(ids, source=...)"))
        k, v = context.cache.cross(self.cache_key(step), lambda: self.project_kv(memory))
        q = self.q_norm(split_heads(functional.linear(x, self.q), self.heads))  # [B, H, Q, K]
        return self.merge_heads(self.kernel(q, k, v, group.mask, group.attn_mask))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, Q, H·K] -> [B, H, Q, K]"""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
