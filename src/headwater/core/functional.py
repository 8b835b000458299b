"""The operations of a Transformer, each as its formula in torch: linear, feed-forward, dropout, norm, attention.

This is the only file of core that computes by the C kernels of headwater.cpu. Where they support the tensors (float32
on a CPU, enough of them), a function calls the kernel, which computes the same; else torch computes the formula.
B batch, H heads, G key/value heads (H is a multiple), Q queries, S keys, D width, K head width, V value head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import favor
from headwater.core.banded import Band, DropWeights, KeyVisibility, LeadingKeys, banded_formula
from headwater.cpu import attention as cpu_attention
from headwater.cpu import embedding as cpu_embedding
from headwater.cpu import linear as cpu_linear
from headwater.cpu import linear_attention as cpu_linear_attention
from headwater.cpu import norm as cpu_norm
from headwater.cpu.activations import gelu_tanh as gelu_tanh
from headwater.cpu.activations import quick_gelu as quick_gelu
from headwater.cpu.build import supported
from headwater.cpu.dropout import DropoutMask, fused_dropout
from headwater.cpu.layout import PANEL_COLUMNS

LINEAR_CHUNK = 64  # tokens at a time of causal linear attention
LINEAR_EPS = 1e-6  # added to the denominator of linear attention

LinearState = tuple[Tensor, ...]  # Σ φ(k) vᵀ and Σ φ(k)
Activation = Callable[[Tensor], Tensor]
LayerType = TypeVar("LayerType", bound=nn.Module)


def unchanged(x: Tensor) -> Tensor:
    """x: the identity."""
    return x


# ------------------------------------------------------------------------------------ linear, feed-forward, embedding


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    """y = x Wᵀ + b"""
    if _is_plain(layer, nn.Linear) and cpu_linear.linear_supported(x, layer.weight, layer.bias):
        return cpu_linear.linears(x, layer)[0]
    return layer(x)


def linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Several linear layers of one x: queries, keys, values. In C the backward pass sums their gradients in place."""
    bases = [_base_of(x, layer) for layer in layers]
    plain = [base for base in bases if _is_plain(base, nn.Linear)]
    if len(plain) == len(layers) and all(cpu_linear.linear_supported(x, m.weight, m.bias) for m in plain):
        outputs = zip(layers, cpu_linear.linears(x, *plain), strict=True)
        return tuple(layer.after(x, y) if isinstance(layer, ChangedLinear) else y for layer, y in outputs)
    return tuple(linear(x, layer) for layer in layers)


class ChangedLinear(nn.Module):
    """A linear layer whose input or output is changed: after(x, base(before(x))).

    Several of them that read one x have their bases computed together, as if nothing were changed (linears).
    """

    base: nn.Module

    def before(self, x: Tensor) -> Tensor:
        """The input of the base: x itself, if it is not changed."""
        return x

    def after(self, x: Tensor, y: Tensor) -> Tensor:
        """The output, from the input x and the output y of the base."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x, linear(self.before(x), self.base))


def _base_of(x: Tensor, layer: nn.Module) -> nn.Module:
    """The layer that multiplies x: the base of a changed layer without hooks that leaves its input as it is."""
    return layer.base if isinstance(layer, ChangedLinear) and not _has_hooks(layer) and layer.before(x) is x else layer


def feed_forward(x: Tensor, up: nn.Module, act: Activation, p: float, down: nn.Module) -> Tensor:
    """down(dropout(act(up(x)), p))"""
    if _is_plain(up, nn.Linear) and _is_plain(down, nn.Linear) and cpu_linear.feed_forward_supported(x, up, act, down):
        return cpu_linear.fused_feed_forward(x, up, act, p, down)
    return linear(dropout(act(linear(x, up)), p), down)


def embedding(ids: Tensor, table: nn.Module) -> Tensor:
    """weight[ids]; the gradient of a large table takes memory only for the rows that were looked up."""
    if _is_plain(table, nn.Embedding) and cpu_embedding.embedding_supported(table.weight):
        return cpu_embedding.embedding(ids, table.weight)
    return table(ids)


def _is_plain(layer: nn.Module, cls: type[LayerType]) -> TypeGuard[LayerType]:
    """Whether a layer is torch's own and has no hooks: some observe it, others compute its weight (pruning)."""
    return type(layer) is cls and not _has_hooks(layer)


def _has_hooks(layer: nn.Module) -> bool:
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks))


# --------------------------------------------------------------------------------------------------- dropout and norm


def dropout(x: Tensor, p: float) -> Tensor:
    """x · mask / (1 - p): each element of the mask is 0 with probability p, else 1. The mask is the same without C."""
    if not p:
        return x
    if supported(x):
        return fused_dropout(x, p)
    if x.device.type != "cpu":
        return F.dropout(x, p)
    return DropoutMask.sample(p)(x)


