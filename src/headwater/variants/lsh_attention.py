"""LSH attention: a token sees those whose vectors are near its own, found by hashing (Reformer, Kitaev et al. 2020).

    1  hash      random directions; the bucket of a vector is the direction nearest to it
    2  sort      tokens by (bucket, position), so that near ones stand side by side
    3  chunk     a chunk of sorted tokens sees its own and the chunks before and after it
    4  combine   several rounds of hashing, each weighted by how much attention it found

Queries and keys are one vector. Time and memory are O(S · rounds · chunk). `reference/lsh.py` is the same in NumPy.
B batch, H heads, S tokens, R rounds, K head width, C chunks of all rounds, L tokens a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, split_heads
from headwater.core.base import check_positive
from headwater.core.kernels import SDPA, Eager
from headwater.core.masks import Bidirectional, Causal
from headwater.core.norms import NoNorm
from headwater.cpu.dropout import DropoutMask
from headwater.cpu.lsh_attention import SortedChunks, fused_lsh_attention, lsh_attention_supported
from headwater.i18n import Message, _
from headwater.parts import must, part

HIDDEN = -1e9  # the score of a key that is padding or after the query
ITSELF = -1e5  # the score of the query's own key: it is read only where nothing else is
KEY_EPS = 1e-6  # added to the mean square of a key
SLAB = 64  # chunks at a time


def check_chunks(spec: Attention, chunk_fields: tuple[str, ...]) -> None:
    """The checks that chunked attentions have in common."""
    for field in chunk_fields:
        check_positive(spec, field, _("64 is usual"))
    hint = _("the chunks are the window")
    must(spec.mask in (Causal(), Bidirectional()), spec, _("mask must be Causal or Bidirectional"), spec.mask, hint)
    hint = _("the kernel is its own")
    must(spec.kernel in (SDPA(), Eager()), spec, _("kernel must be SDPA or Eager"), spec.kernel, hint)


CHUNKS_UNSUPPORTED: Mapping[str, Message] = {
    "bias": _("use position learned, sinusoidal or rotary"),
    "cache": _("chunks of a longer row are others; read the whole row again"),
    "packing": _("chunks would join documents; give each document its own row"),
    "left_padding": _("chunks are counted from the start of a row; pad on the right"),
}


@part
class LSHAttention(Attention):
    """LSH self-attention: `rounds` of hashing; a chunk sees the `before` chunks before it and the `after` after it.

    buckets: the number of buckets, or its factors (8, 16): one hash each; empty: twice the number of chunks.
    seed: of the random directions; None: others in each forward pass. paired_chunk: the chunk of the local layers of
    the model; rows are padded to whole chunks of both. max_positions: it limits how many buckets one hash has.
    """

    chunk: int = 64
    before: int = 1
    after: int = 0
    rounds: int = 1
    buckets: tuple[int, ...] = ()
    seed: int | None = 0
    paired_chunk: int | None = None
    max_positions: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunks(self, ("chunk", "paired_chunk"))
        check_positive(self, "rounds", _("1 is usual"))
        check_positive(self, "max_positions", _("give the length of the longest row"))
        even = all(count >= 2 and count % 2 == 0 for count in self.buckets)
        must(even, self, _("buckets must be even"), self.buckets, _("a direction and its opposite are two buckets"))
        one_width = self.kv_heads in (None, self.heads) and self.v_head_dim in (None, self.head_dim)
        got = (self.kv_heads, self.v_head_dim)
        must(one_width, self, _("kv_heads and v_head_dim must be left out"), got, _("queries and keys are one vector"))
        hint = _("keys are brought to one length as it is")
        must(self.qk_norm == NoNorm(), self, _("qk_norm must be left out"), self.qk_norm, hint)

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return CHUNKS_UNSUPPORTED

    def keys_per_query(self, length: int) -> int:
        return min(length, self.rounds * (self.before + 1 + self.after) * self.chunk)

    def factors(self, length: int) -> tuple[int, ...]:
        """The factors of the number of buckets for a row of this length."""
        if self.buckets:
            return self.buckets
        power = max(1, (2 * (length // self.chunk)).bit_length() - 1)
        limit = 2 * max(math.isqrt(self.max_positions // self.chunk), self.chunk)
        if 2**power <= limit:
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)

    def build(self, d_model: int) -> AttentionLayer:
        return LSHLayer(self, d_model)


def padded_length(length: int, chunk: int, paired_chunk: int | None) -> int:
    """The length of a row in whole chunks of both kinds of layers; a row within the smaller chunk stays as it is."""
    other = chunk if paired_chunk is None else paired_chunk
    return length if length <= min(chunk, other) else -(-length // math.lcm(chunk, other)) * math.lcm(chunk, other)


# ------------------------------------------------------------------------------------------------- hash, sort, chunk


def draw_directions(heads: int, width: int, rounds: int, factors: tuple[int, ...], seed: int | None) -> Tensor:
    """[H, K, R, N] random directions; each stands for its opposite too, so N is half the sum of the factors."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(heads, width, rounds, sum(factors) // 2, generator=generator)


