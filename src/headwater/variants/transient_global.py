"""Transient-global attention: a window, and a summary of each block that all tokens see (LongT5, Guo et al. 2022).

            tokens               summaries
            ■ ■ · · · · · ·      ▪ ▪      a summary is the sum of the hidden states of its block, normed;
            ■ ■ ■ · · · · ·      ▪ ▪      each layer computes its own, as further keys and values
    queries · ■ ■ ■ · · · ·      ▪ ▪
            · · ■ ■ ■ · · ·      ▪ ▪

A row of S tokens has S / block summaries, so time is O(S · window + S² / block); memory is for some queries at a time.
B batch, H heads, S tokens, L summaries, q queries at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwater.core import functional
from headwater.core.attention import Attention, AttentionLayer, ForwardContext, split_heads
from headwater.core.banded import Band, LeadingKeys
from headwater.core.base import NormSpec, PositionSpec, check_positive
from headwater.core.masks import LocalWindow, MaskRule, WindowSize
from headwater.core.norms import RMSNorm
from headwater.core.positions import PositionEncoding, RelativeBias, T5Bias
from headwater.i18n import Message, _
from headwater.parts import must, part

MIN_QUERIES = 128  # at a time


@part
class RelativeBiasWithSummaries(RelativeBias):
    """T5's relative bias for tokens, and a second table for summaries, by the distance in blocks."""

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return BiasWithSummaries(self, heads)


class BiasWithSummaries(T5Bias):
    """Two tables of biases [num_buckets, H]."""

    def __init__(self, spec: RelativeBiasWithSummaries, heads: int) -> None:
        super().__init__(spec, heads)
        self.summary_table = nn.Embedding(spec.num_buckets, heads)

    def of_summaries(self, blocks: Tensor, count: int) -> Tensor:
        """blocks [B, q] of the queries -> [B, H, q, L]"""
        distance = torch.arange(count, device=blocks.device) - blocks[..., None]
        return self.summary_table(self.bucket(distance)).permute(0, 3, 1, 2)


@part
class TransientGlobalAttention(Attention):
    """LongT5's transient-global self-attention, for encoders: a window on both sides, and a summary of each block."""

    mask: MaskRule = LocalWindow(127)
    position: PositionSpec = RelativeBiasWithSummaries()
    block_size: int = 16
    summary_norm: NormSpec = RMSNorm()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "block_size", _("16 is usual"))
        hint = _("a decoder takes Attention with SlidingWindow(size)")
        must(isinstance(self.mask, LocalWindow), self, _("mask must be a LocalWindow"), self.mask, hint)
        fits = isinstance(self.position, RelativeBiasWithSummaries)
        hint = _("it says how far away a summary is")
        must(fits, self, _("position must be RelativeBiasWithSummaries"), self.position, hint)

    @property
    def receptive_field(self) -> WindowSize:
        return None, None

    def keys_per_query(self, length: int) -> int:
        return super().keys_per_query(length) + length // self.block_size

    @property
    def unsupported(self) -> Mapping[str, Message]:
        return {
            "packing": _("a summary would join documents; give each document its own row"),
            "left_padding": _("blocks are counted from the start of a row; pad on the right"),
        }

    def build(self, d_model: int) -> AttentionLayer:
        return TransientGlobalLayer(self, d_model)


