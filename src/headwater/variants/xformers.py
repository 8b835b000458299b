"""xFormers' memory_efficient_attention as an attention kernel, with this package's shapes and masks."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from headwater.core import functional
from headwater.core.base import KernelConfig, KernelSpec
from headwater.core.kernels import Kernel
from headwater.errors import Unavailable
from headwater.i18n import _
from headwater.parts import part


@part
class XFormers(KernelSpec):
    """xFormers' memory-efficient attention."""

    def build(self, config: KernelConfig) -> Kernel:
        if importlib.util.find_spec("xformers") is None:
            raise Unavailable(_("kernel: xformers must be installed, it is not; pip install xformers, or use SDPA()"))
        return XFormersKernel(config)


class XFormersKernel(Kernel):
    """xFormers' memory_efficient_attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        attn_mask = functional.causal_mask(q, k) if is_causal else attn_mask
        return xformers_attention(q, k, v, attn_mask, self.dropout_rate, self.scale)


def xformers_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """dropout(softmax(scale · q kᵀ + mask)) v: q [B, H, Q, D], k and v [B, G, S, D] -> [B, H, Q, D].

    xFormers takes [B, S, H, D] and a bias of full shape, and gives NaN for a row whose keys are all masked. Such a row
    is unmasked, and its output is then set to zero.
    """
    from xformers.ops import memory_efficient_attention

    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    bias = None
    fully_masked = None
    if mask is not None:
        zeros = torch.zeros_like(mask, dtype=q.dtype)
        bias = zeros.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
        fully_masked = (bias == -torch.inf).all(-1, keepdim=True)
        bias = bias.masked_fill(fully_masked, 0).to(q.dtype).expand(*q.shape[:3], k.shape[2])
    qkv = (t.transpose(1, 2) for t in (q, k, v))  # [B, S, H, D]
    out = memory_efficient_attention(*qkv, bias, p=dropout, scale=scale).transpose(1, 2)
    return out if fully_masked is None else out.masked_fill(fully_masked, 0)
