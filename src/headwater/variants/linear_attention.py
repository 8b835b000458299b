"""Linear attention (Katharopoulos et al. 2020): elu(x) + 1 in place of the softmax, so that sums replace the scores.

Causal, it is a recurrent network: in decoding, the KV cache holds one matrix and one vector per head, however long the
text is. Chosen by name as --attention linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwater.core import functional
from headwater.core.base import KernelConfig, KernelSpec
from headwater.core.cache import NO_LAYER_CACHE, LayerCache
from headwater.core.kernels import Kernel
from headwater.core.masks import AttentionMask
from headwater.i18n import Message, _
from headwater.parts import must, part


@part
class LinearAttention(KernelSpec):
    """Linear attention, φ(q) Σ φ(k) vᵀ / φ(q) Σ φ(k) with φ(x) = elu(x) + 1; scale is not used."""

    unsupported: ClassVar[Mapping[str, Message]] = {
        "bias": _("there are no scores to add it to; use position rotary, sinusoidal or learned")
    }

    def build(self, config: KernelConfig) -> Kernel:
        check_unlimited(self, config)
        return LinearKernel(config)

    def equivalent_keys(self, keys: int, head_dim: int) -> int:
        return min(keys, head_dim + functional.LINEAR_CHUNK)

    def state_elements(self, head_dim: int, v_head_dim: int) -> int | None:
        return head_dim * (v_head_dim + 1)


def check_unlimited(spec: KernelSpec, config: KernelConfig) -> None:
    """Refuse a window, which sums over all keys cannot honour, and dropout of attention weights, which do not exist."""
    must(
        config.mask.window_size in ((None, 0), (None, None)),
        spec,
        _("the mask of {layer} must be Causal or Bidirectional", layer=config.name),
        type(config.mask).__name__,
        _("use SDPA() for a window"),
    )
    must(
        not config.dropout,
        spec,
        _("attention dropout must be 0, for there are no attention weights"),
        config.dropout,
        _("use dropout, or SDPA()"),
    )


class LinearKernel(Kernel):
    """The module of LinearAttention."""

    needs_mask_tensor = False

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self.is_causal = config.mask.window_size == (None, 0)
        self.is_recurrent = self.is_causal

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        attn_mask: Tensor | None,
        cache: LayerCache = NO_LAYER_CACHE,
    ) -> Tensor:
        if self.weights.has_hooks:
            return self.eager(q, k, v, mask.boolean())
        keep = mask.attention_mask
        documents = mask.k_document_ids
        if self.is_causal:
            out, state = functional.linear_attention(q, k, v, True, cache.state, keep, documents)
            cache.set_state(state)
            return out
        if documents is None:
            return functional.linear_attention(q, k, v, False, None, keep)[0]
        return self._each_document(q, k, v, mask)

    def _each_document(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attention to every key of the same document: the sums of one document at a time."""
        assert mask.q_document_ids is not None and mask.k_document_ids is not None
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for document in mask.k_document_ids.unique():
            inside = mask.k_document_ids == document
            keep = inside if mask.attention_mask is None else inside & mask.attention_mask
            result = functional.linear_attention(q, k, v, False, None, keep)[0]
            out = torch.where((mask.q_document_ids == document)[:, None, :, None], result, out)
        return out

    def eager(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The same, with the attention weights φ(q) φ(k)ᵀ / Σ as a tensor; without a KV cache."""
        groups = q.shape[1] // k.shape[1]
        features = functional.feature_map(k.repeat_interleave(groups, 1))
        weights = functional.feature_map(q) @ features.mT  # [B, H, Q, S]
        if attn_mask is not None:
            weights = weights * attn_mask
        weights = self.weights(weights / (weights.sum(-1, keepdim=True) + functional.LINEAR_EPS))
        return weights @ v.repeat_interleave(groups, 1)
