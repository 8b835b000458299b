"""xFormers' memory-efficient attention, with the shapes and masks of this project."""

from __future__ import annotations

import torch
from torch import Tensor


def xformers_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D].

    xFormers wants [B, S, H, D] and a bias of full shape, and gives NaN for a row that sees nothing. Such a row is made
    to see everything, and its answer is then put to zero.
    """
    from xformers.ops import memory_efficient_attention

    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    bias, blind = None, None
    if mask is not None:
        hidden = torch.zeros_like(mask, dtype=q.dtype)
        bias = hidden.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        blind = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(blind, 0).to(q.dtype).expand(*q.shape[:3], k.shape[2])
    wide = (t.transpose(1, 2) for t in (q, k, v))
    out = memory_efficient_attention(*wide, bias, p=dropout, scale=scale).transpose(1, 2)
    return out if blind is None else out.masked_fill(blind, 0)
