"""Attention kernels: softmax(scale · q kᵀ + mask) v, by PyTorch's scaled_dot_product_attention or eager.

`functional.eager_attention` is the formula; `SDPA` is the default. All kernels give the same outputs and gradients. A
kernel is chosen by name in families/builders.py (BACKENDS); whether C or torch computes it, in functional.attention.
B batch, H heads, G key/value heads (H is a multiple), Q queries, S keys, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.banded import Band
from headwater.core.base import KernelConfig, KernelSpec
from headwater.core.cache import NO_LAYER_CACHE, LayerCache
from headwater.core.masks import AttentionMask
from headwater.core.modules import Tap
from headwater.parts import part


@part
class SDPA(KernelSpec):
    """PyTorch's scaled_dot_product_attention (flash attention where there is one); on a CPU, cpu/csrc/attention.c."""

    def build(self, config: KernelConfig) -> Kernel:
        return SDPAKernel(config)


@part
class Eager(KernelSpec):
    """Eager attention: the formula, with the attention weights as a tensor."""

    def build(self, config: KernelConfig) -> Kernel:
        return Kernel(config)


class Kernel(nn.Module):
    """Eager attention, and the base class of the other kernels. `weights` is the hook point of attention weights.

    is_recurrent: it folds keys and values into a state of constant size, so the cache holds that instead of columns.
    """

    is_recurrent: bool = False
    needs_mask_tensor: bool = True  # False: it reads the AttentionMask alone

    def __init__(self, config: KernelConfig) -> None:
        super().__init__()
        self.scale = config.scale
        self.dropout = config.dropout
        self.weights = Tap()

    @property
    def dropout_rate(self) -> float:
        """The dropout of the attention weights while training, else 0."""
        return self.dropout if self.training else 0.0

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        attn_mask: Tensor | None,
        cache: LayerCache = NO_LAYER_CACHE,
    ) -> Tensor:
        """q [B, H, Q, D], and k [B, G, Q, D], v [B, G, Q, V] of the new tokens -> [B, H, Q, V].

        attn_mask is mask.additive(), computed once per forward pass; None where the mask is causal or blockwise.
        """
        k, v = cache.update(k, v)  # k [B, G, S, D], v [B, G, S, V]: those of earlier tokens, and the new ones
        if self.weights.has_hooks:
            return self.eager(q, k, v, self.dense_mask(q, mask))
        if mask.block_size:
            return self.blockwise(q, k, v, mask, mask.block_size)
        if mask.position.has_query_bias:
            return self.attend(q, k, v, self.dense_mask(q, mask), is_causal=False)
        return self.attend(q, k, v, attn_mask, mask.is_causal and attn_mask is None)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        """attn_mask: bool (True = may attend), or float to add to the scores; is_causal: causal, without attn_mask."""
        return self.eager(q, k, v, functional.causal_mask(q, k) if is_causal else attn_mask)

    def eager(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The formula, with the attention weights as a tensor."""
        return functional.eager_attention(
            q, k, v, attn_mask, self.scale, self.dropout_rate, self.transform_scores, self.weights
        )

    def transform_scores(self, scores: Tensor) -> Tensor:
        """A change of the scores before the mask, for subclasses."""
        return scores

    def dense_mask(self, q: Tensor, mask: AttentionMask) -> Tensor | None:
        """The mask tensor of all queries and keys, with the bias that depends on the queries (Transformer-XL)."""
        if not mask.position.has_query_bias:
            return mask.additive(q.dtype)
        query_bias = mask.position.query_bias(q, mask.q_positions, mask.k_positions)  # [B, H, Q, S]
        return mask.additive(q.dtype, self.scale * query_bias)

    def blockwise(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, block_size: int) -> Tensor:
        """Windowed attention in time and memory O(S · window): each block of queries reads only keys within its window.

        K and V are split once and concatenated, because the gradient of n overlapping slices would cost n full copies.
        """
        back, ahead = (-(-(size or 0) // block_size) for size in mask.window_size)  # in blocks, rounded up
        k_blocks = k.split(block_size, 2)
        v_blocks = v.split(block_size, 2)
        outputs = []
        for i, q_i in enumerate(q.split(block_size, 2)):
            first = max(0, i - back)
            last = min(len(k_blocks), i + ahead + 1)
            queries = slice(i * block_size, (i + 1) * block_size)
            keys = slice(first * block_size, last * block_size)
            attn_mask = self.dense_mask(q_i, mask.narrow(queries, keys))
            k_i = torch.cat(k_blocks[first:last], 2)
            v_i = torch.cat(v_blocks[first:last], 2)
            outputs.append(self.attend(q_i, k_i, v_i, attn_mask, is_causal=False))
        return torch.cat(outputs, 2)


class MasklessKernel(Kernel):
    """The base class of kernels that read the AttentionMask alone, not its tensor."""

    needs_mask_tensor = False

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        attn_mask: Tensor | None,
        cache: LayerCache = NO_LAYER_CACHE,
    ) -> Tensor:
        return self.compute(q, k, v, mask, cache)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache) -> Tensor:
        """q [B, H, Q, D], and k [B, G, Q, D], v [B, G, Q, V] of the new tokens -> [B, H, Q, V]."""
        raise NotImplementedError


class SDPAKernel(Kernel):
    """scaled_dot_product_attention, or the C kernels of cpu/ where they apply."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        attn_mask: Tensor | None,
        cache: LayerCache = NO_LAYER_CACHE,
    ) -> Tensor:
        if functional.is_faster_in_float32(q, k, v):
            out = super().forward(q.float(), k.float(), v.float(), mask, attn_mask, cache)
            return out.to(v.dtype)
        return super().forward(q, k, v, mask, attn_mask, cache)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(q.dtype)
        return functional.attention(q, k, v, attn_mask, is_causal, self.scale, self.dropout_rate)

    def blockwise(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, block_size: int) -> Tensor:
        """A band needs no mask tensors, if the position bias, where there is one, depends on the distance alone."""
        back, ahead = mask.window_size
        if mask.position.has_query_bias or back is None or ahead is None:
            return super().blockwise(q, k, v, mask, block_size)
        distance_bias = mask.position.distance_bias(back, ahead) if mask.position.has_bias else None
        if mask.position.has_bias and distance_bias is None:
            return super().blockwise(q, k, v, mask, block_size)
        if not functional.banded_attention_supported(q, k, v, self.dropout_rate):
            return super().blockwise(q, k, v, mask, block_size)
        return functional.banded_attention(
            q,
            k,
            v,
            Band(back, ahead),
            self.scale,
            self.dropout_rate,
            key_mask=mask.attention_mask,
            document_ids=mask.k_document_ids,
            distance_bias=distance_bias,
        )