def add_dropout(x: Tensor, y: Tensor, p: float) -> Tensor:
    """x + dropout(y, p): the residual connection."""
    if p and x.shape == y.shape and supported(x, y):
        return fused_dropout(y, p, residual=x)
    return x + dropout(y, p)


def add_norm(
    x: Tensor, y: Tensor | None, p: float, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> Tensor:
    """LayerNorm (centered) or RMSNorm of x + dropout(y, p), over the last dimension; without y, of x."""
    if cpu_norm.norm_supported(x, weight, bias, y):
        return cpu_norm.fused_add_norm(x, y, p, weight, bias, eps, centered)
    if y is not None:
        x = add_dropout(x, y, p)
    if centered:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)  # (x - mean) / sqrt(var + eps) · weight + bias
    return F.rms_norm(x, x.shape[-1:], weight, eps)  # x / sqrt(mean(x²) + eps) · weight


# ---------------------------------------------------------------------------------------------------------- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float, p: float
) -> Tensor:
    """eager_attention() by a fused kernel, without the attention weights [B, H, Q, S] in memory."""
    if cpu_attention.full_attention_supported(q, k, v, attn_mask, p):
        return cpu_attention.fused_attention(q, k, v, attn_mask, is_causal, scale, p)
    if p and q.device.type == "cpu":  # torch has no fused kernel with dropout here
        return eager_attention(q, k, v, causal_mask(q, k) if is_causal else attn_mask, scale, p)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask, p, is_causal, scale=scale, enable_gqa=grouped)


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale: float,
    p: float,
    transform_scores: Activation = unchanged,
    tap: Activation = unchanged,
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask), p) v: q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V] -> [B, H, Q, V].

    attn_mask: bool (True = may attend), or float to add. A fully masked row gives zeros: -inf would make it NaN, so its
    scores are the smallest finite number, and masked_fill after the softmax sets its weights to zero. No other row is
    changed by that. transform_scores: a change of the scores before the mask. tap: is given the attention weights.
    """
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)  # [B, H, S, K]
    v = v.repeat_interleave(groups, 1)  # [B, H, S, V]
    scores = transform_scores(scale * (q @ k.mT))  # [B, H, Q, S]
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
        scores = scores if attn_mask.dtype == torch.bool else scores + attn_mask
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0)
    weights = tap(weights.to(v.dtype))
    return attention_dropout(weights, p) @ v


def attention_dropout(weights: Tensor, p: float) -> Tensor:
    """Dropout of attention weights [B, H, Q, S]; each row begins at a multiple of 16, as C counts its elements."""
    keys = weights.shape[-1]
    if weights.device.type != "cpu" or keys % PANEL_COLUMNS == 0 or not p:
        return dropout(weights, p)
    return dropout(F.pad(weights, (0, -keys % PANEL_COLUMNS)), p)[..., :keys]


def causal_mask(q: Tensor, k: Tensor) -> Tensor:
    """[Q, S] True where the key is at or before the query."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