def hash_buckets(qk: Tensor, directions: Tensor, factors: tuple[int, ...]) -> Tensor:
    """qk [B, H, S, K] -> [B, H, R, S] the bucket of each vector in each round; in memory for one head at a time."""
    return torch.stack([_buckets(x, d, factors) for x, d in zip(qk.unbind(1), directions, strict=True)], 1)


def _buckets(x: Tensor, directions: Tensor, factors: tuple[int, ...]) -> Tensor:
    """x [B, S, K] -> [B, R, S]: the nearest of the directions [K, R, N] and their opposites; factors are digits."""
    along = torch.einsum("bsk,krf->brsf", x, directions)
    buckets = torch.zeros(along.shape[:-1], dtype=torch.long, device=x.device)
    scale = 1
    for factor, digit in zip(factors, along.split([factor // 2 for factor in factors], -1), strict=True):
        nearest = digit.max(-1)
        opposite = digit.min(-1)
        is_opposite = nearest.values < -opposite.values
        buckets = buckets + scale * torch.where(is_opposite, factor // 2 + opposite.indices, nearest.indices)
        scale *= factor
    return buckets


def sort_by_bucket(buckets: Tensor) -> Tensor:
    """[B, H, R, S] -> [B, H, R·S] the positions in order of (round, bucket, position): one ring of all rounds."""
    return buckets.argsort(dim=-1, stable=True).flatten(-2)


class LSHLayer(AttentionLayer):
    """The module of LSHAttention: q is the projection of queries and keys alike.

    choice: the sort order of the last forward pass. replayed_choice: an order to use instead of hashing, where a
    backward pass repeats the forward pass from inputs that rounding has changed.
    """

    calls_kernel = False
    spec: LSHAttention
    choice: Tensor | None = None
    replayed_choice: Tensor | None = None

    def __init__(self, spec: LSHAttention, d_model: int) -> None:
        super().__init__(spec, d_model)
        del self.k

    @property
    def needs_mask_tensor(self) -> bool:
        return False

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        spec = self.spec
        length = x.shape[1]
        qk, v = (split_heads(t, self.heads) for t in functional.linears(x, self.q, self.v))  # [B, H, S, K]
        group = context.mask_groups[self.mask_group]
        qk, _k = group.mask.position.rotate(qk, qk, group.cos_sin)
        key_mask = context.inputs.attention_mask

        # whole chunks
        padding = padded_length(length, spec.chunk, spec.paired_chunk) - length
        if padding:
            qk, v = (F.pad(t, (0, 0, 0, padding)) for t in (qk, v))
            key_mask = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
            key_mask = F.pad(key_mask, (0, padding))
        attend = self._one_chunk if qk.shape[2] <= spec.chunk else self._hashed
        if not self.kernel.weights.has_hooks:
            return self.merge_heads(attend(qk, v, key_mask)[:, :, :length])

        # the answers to values that mark their position are the attention weights
        positions = torch.eye(qk.shape[2], dtype=v.dtype, device=v.device).expand(*v.shape[:2], -1, -1)
        weights = self.kernel.weights(attend(qk, positions, key_mask)[:, :, :length, :length])
        return self.merge_heads(weights @ v[:, :, :length])

    def keys(self, qk: Tensor) -> Tensor:
        """The keys: vectors of one length, so that only their direction counts."""
        return qk * torch.rsqrt(qk.square().mean(-1, keepdim=True) + KEY_EPS)

    def _one_chunk(self, qk: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """A row within one chunk needs no hashing."""
        place = torch.arange(qk.shape[2], device=qk.device)
        keep = None if key_mask is None else key_mask[:, None, None, :]
        scores = self._hide(self.kernel.scale * (qk @ self.keys(qk).mT), place[:, None], place, keep)
        return functional.dropout(scores.softmax(-1), self.kernel.dropout_rate) @ v

    def _hide(self, scores: Tensor, q_place: Tensor, k_place: Tensor, keep: Tensor | None) -> Tensor:
        """The scores with what a query must not see, and with itself as a last resort."""
        hidden = torch.zeros((), dtype=torch.bool, device=scores.device) if keep is None else ~keep
        if self.spec.mask == Causal():
            hidden = hidden | (k_place > q_place)
        return scores.masked_fill(hidden, HIDDEN).masked_fill(k_place == q_place, ITSELF)

    def _hashed(self, qk: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """[B, H, S, K]: hash, sort, attend by chunks, and combine the rounds; after sorting in C where that applies."""
        spec = self.spec
        order = self._order(qk, key_mask)  # [B, H, R·S]
        chunks = SortedChunks(spec.chunk, spec.before, spec.after, spec.rounds, spec.mask == Causal(), ITSELF)
        if lsh_attention_supported(qk, v, chunks):
            p = self.kernel.dropout_rate
            return fused_lsh_attention(qk, v, order, chunks, key_mask, self.kernel.scale, KEY_EPS, p)
        return self._formula(qk, v, order, key_mask)

    def _formula(self, qk: Tensor, v: Tensor, order: Tensor, key_mask: Tensor | None) -> Tensor:
        """[B, H, S, K] from the order [B, H, R·S]."""
        spec = self.spec
        length = qk.shape[2]
        into_chunks = lambda t: _gather(t, order).unflatten(2, (-1, spec.chunk))  # noqa: E731
        places = order.unflatten(2, (-1, spec.chunk))  # [B, H, C, L]
        keep = None
        if key_mask is not None:
            keep = key_mask[:, None].expand(-1, self.heads, -1).gather(2, order).unflatten(2, (-1, spec.chunk))
        qk_chunks = into_chunks(qk)
        out, lse = self._attend(qk_chunks, self.keys(qk_chunks), into_chunks(v), places, keep)

        # back to the order of the row: each round gives an answer, and how much attention it found
        back = (order.unflatten(2, (spec.rounds, length)).argsort(-1)).flatten(2)
        offset = torch.arange(spec.rounds, device=order.device).repeat_interleave(length) * length
        out = _gather(out, back + offset).unflatten(2, (spec.rounds, length))  # [B, H, R, S, K]
        lse = lse.gather(2, back + offset).unflatten(2, (spec.rounds, length))
        weights = (lse - lse.logsumexp(2, keepdim=True)).exp()  # [B, H, R, S]
        return (weights[..., None] * out).sum(2)

    @torch.no_grad()
    def _order(self, qk: Tensor, key_mask: Tensor | None) -> Tensor:
        """[B, H, R·S] the sort order; padding has a bucket of its own, the last."""
        factors = self.spec.factors(qk.shape[2])
        directions = draw_directions(self.heads, qk.shape[3], self.spec.rounds, factors, self.spec.seed).to(qk)
        if self.replayed_choice is not None:
            return self.replayed_choice
        buckets = hash_buckets(qk, directions, factors)
        if key_mask is not None:
            buckets = buckets.masked_fill(~key_mask[:, None, None, :], math.prod(factors))
        self.choice = sort_by_bucket(buckets)
        return self.choice

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        """Chunks [B, H, C, L, K] -> the answers [B, H, R·S, K] and the logarithm of the attention found [B, H, R·S]."""
        drop = self._dropout_of(q)
        outputs = []
        totals = []
        for slab, near in self._near_chunks(q.shape[2], q.device):
            near_places = places[:, :, near].flatten(3)[:, :, :, None]  # [B, H, c, 1, W·L]
            near_keep = None if keep is None else keep[:, :, near].flatten(3)[:, :, :, None]
            k_near, v_near = (t[:, :, near].flatten(3, 4) for t in (k, v))  # [B, H, c, W·L, K]
            scores = self.kernel.scale * (q[:, :, slab] @ k_near.mT)
            scores = self._hide(scores, places[:, :, slab, :, None], near_places, near_keep)
            total = scores.logsumexp(-1)  # [B, H, c, L]
            weights = drop((scores - total[..., None]).exp(), slab.start)
            outputs.append((weights @ v_near).flatten(2, 3))
            totals.append(total.flatten(2))
        return torch.cat(outputs, 2), torch.cat(totals, 2)

    def _dropout_of(self, chunks: Tensor) -> Callable[[Tensor, int], Tensor]:
        """Dropout of the weights [B, H, c, L, W·L] from a chunk on, as C counts them."""
        tokens = chunks.shape[2] * chunks.shape[3]
        p = self.kernel.dropout_rate
        if not p or chunks.device.type != "cpu":
            return lambda weights, first: functional.dropout(weights, p)
        mask = DropoutMask.sample(p)

        def drop(weights: Tensor, first: int) -> Tensor:
            keys = weights.shape[-1]
            rows = weights.flatten(2, 3)  # [B, H, c·L, W·L]
            return mask.apply_at(rows, tokens, keys, first * chunks.shape[3], torch.arange(keys)).view(weights.shape)

        return drop

    def _near_chunks(self, chunks: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
        """Some chunks at a time, and for each the chunks [c, W] that it sees, in a ring."""
        around = torch.arange(-self.spec.before, self.spec.after + 1, device=device)
        for first in range(0, chunks, SLAB):
            slab = slice(first, min(chunks, first + SLAB))
            yield slab, (torch.arange(slab.start, slab.stop, device=device)[:, None] + around) % chunks


def _gather(x: Tensor, order: Tensor) -> Tensor:
    """x [B, H, S, K] in the order [B, H, N] -> [B, H, N, K]"""
    return torch.take_along_dim(x, order[..., None], 2)