class TransientGlobalLayer(AttentionLayer):
    """The module of TransientGlobalAttention."""

    calls_kernel = False
    spec: TransientGlobalAttention

    def __init__(self, spec: TransientGlobalAttention, d_model: int) -> None:
        super().__init__(spec, d_model)
        self.summary_norm = spec.summary_norm.build(d_model)

    @property
    def needs_mask_tensor(self) -> bool:
        return False

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, S, D] -> [B, S, D]"""
        key_mask = context.inputs.attention_mask
        bias = cast(BiasWithSummaries, context.mask_groups[self.mask_group].mask.position)
        q, k, v = functional.linears(x, self.q, self.k, self.v)
        q = self.q_norm(split_heads(q, self.heads))  # [B, H, S, K]
        k = self.k_norm(split_heads(k, self.kv_heads))
        v = split_heads(v, self.kv_heads)

        # the summaries, as keys and values
        blocks, visible = summary_blocks(x, key_mask, self.spec.block_size)
        k_summary, v_summary = self.project_kv(self.summary_norm(sum_blocks(x, blocks, visible.shape[1])))
        hidden = torch.zeros_like(visible, dtype=x.dtype).masked_fill(~visible, -torch.inf)[
            :, None, None
        ]  # [B, 1, 1, L]

        if self.kernel.weights.has_hooks:
            biases = bias.of_summaries(blocks, visible.shape[1]) + hidden
            return self.merge_heads(self._dense(q, k, v, key_mask, bias, LeadingKeys(k_summary, v_summary, biases)))
        return self.merge_heads(self._by_queries(q, k, v, key_mask, bias, blocks, (k_summary, v_summary, hidden)))

    def _by_queries(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        bias: BiasWithSummaries,
        blocks: Tensor,
        summaries: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """[B, H, S, K]: some queries at a time, with the keys of their windows; computed again in the backward pass."""
        reach = cast(LocalWindow, self.spec.mask).size
        size = max(MIN_QUERIES, reach)
        k_parts = k.split(size, 2)
        v_parts = v.split(size, 2)
        mask_parts = [None] * len(k_parts) if key_mask is None else list(key_mask.split(size, 1))
        outputs = []
        for i, q_i in enumerate(q.split(size, 2)):
            near = slice(max(0, i - 1), i + 2)
            masks = [mask for mask in mask_parts[near] if mask is not None]
            arguments = (
                q_i,
                torch.cat(k_parts[near], 2),
                torch.cat(v_parts[near], 2),
                torch.cat(masks, 1) if masks else None,
                blocks[:, i * size : i * size + q_i.shape[2]],
                *summaries,
            )
            run = partial(self._some_queries, bias, Band(reach, reach, first_query=size if i else 0))
            if torch.is_grad_enabled():
                outputs.append(checkpoint(run, *arguments, use_reentrant=False))
            else:
                outputs.append(run(*arguments))
        return torch.cat(outputs, 2)

    def _some_queries(
        self,
        bias: BiasWithSummaries,
        band: Band,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        blocks: Tensor,
        k_summary: Tensor,
        v_summary: Tensor,
        hidden: Tensor,
    ) -> Tensor:
        """[B, H, q, K]"""
        leading = None
        if k_summary.shape[2]:
            leading = LeadingKeys(k_summary, v_summary, bias.of_summaries(blocks, k_summary.shape[2]) + hidden)
        return functional.banded_attention(
            q,
            k,
            v,
            band,
            self.kernel.scale,
            self.kernel.dropout_rate,
            key_mask=key_mask,
            leading=leading,
            distance_bias=bias.distance_bias(band.back, band.ahead),
        )

    def _dense(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, bias: BiasWithSummaries, summaries: LeadingKeys
    ) -> Tensor:
        """The formula, for those who look at the weights [B, H, S, S]; what they lack to one is for the summaries."""
        position = torch.arange(q.shape[2], device=q.device)[None]
        near = self.spec.mask.allows(position[:, :, None], position[:, None])
        assert near is not None and summaries.bias is not None
        near = near[:, None] if key_mask is None else near[:, None] & key_mask[:, None, None]
        scores = self.kernel.scale * (q @ k.mT) + bias.bias(position, position).to(q.dtype)
        far = self.kernel.scale * (q @ summaries.k.mT) + summaries.bias
        both = torch.cat((far, scores.masked_fill(~near, -torch.inf)), -1)
        seen = both > -torch.inf
        weights = both.masked_fill(~seen, torch.finfo(both.dtype).min).softmax(-1).masked_fill(~seen, 0)
        weights_far, weights_near = weights.split([far.shape[-1], scores.shape[-1]], -1)
        return weights_far @ summaries.v + self.kernel.weights(weights_near) @ v


# -------------------------------------------------------------------------------------------------------- the summaries


def summary_blocks(x: Tensor, key_mask: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """The block of each token [B, S], -1 for none, and which summaries there are [B, L].

    Tokens after the last full block belong to it; a row of less than a block has no summary.
    """
    length = x.shape[1]
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if key_mask is None else key_mask
    index = torch.arange(length, device=x.device)
    full = (real & (index % size == size - 1)).sum(1, keepdim=True)  # full blocks of each row
    blocks = torch.where(real, torch.minimum((index // size).expand_as(real), full - 1), -1)
    return blocks, torch.arange(length // size, device=x.device) < full


def sum_blocks(x: Tensor, blocks: Tensor, count: int) -> Tensor:
    """x [B, S, D] -> [B, L, D] the sum of the hidden states of each block."""
    sums = x.new_zeros(x.shape[0], count + 1, x.shape[2])  # the last is for tokens without a block
    index = torch.where(blocks < 0, count, blocks)[..., None].expand_as(x)
    return sums.scatter_add(1, index, x)[:, :count]
