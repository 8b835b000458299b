"""Linear attention (Katharopoulos et al. 2020): elu(x) + 1 in place of the softmax, so that sums replace the scores.

Causal, it is a recurrent network: in decoding, the KV cache holds one matrix and one vector per head, however long the
text is. Chosen by name as --attention linear.
B batch, H heads, G key/value heads (H is a multiple), Q queries, S keys, K and V widths of key and value heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.base import KernelConfig, KernelSpec
from headwater.core.cache import LayerCache, State
from headwater.core.kernels import Kernel, MasklessKernel
from headwater.core.masks import AttentionMask
from headwater.cpu import linear_attention as cpu
from headwater.i18n import Message, _
from headwater.parts import must, part

CHUNK = 64  # tokens at a time of causal attention
EPS = 1e-6  # added to the denominator


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
        return min(keys, head_dim + CHUNK)

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


class RecurrentKernel(MasklessKernel):
    """A kernel of sums over the keys: causal, it folds them into a state of constant size."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__(config)
        self.is_causal = config.mask.window_size == (None, 0)
        self.is_recurrent = self.is_causal


class LinearKernel(RecurrentKernel):
    """The module of LinearAttention."""

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache) -> Tensor:
        if self.weights.has_hooks:
            return self.eager(q, k, v, mask.boolean())
        keep = mask.attention_mask
        documents = mask.k_document_ids
        if self.is_causal:
            out, state = linear_attention(q, k, v, True, cache.state, keep, documents)
            cache.set_state(state)
            return out
        if documents is None:
            return linear_attention(q, k, v, False, None, keep)[0]
        return self._each_document(q, k, v, mask)

    def _each_document(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
        """Attention to every key of the same document: the sums of one document at a time."""
        assert mask.q_document_ids is not None and mask.k_document_ids is not None
        out = v.new_zeros(*q.shape[:3], v.shape[-1])
        for document in mask.k_document_ids.unique():
            inside = mask.k_document_ids == document
            keep = inside if mask.attention_mask is None else inside & mask.attention_mask
            result = linear_attention(q, k, v, False, None, keep)[0]
            out = torch.where((mask.q_document_ids == document)[:, None, :, None], result, out)
        return out

    def eager(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The same, with the attention weights φ(q) φ(k)ᵀ / Σ as a tensor; without a KV cache."""
        groups = q.shape[1] // k.shape[1]
        features = feature_map(k.repeat_interleave(groups, 1))
        weights = feature_map(q) @ features.mT  # [B, H, Q, S]
        if attn_mask is not None:
            weights = weights * attn_mask
        weights = self.weights(weights / (weights.sum(-1, keepdim=True) + EPS))
        return weights @ v.repeat_interleave(groups, 1)


# ---------------------------------------------------------------------------------------------------------- the formula


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    state: State | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, State]:
    """φ(q) Σ φ(k) vᵀ / (φ(q) Σ φ(k) + ε), φ(x) = elu(x) + 1: sums over all keys, or if causal up to the query's own.

    q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V] -> out [B, H, Q, V], and the state after the last key:
    (Σ φ(k) vᵀ [B, G, K, V], Σ φ(k) [B, G, K]). state: that of earlier keys. attention_mask [B, S]: True where a key is
    no padding. document_ids [B, S], causal only: each document begins with empty sums.
    """
    if causal and cpu.linear_attention_supported(q, k, v):
        sums = None if state is None else (state[0], state[1])
        return cpu.fused_linear_attention(q, k, v, sums, attention_mask, document_ids, EPS)
    groups = q.shape[1] // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    if state is None:
        sizes = *k.shape[:2], k.shape[-1]
        state = k.new_zeros(*sizes, v.shape[-1], dtype=dtype), k.new_zeros(sizes, dtype=dtype)
    queries = feature_map(q.to(dtype)).unflatten(1, (-1, groups))  # [B, G, H / G, Q, K]
    keys = feature_map(k.to(dtype))
    if attention_mask is not None:
        keys = keys * attention_mask[:, None, :, None]
    if causal:
        out, state = _causal_chunks(queries, keys, v.to(dtype), state, document_ids)
    else:
        kv = state[0] + keys.mT @ v.to(dtype)
        total = state[1] + keys.sum(2)
        state = kv, total
        out = queries @ kv[:, :, None] / (queries @ total[:, :, None, :, None] + EPS)
    return out.flatten(1, 2).to(v.dtype), state


def feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, which is positive (Katharopoulos et al. 2020)."""
    return F.elu(x) + 1


def _causal_chunks(q: Tensor, k: Tensor, v: Tensor, state: State, document_ids: Tensor | None) -> tuple[Tensor, State]:
    """Causal linear attention of features, in chunks: a triangle of scores within each, and the sums of all before it.

    q [B, G, H / G, S, K], k [B, G, S, K], v [B, G, S, V] -> [B, G, H / G, S, V]
    """
    kv, total = state
    outputs = []
    last = None if document_ids is None else document_ids[:, :1]  # [B, 1] the document that the sums belong to
    for begin in range(0, k.shape[2], CHUNK):
        chunk = slice(begin, begin + CHUNK)
        q_i = q[:, :, :, chunk]
        k_i = k[:, :, chunk]
        v_i = v[:, :, chunk]
        scores = (q_i @ k_i.mT[:, :, None]).tril()  # [B, G, H / G, C, C]
        if document_ids is not None and last is not None:
            ids = document_ids[:, chunk]
            scores = scores * (ids[:, :, None] == ids[:, None, :])[:, None, None]
            q_i = q_i * (ids == last)[:, None, None, :, None]  # those that read the sums
            k_i = k_i * (ids == ids[:, -1:])[:, None, :, None]  # those that the sums keep
            unbroken = (ids[:, -1:] == last)[:, None, :]  # [B, 1, 1]
            last = ids[:, -1:]
        numerator = scores @ v_i[:, :, None] + q_i @ kv[:, :, None]
        denominator = scores.sum(-1, keepdim=True) + q_i @ total[:, :, None, :, None]
        outputs.append(numerator / (denominator + EPS))
        if document_ids is not None:
            kv = kv * unbroken[..., None]
            total = total * unbroken
        kv = kv + k_i.mT @ v_i
        total = total + k_i.sum(2)
    return torch.cat(outputs, 3), (kv, total)
