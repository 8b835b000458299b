"""Local attention by chunks: a chunk of tokens sees itself and the chunks before and after, in a ring (Reformer)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, split_heads
from headwater.core.banded import Band
from headwater.core.masks import Causal
from headwater.i18n import Message
from headwater.parts import part
from headwater.variants.lsh_attention import CHUNKS_UNSUPPORTED, check_chunks, padded_length


@part
class ChunkedAttention(Attention):
    """Self-attention to the own chunk, `before` chunks before it and `after` chunks after it.

    The chunks form a ring: the first one sees the last as the one before it, which a causal mask hides.
    paired_chunk: as in LSHAttention.
    """

    chunk: int = 64
    before: int = 1
    after: int = 0
    paired_chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunks(self, ("chunk", "paired_chunk"))

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return CHUNKS_UNSUPPORTED

    def keys_per_query(self, length: int) -> int:
        return min(length, (self.before + 1 + self.after) * self.chunk)

    def build(self, d_model: int) -> AttentionLayer:
        return ChunkedLayer(self, d_model)


class ChunkedLayer(AttentionLayer):
    """The module of ChunkedAttention."""

    calls_kernel = False
    spec: ChunkedAttention

    @property
    def needs_mask_tensor(self) -> bool:
        return False

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        spec = self.spec
        length = x.shape[1]
        q, k, v = functional.linears(x, self.q, self.k, self.v)
        q = self.q_norm(split_heads(q, self.heads))  # [B, H, S, K]
        k = self.k_norm(split_heads(k, self.kv_heads))
        v = split_heads(v, self.kv_heads)
        group = context.mask_groups[self.mask_group]
        q, k = group.mask.position.rotate(q, k, group.cos_sin)
        key_mask = context.inputs.attention_mask

        # whole chunks
        padding = padded_length(length, spec.chunk, spec.paired_chunk) - length
        if padding:
            q, k, v = (F.pad(t, (0, 0, 0, padding)) for t in (q, k, v))
            key_mask = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
            key_mask = F.pad(key_mask, (0, padding))
        if self.kernel.weights.has_hooks:
            bias = self._dense_bias(q, key_mask)[..., :length, :length]
            out = self.kernel.eager(q[:, :, :length], k[:, :, :length], v[:, :, :length], bias)
        else:
            out = self._banded(q, k, v, key_mask)
        return self.merge_heads(out[:, :, :length])

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """[B, H, S, K]"""
        spec = self.spec
        causal = spec.mask == Causal()
        before, after = (0, 0) if q.shape[2] <= spec.chunk else (spec.before, spec.after)
        first_query = 0
        if not causal:  # the ring: the last chunks stand before the first, and the first after the last
            k, v = (_ring(t, before * spec.chunk, after * spec.chunk, 2) for t in (k, v))
            key_mask = None if key_mask is None else _ring(key_mask, before * spec.chunk, after * spec.chunk, 1)
            first_query = before * spec.chunk
        band = Band(before, after, spec.chunk, causal, first_query)
        return functional.banded_attention(
            q, k, v, band, self.kernel.scale, self.kernel.dropout_rate, key_mask=key_mask
        )

    def _dense_bias(self, q: Tensor, key_mask: Tensor | None) -> Tensor:
        """[B|1, 1, S, S] added to the scores: for those who look at the weights.

        ln(n) where a chunk is seen n times: a short ring has a chunk both before and after another one.
        """
        spec = self.spec
        length = q.shape[2]
        place = torch.arange(length, device=q.device)
        chunks = -(-length // spec.chunk)
        before, after = (0, 0) if chunks == 1 else (spec.before, spec.after)
        ahead = place // spec.chunk - place[:, None] // spec.chunk
        times = sum((((ahead - offset) % chunks) == 0).to(q.dtype) for offset in range(-before, after + 1))
        assert isinstance(times, Tensor)
        bias = times.log()[None, None]
        if spec.mask == Causal():  # a ring has nothing before its first chunk
            bias = bias.clamp(max=0).masked_fill(place > place[:, None], -torch.inf)
        return bias if key_mask is None else bias.masked_fill(~key_mask[:, None, None, :], -torch.inf)


def _ring(x: Tensor, before: int, after: int, dim: int) -> Tensor:
    """x with its last `before` values in front and its first `after` values behind."""
    length = x.shape[dim]
    return x.index_select(dim, torch.arange(-before, length + after, device=x.device) % length)
