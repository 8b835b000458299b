"""FAVOR+ attention as its formula in torch: softmax attention through random features (Choromanski et al. 2021).

    exp(q · k) ≈ φ(q) · φ(k),   φ(x) = exp(W x - |x|² / 2 - c) + ε,   W [M, D] random and orthogonal

c keeps the exponentials finite, and the greatest of them at 1. It cancels out, except against ε, so for a causal answer
it must not depend on later keys: here it is the maximum of W x - |x|² / 2 over the keys so far, and sums of before a
new maximum are multiplied by exp(old - new). For a query it is the maximum over its own features.

The published c is the maximum of W x alone. Then no exponential exceeds exp(-|x|² / 2): those of long queries and keys
fall below ε, all weights become equal, and a model that has learned forgets.
favor_attention() computes it by cpu/csrc/favor.c where that applies.
B batch, H heads, G key/value heads, Q queries, S keys, D and V widths, M features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.core.cache import State
from headwater.cpu import favor as cpu_favor

CHUNK = 64  # tokens at a time of causal attention
FEATURE_EPS = 1e-4  # added to each feature
NO_KEY = -1e30  # the maximum over no keys


class FavorState(NamedTuple):
    """The sums over the keys so far; zeros where there are none.

    kv [B, G, M, V]: Σ exp(w - maximum) vᵀ, w = W k - |k|² / 2. total [B, G, M]: Σ exp(w - maximum). values [B, G, V]:
    Σ v. size and maximum [B, G]: the number of keys, and the greatest w of any key and feature.
    """

    kv: Tensor
    total: Tensor
    values: Tensor
    size: Tensor
    maximum: Tensor


def favor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    causal: bool,
    scale: float,
    state: State | None = None,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, State]:
    """An estimate of softmax(scale · q kᵀ) v by random features, and the state after the keys.

    q [B, H, Q, K], k [B, G, S, K], v [B, G, S, V], projection [M, K] -> [B, H, Q, V]. state: that of earlier keys.
    attention_mask [B, S]: True where a key is no padding.
    """
    if cpu_favor.favor_supported(q, k, v, projection):
        sums = FavorState(*state) if state else None
        out, after = cpu_favor.fused_favor(q, k, v, projection, causal, scale, FEATURE_EPS, sums, attention_mask)
        return out, FavorState(*after) if causal else ()
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries = (q * scale**0.5).to(dtype).unflatten(1, (-1, q.shape[1] // k.shape[1]))  # [B, G, H / G, Q, K]
    keys = (k * scale**0.5).to(dtype)
    values = v.to(dtype)
    if not causal:
        return two_way(queries, keys, values, projection, attention_mask).flatten(1, 2).to(v.dtype), ()
    before = FavorState(*state) if state else empty_state(keys, values, len(projection))
    out, after = causal_chunks(queries, keys, values, projection, before, attention_mask)
    return out.flatten(1, 2).to(v.dtype), after


def empty_state(k: Tensor, v: Tensor, features: int) -> FavorState:
    """The state of before the first key."""
    batch, groups = k.shape[:2]
    zeros = k.new_zeros
    return FavorState(
        zeros(batch, groups, features, v.shape[-1]),
        zeros(batch, groups, features),
        zeros(batch, groups, v.shape[-1]),
        zeros(batch, groups),
        zeros(batch, groups),
    )


def query_features(q: Tensor, projection: Tensor) -> Tensor:
    """φ(q) [.., M], each with its own c: it scales numerator and denominator alike, but for ε."""
    w = q @ projection.mT - (q * q).sum(-1, keepdim=True) / 2
    return (w - w.detach().amax(-1, keepdim=True)).exp() + FEATURE_EPS


def key_exponents(k: Tensor, projection: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """w = W k - |k|² / 2 [B, G, S, M], and its maximum of each key [B, G, S]; both NO_KEY for padding."""
    w = k @ projection.mT - (k * k).sum(-1, keepdim=True) / 2
    top = w.detach().amax(-1)
    if attention_mask is None:
        return w, top
    padding = ~attention_mask[:, None]
    return w.masked_fill(padding[..., None], NO_KEY), top.masked_fill(padding, NO_KEY)


def two_way(q: Tensor, k: Tensor, v: Tensor, projection: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Attention to every key. q [B, G, H / G, Q, D], k [B, G, S, D], v [B, G, S, V] -> [B, G, H / G, Q, V]."""
    w, top = key_exponents(k, projection, attention_mask)
    features = (w - top.amax(-1)[..., None, None]).exp() + FEATURE_EPS
    if attention_mask is not None:
        features = features * attention_mask[:, None, :, None]
    queries = query_features(q, projection)
    numerator = queries @ (features.mT @ v)[:, :, None]
    denominator = queries @ features.sum(2)[:, :, None, :, None]
    return _divide(numerator, denominator)


def causal_chunks(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, state: FavorState, attention_mask: Tensor | None
) -> tuple[Tensor, FavorState]:
    """Attention to the keys so far, in chunks. Shapes as in two_way()."""
    outputs = []
    for begin in range(0, k.shape[2], CHUNK):
        chunk = slice(begin, begin + CHUNK)
        mask = None if attention_mask is None else attention_mask[:, chunk]
        out, state = _causal_chunk(q[:, :, :, chunk], k[:, :, chunk], v[:, :, chunk], projection, state, mask)
        outputs.append(out)
    return torch.cat(outputs, 3), state


def _causal_chunk(
    q: Tensor, k: Tensor, v: Tensor, projection: Tensor, state: FavorState, attention_mask: Tensor | None
) -> tuple[Tensor, FavorState]:
    w, top = key_exponents(k, projection, attention_mask)
    present = torch.ones_like(top)
    if attention_mask is not None:
        present = present * attention_mask[:, None]

    # the maximum up to each token, [B, G, C], and the factors by which sums of before it shrink
    before = torch.where(state.size > 0, state.maximum, NO_KEY)
    maximum = torch.cat((before[..., None], top), -1).cummax(-1).values
    shrink = (maximum[..., :1] - maximum[..., 1:]).exp()
    within = (maximum[..., None, 1:] - maximum[..., 1:, None]).tril().exp()  # [B, G, C queries, C keys]
    maximum = maximum[..., 1:]

    # a triangle of scores within the chunk, and the sums of all before it
    features = (w - maximum[..., None]).exp() * present[..., None]
    queries = query_features(q, projection)
    small = FEATURE_EPS * queries.sum(-1, keepdim=True)  # [B, G, H / G, C, 1] ε summed over the features
    scores = (queries @ features.mT[:, :, None]) * within[:, :, None] + small * present[:, :, None, None]
    scores = scores.tril()
    shrunk = queries * shrink[:, :, None, :, None]
    numerator = scores @ v[:, :, None] + shrunk @ state.kv[:, :, None] + small * state.values[:, :, None, None]
    denominator = scores.sum(-1, keepdim=True) + shrunk @ state.total[:, :, None, :, None]
    denominator = denominator + small * state.size[:, :, None, None, None]
    out = _divide(numerator, denominator)

    # the sums after the chunk
    kept = features * (maximum - maximum[..., -1:]).exp()[..., None]
    last = shrink[..., -1:]
    state = FavorState(
        state.kv * last[..., None] + kept.mT @ v,
        state.total * last + kept.sum(2),
        state.values + (v * present[..., None]).sum(2),
        state.size + present.sum(-1),
        maximum[..., -1],
    )
    return out, state


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where there is no key yet, and no gradient."""
    return numerator / denominator.masked_fill(denominator < torch.finfo(denominator.dtype).tiny, 1)
