"""Banded attention as its formula in torch: a query sees the keys near it, leading keys, and random blocks of keys.

Sliding windows, Longformer, BigBird, and the local attention of LongT5 and Reformer are all this operation. Call it as
`functional.banded_attention`, which uses cpu/csrc/attention.c where it applies. Work and memory are O(S · width): one
chunk of queries at a time, and the keys that it sees.
B batch, H heads, G key/value heads (H is a multiple), Q queries, S keys, L leading keys, R random blocks, D head width;
q queries of a chunk, s the keys that it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MIN_QUERY_CHUNK = 64  # queries at a time, at least

DropWeights = Callable[[Tensor, int, Tensor], Tensor]  # weights [B, H, q, s], the first query, the columns -> weights


@dataclass(frozen=True)
class Band:
    """Which keys a query sees, by index: those of its own block, of `back` blocks before it and of `ahead` after it.

    block: positions of a block; 1 makes it a window, -back ≤ key - query ≤ ahead. causal: no key after the query.
    first_query: the index, among the keys, of the first query.

        Band(2, 1)             ▢ ▣ ▣ ■ ▣ ▢ ▢ ▢
        Band(1, 0, block=2)    ▢ ▢ ▣ ▣ ■ ▣ ▢ ▢      ■ the query and its own key
    """

    back: int
    ahead: int
    block: int = 1
    causal: bool = False
    first_query: int = 0

    @property
    def width(self) -> int:
        """The number of keys that a query sees at most."""
        return (self.back + 1 + self.ahead) * self.block

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        """True where the query of index q sees the key of index k."""
        distance = k // self.block - q // self.block
        allowed = (distance >= -self.back) & (distance <= self.ahead)
        return allowed & (k <= q) if self.causal else allowed

    def key_range(self, first: int, last: int, keys: int) -> tuple[int, int]:
        """The keys [begin, end) out of `keys` that the queries of indices first to last see."""
        begin = (first // self.block - self.back) * self.block
        end = last + 1 if self.causal else (last // self.block + self.ahead + 1) * self.block
        return min(keys, max(0, begin)), min(keys, max(0, end))


@dataclass(frozen=True)
class LeadingKeys:
    """Keys beside the band that every query sees: global tokens, the first and the last block, or summaries of blocks.

    k, v [B, G, L, D]. bias: added to their scores, broadcast to [B, H, Q, L]; -inf hides a key. A key of the band that
    is a leading key as well counts twice: hide it in the band with key_mask.
    """

    k: Tensor
    v: Tensor
    bias: Tensor | None = None

    @property
    def count(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True)
class LeadingIndex:
    """Leading keys that are keys of the row itself: index [B, L]. bias as in LeadingKeys."""

    index: Tensor
    bias: Tensor | None = None

    @property
    def count(self) -> int:
        return self.index.shape[1]

    def gather(self, k: Tensor, v: Tensor) -> LeadingKeys:
        index = self.index[:, None, :, None]
        return LeadingKeys(torch.take_along_dim(k, index, 2), torch.take_along_dim(v, index, 2), self.bias)


@dataclass(frozen=True)
class GivenRows:
    """Rows of the output that were computed elsewhere: those of tokens that see every key.

    row, query [N]: which rows of the batch, and which queries. out [N, H, V].
    """

    row: Tensor
    query: Tensor
    out: Tensor

    def fill(self, out: Tensor) -> Tensor:
        """out [B, H, Q, V] with these rows."""
        return out.transpose(1, 2).index_put((self.row, self.query), self.out).transpose(1, 2)


@dataclass(frozen=True)
class KeyVisibility:
    """Which keys can be seen at all, beyond the band: key_mask [B, S], True = may be seen, and document_ids [B, S]."""

    key_mask: Tensor | None
    document_ids: Tensor | None

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        """[B, 1 | H, q, s] for the indices q [q] and k [s] | [H, s]; None: all."""
        allowed = None
        if self.key_mask is not None:
            allowed = _with_heads(self.key_mask[:, k])
        if self.document_ids is not None:
            same = self.document_ids[:, None, q, None] == _with_heads(self.document_ids[:, k])
            allowed = same if allowed is None else allowed & same
        return allowed


class KeyGroup(NamedTuple):
    """Keys that a chunk of queries sees: k, v [B, H, s, D], bias [B | 1, H | 1, q | 1, s] to add (-inf hides).

    columns [s] | [H, s]: their indices; those of leading keys are -L … -1. Dropout needs them.
    """

    k: Tensor
    v: Tensor
    bias: Tensor
    columns: Tensor


def banded_formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    scale: float,
    drop: DropWeights | None,
    visibility: KeyVisibility,
    leading: LeadingKeys | None,
    distance_bias: Tensor | None,
    random_blocks: Tensor | None,
) -> Tensor:
    """One chunk of queries at a time: softmax over its leading, random and banded keys."""
    groups = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(groups, 1)  # [B, H, S, D]
    v = v.repeat_interleave(groups, 1)
    chunk = band.block if random_blocks is not None else -(-max(MIN_QUERY_CHUNK, band.width) // band.block) * band.block

    chunks_of_keys = [_banded_keys(q, k, v, band, chunk, visibility, distance_bias)]
    if leading is not None:
        chunks_of_keys.append(_leading_keys(q, leading, chunk, groups))
    if random_blocks is not None:
        chunks_of_keys.append(_random_keys(q, k, v, band, visibility, random_blocks))

    outputs = []
    for i, (q_i, key_groups) in enumerate(zip(q.split(chunk, 2), zip(*chunks_of_keys, strict=True), strict=True)):
        # scores of all groups, then one softmax: [B, H, q, s]
        scores = torch.cat([_scores(q_i, keys, scale) for keys in key_groups], -1)
        hidden = scores == -torch.inf
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        weights = weights.masked_fill(hidden, 0).to(v.dtype)

        if drop is not None:
            columns = torch.cat([keys.columns.expand(q.shape[1], -1) for keys in key_groups], -1)
            weights = drop(weights, i * chunk, columns)
        outputs.append(weights @ torch.cat([keys.v for keys in key_groups], 2))
    return torch.cat(outputs, 2)


def _scores(q: Tensor, keys: KeyGroup, scale: float) -> Tensor:
    scores = scale * (q @ keys.k.mT)
    return scores.to(torch.promote_types(scores.dtype, torch.float32)) + keys.bias


def _banded_keys(
    q: Tensor, k: Tensor, v: Tensor, band: Band, chunk: int, visibility: KeyVisibility, distance_bias: Tensor | None
) -> Iterator[KeyGroup]:
    """For each chunk of queries, whole chunks of keys that hold its band.

    K and V are split once and concatenated, because the gradient of n overlapping slices would cost n full copies.
    """
    keys = k.shape[2]
    k_chunks = k.split(chunk, 2)
    v_chunks = v.split(chunk, 2)
    for start, q_index in zip(range(0, q.shape[2], chunk), _indices(q, band).split(chunk), strict=True):
        first = band.first_query + start
        begin, end = band.key_range(first, first + len(q_index) - 1, keys)
        near = slice(begin // chunk, max(-(-end // chunk), begin // chunk + 1))
        k_i = torch.cat(k_chunks[near], 2)
        k_index = torch.arange(k_i.shape[2], device=q.device) + near.start * chunk
        allowed = _both(band.allows(q_index[:, None], k_index), visibility.allows(q_index, k_index))
        bias = torch.zeros((), device=q.device)
        if distance_bias is not None:
            distance = (k_index - q_index[:, None]).clamp(-band.back, band.ahead)
            bias = distance_bias[:, distance + band.back]  # [H, q, s]
        yield KeyGroup(k_i, torch.cat(v_chunks[near], 2), _hide(bias, allowed), k_index)


def _leading_keys(q: Tensor, leading: LeadingKeys, chunk: int, groups: int) -> Iterator[KeyGroup]:
    """For each chunk of queries, all leading keys with their bias."""
    k = leading.k.repeat_interleave(groups, 1)
    v = leading.v.repeat_interleave(groups, 1)
    bias = torch.zeros(1, device=q.device) if leading.bias is None else leading.bias
    bias = bias.expand(*q.shape[:3], k.shape[2])
    columns = torch.arange(-k.shape[2], 0, device=q.device)
    for bias_i in bias.split(chunk, 2):
        yield KeyGroup(k, v, bias_i, columns)


def _random_keys(
    q: Tensor, k: Tensor, v: Tensor, band: Band, visibility: KeyVisibility, random_blocks: Tensor
) -> Iterator[KeyGroup]:
    """For each block of queries, its random blocks of keys."""
    head = torch.arange(q.shape[1], device=q.device)[:, None, None]
    k_random = k.unflatten(2, (-1, band.block))[:, head, random_blocks].flatten(3, 4)  # [B, H, Q / block, R · block, D]
    v_random = v.unflatten(2, (-1, band.block))[:, head, random_blocks].flatten(3, 4)
    inside = torch.arange(band.block, device=q.device)
    index = (random_blocks[..., None] * band.block + inside).flatten(2)  # [H, Q / block, R · block]
    chunks = zip(
        _indices(q, band).split(band.block), k_random.unbind(2), v_random.unbind(2), index.unbind(1), strict=True
    )
    for q_index, k_i, v_i, k_index in chunks:
        bias = torch.zeros(k_index.shape[-1], device=q.device)
        yield KeyGroup(k_i, v_i, _hide(bias, visibility.allows(q_index, k_index)), k_index)


def _indices(q: Tensor, band: Band) -> Tensor:
    """The index of each query among the keys."""
    return torch.arange(q.shape[2], device=q.device) + band.first_query


def _with_heads(per_key: Tensor) -> Tensor:
    """[B, s] or [B, H, s] -> [B, 1 | H, 1, s]"""
    return per_key[:, None, None, :] if per_key.dim() == 2 else per_key[:, :, None, :]


def _both(allowed: Tensor, visible: Tensor | None) -> Tensor:
    return allowed if visible is None else allowed & visible


def _hide(bias: Tensor, allowed: Tensor | None) -> Tensor:
    return bias if allowed is None else torch.where(allowed, bias, -torch.inf)
