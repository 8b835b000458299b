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

from headwater.core.banded import Band, DropWeights, GivenRows, KeyVisibility, LeadingIndex, LeadingKeys, banded_formula
from headwater.cpu import attention as cpu_attention
from headwater.cpu import embedding as cpu_embedding
from headwater.cpu import linear as cpu_linear
from headwater.cpu import norm as cpu_norm
from headwater.cpu.activations import gelu_tanh as gelu_tanh
from headwater.cpu.activations import quick_gelu as quick_gelu
from headwater.cpu.build import supported
from headwater.cpu.dropout import DropoutMask, fused_dropout
from headwater.cpu.layout import PANEL_COLUMNS

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


def is_faster_in_float32(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether attention of 16 bits takes less time in float32: in training, where C computes float32 alone.

    Under autocast v has 16 bits; q and k have 32 after rotary positions.
    """
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return v.dtype == torch.bfloat16 and v.device.type == "cpu" and needs_grad and supported()


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
    leading: LeadingKeys | LeadingIndex | None = None,
    distance_bias: Tensor | None = None,
    random_blocks: Tensor | None = None,
    given_rows: GivenRows | None = None,
) -> Tensor:
    """dropout(softmax(scale · q kᵀ + bias), p) v over the keys of a band, leading keys and random blocks of keys.

    q [B, H, Q, D], k [B, G, S, D], v [B, G, S, V] -> [B, H, Q, V], in time and memory O(S · width). Query i is the
    token of key band.first_query + i. A query that sees nothing gets zeros.
    key_mask [B, S]: True = may be seen. document_ids [B, S]: a token sees only keys of its own document. Both are about
    the keys k, not the leading keys.
    distance_bias [H, back + 1 + ahead]: added to the scores of the band at key - query = -back … ahead (block = 1).
    random_blocks [H, Q / block, R]: further blocks of k that each block of queries sees, by number, none in its band.
    given_rows: rows of the output that are taken from there.
    """
    if cpu_attention.attention_supported(q, k, v):
        rules = _key_rules(q, band, key_mask, document_ids, leading, random_blocks)
        leading_k, leading_v = (leading.k, leading.v) if isinstance(leading, LeadingKeys) else (None, None)
        if cpu_attention.key_rules_supported(rules, k.shape[2], leading_k, leading_v, distance_bias):
            rows = None if given_rows is None else (given_rows.row, given_rows.query, given_rows.out)
            return cpu_attention.fused_banded_attention(
                q, k, v, rules, scale, p, leading_k, leading_v, distance_bias, rows
            )
    if isinstance(leading, LeadingIndex):
        leading = leading.gather(k, v)
    leading_keys = 0 if leading is None else leading.k.shape[2]
    drop = _drop_weights(q.shape[2], k.shape[2], leading_keys, p) if p else None
    visibility = KeyVisibility(key_mask, document_ids)
    out = banded_formula(q, k, v, band, scale, drop, visibility, leading, distance_bias, random_blocks)
    return out if given_rows is None else given_rows.fill(out)


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
    leading: LeadingKeys | LeadingIndex | None,
    random_blocks: Tensor | None,
) -> cpu_attention.KeyRules:
    """The same as C reads it: ids of 32 bits, and one number for each leading key of each query, by strides."""
    q_ids, k_ids = cpu_attention.visible_ids(key_mask, document_ids, band.first_query, q.shape[2])
    bias = None
    if leading is not None and leading.bias is not None:
        bias = leading.bias.expand(*q.shape[:3], leading.count)
    return cpu_attention.KeyRules(
        band.back,
        band.ahead,
        band.block,
        band.first_query,
        band.causal,
        q_ids=q_ids,
        k_ids=k_ids,
        leading_index=leading.index if isinstance(leading, LeadingIndex) else None,
        leading_bias=bias,
        block_numbers=None if random_blocks is None else random_blocks.to(torch.int32).contiguous(),
    )