# --------------------------------------------------------------------------------------------------- banded attention


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    scale: float,
    p: float = 0.0,
    *,
    key_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    leading: LeadingKeys | None = None,
    distance_bias: Tensor | None = None,
    random_blocks: Tensor | None = None,
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + bias), p) v over the keys of a band, leading keys and random blocks of keys.

    q [B, H, Q, D], k [B, G, S, D], v [B, G, S, V] -> [B, H, Q, V], in time and memory O(S · width). Query i is the
    token of key band.first_query + i. A query that sees nothing gets zeros.
    key_mask [B, S]: True = may be seen. document_ids [B, S]: a token sees only keys of its own document. Both are about
    the keys k, not the leading keys.
    distance_bias [H, back + 1 + ahead]: added to the scores of the band at key - query = -back … ahead (block = 1).
    random_blocks [H, Q / block, R]: further blocks of k that each block of queries sees, by number, none in its band.
    """
    if cpu_attention.attention_supported(q, k, v):
        rules = _key_rules(q, band, key_mask, document_ids, leading, random_blocks)
        pair = (None, None) if leading is None else (leading.k, leading.v)
        others = (*pair, distance_bias)
        if cpu_attention.key_rules_supported(rules, k.shape[2], *others):
            return cpu_attention.fused_banded_attention(q, k, v, rules, scale, p, *others)
    leading_keys = 0 if leading is None else leading.k.shape[2]
    drop = _drop_weights(q.shape[2], k.shape[2], leading_keys, p) if p else None
    visibility = KeyVisibility(key_mask, document_ids)
    return banded_formula(q, k, v, band, scale, drop, visibility, leading, distance_bias, random_blocks)


def banded_attention_supported(q: Tensor, k: Tensor, v: Tensor, p: float = 0.0) -> bool:
    """Whether banded attention is by C, or must be by its formula, so that the dropout mask is the same without C."""
    return cpu_attention.attention_supported(q, k, v) or (p > 0 and q.device.type == "cpu")


def _drop_weights(queries: int, keys: int, leading_keys: int, p: float) -> DropWeights:
    """Dropout of some weights, as C counts them: a row has the leading keys, in whole panels, and then the keys."""
    mask = DropoutMask.sample(p)
    padded = -(-leading_keys // PANEL_COLUMNS) * PANEL_COLUMNS

    def drop(weights: Tensor, first_query: int, columns: Tensor) -> Tensor:
        columns = columns + torch.where(columns < 0, leading_keys, padded)
        return mask.apply_at(weights, queries, padded + keys, first_query, columns)

    return drop


def _key_rules(
    q: Tensor,
    band: Band,
    key_mask: Tensor | None,
    document_ids: Tensor | None,
    leading: LeadingKeys | None,
    random_blocks: Tensor | None,
) -> cpu_attention.KeyRules:
    """The same as C reads it: ids of 32 bits, and one number for each leading key of each query, by strides."""
    q_ids, k_ids = cpu_attention.visible_ids(key_mask, document_ids, band.first_query, q.shape[2])
    bias = None if leading is None or leading.bias is None else leading.bias
    return cpu_attention.KeyRules(
        band.back,
        band.ahead,
        band.block,
        band.first_query,
        band.causal,
        q_ids=q_ids,
        k_ids=k_ids,
        leading_bias=None if leading is None or bias is None else bias.expand(*q.shape[:3], leading.k.shape[2]),
        block_numbers=None if random_blocks is None else random_blocks.to(torch.int32).contiguous(),
    )


# ---------------------------------------------------------------------------------------------------- linear attention


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    state: LinearState | None = None,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """φ(q) Σ φ(k) vᵀ / (φ(q) Σ φ(k) + ε), φ(x) = elu(x) + 1: sums over all keys, or if causal up to the query's own.

    q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V] -> out [B, H, Q, V], and the state after the last key:
    (Σ φ(k) vᵀ [B, G, K, V], Σ φ(k) [B, G, K]). state: that of earlier keys. attention_mask [B, S]: True where a key is
    no padding. document_ids [B, S], causal only: each document begins with empty sums.
    """
    if causal and cpu_linear_attention.linear_attention_supported(q, k, v):
        sums = None if state is None else (state[0], state[1])
        return cpu_linear_attention.fused_linear_attention(q, k, v, sums, attention_mask, document_ids, LINEAR_EPS)
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
        out, state = _linear_causal(queries, keys, v.to(dtype), state, document_ids)
    else:
        kv = state[0] + keys.mT @ v.to(dtype)
        total = state[1] + keys.sum(2)
        state = kv, total
        out = queries @ kv[:, :, None] / (queries @ total[:, :, None, :, None] + LINEAR_EPS)
    return out.flatten(1, 2).to(v.dtype), state


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    causal: bool,
    scale: float,
    state: LinearState | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, LinearState]:
    """Performer's estimate of softmax(scale · q kᵀ) v by random features (core/favor.py), and the state after the keys.

    q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V], projection [M, K] -> [B, H, Q, V]. state: that of earlier keys.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = (q * scale**0.5).to(dtype).unflatten(1, (-1, q.shape[1] // k.shape[1]))  # [B, G, H / G, Q, K]
    keys = (k * scale**0.5).to(dtype)
    values = v.to(dtype)
    if not causal:
        return favor.two_way(queries, keys, values, projection, attention_mask).flatten(1, 2).to(v.dtype), ()
    before = favor.FavorState(*state) if state else favor.empty_state(keys, values, len(projection))
    out, after = favor.causal(queries, keys, values, projection, before, attention_mask)
    return out.flatten(1, 2).to(v.dtype), after


def feature_map(x: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1, which is positive (Katharopoulos et al. 2020)."""
    return F.elu(x) + 1


def _linear_causal(
    q: Tensor, k: Tensor, v: Tensor, state: LinearState, document_ids: Tensor | None
) -> tuple[Tensor, LinearState]:
    """Causal linear attention of features, in chunks: a triangle of scores within each, and the sums of all before it.

    q [B, G, H / G, S, K], k [B, G, S, K], v [B, G, S, V] -> [B, G, H / G, S, V]
    """
    kv, total = state
    outputs = []
    last = None if document_ids is None else document_ids[:, :1]  # [B, 1] the document that the sums belong to
    for begin in range(0, k.shape[2], LINEAR_CHUNK):
        chunk = slice(begin, begin + LINEAR_CHUNK)
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
        outputs.append(numerator / (denominator + LINEAR_EPS))
        if document_ids is not None:
            kv = kv * unbroken[..., None]
            total = total * unbroken
        kv = kv + k_i.mT @ v_i
        total = total + k_i.sum(2)
    return torch.cat(outputs, 3), (kv, total)
