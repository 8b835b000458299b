"""Kernels: q, k, v -> out, the heart of attention: softmax(scale · q kᵀ + mask) v.

`spelled_out` is the formula, readable; `Fused` is the default and uses PyTorch's fused attention. All back ends agree.
B batch, H heads, G key/value heads (H is a multiple), Q queries, S keys, D head width.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.kinds import Attending
from headwater.core.masks import Sight, Window
from headwater.core.taps import Tap
from headwater.errors import BadSetting, Unavailable, nearest
from headwater.machine.attention import attend, attend_window, attends, bands
from headwater.machine.dropout import attention_dropout
from headwater.machine.xformers import xformers_attention
from headwater.parts import part


@part
class Fused(Attending):
    """PyTorch's scaled_dot_product_attention, flash where there is one; to learn on a CPU, machine/attention.c."""

    def build(self, scale: float, dropout: float) -> Kernel:
        return FusedKernel(scale, dropout)


@part
class Plain(Attending):
    """The formula as it stands."""

    def build(self, scale: float, dropout: float) -> Kernel:
        return Kernel(scale, dropout)


@part
class XFormers(Attending):
    """xFormers' memory-efficient attention."""

    def build(self, scale: float, dropout: float) -> Kernel:
        if importlib.util.find_spec("xformers") is None:
            raise Unavailable("kernel: xformers must be installed, it is not; pip install xformers, or use Fused()")
        return XFormersKernel(scale, dropout)


BACKENDS = {"fused": Fused(), "plain": Plain(), "xformers": XFormers()}


def backend(name: str) -> Any:
    if name not in BACKENDS:
        raise BadSetting(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}; {nearest(name, BACKENDS)}")
    return BACKENDS[name]


class Kernel(nn.Module):
    def __init__(self, scale: float, dropout: float) -> None:
        super().__init__()
        self.scale, self.dropout, self.weights = scale, dropout, Tap()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, mask: Tensor | None) -> Tensor:
        """mask is sight.mask(), made once a call; None also where the sight is causal or worked off in blocks."""
        if self.weights.watched:
            return self.spelled_out(q, k, v, self.dense(q, sight))
        if sight.block:
            return self.in_blocks(q, k, v, sight, sight.block)
        score = sight.position.score(q, sight.q_places, sight.k_places)
        if score is not None:
            return self.run(q, k, v, self.dense(q, sight, score), causal=False)
        return self.run(q, k, v, mask, sight.causal and mask is None)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """mask: bool (True = may attend), or float to add; causal: the plain triangle, with no mask."""
        return self.spelled_out(q, k, v, triangle(q, k) if causal else mask)

    def spelled_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(scale · q kᵀ + mask) v, in which a row that may attend to nothing gives zeros.

        -inf would turn such a row into NaN. The smallest number instead gives it equal weights, and the line after
        the softmax takes from every row what it must not see; where a row sees anything that line changes nothing.
        """
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = self.shaped(self.scale * (q @ k.mT))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if mask is None:
            weights = scores.softmax(-1)
        else:
            allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
            scores = scores if mask.dtype == torch.bool else scores + mask
            weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0)
        weights = self.weights(weights.to(v.dtype))
        return self.dropped(weights) @ v

    def shaped(self, scores: Tensor) -> Tensor:
        return scores

    def dropped(self, weights: Tensor) -> Tensor:
        return attention_dropout(weights, self.dropout) if self.training and self.dropout else weights

    def dense(self, q: Tensor, sight: Sight, score: Tensor | None = None) -> Tensor | None:
        """The whole mask of a sight with the query's own score in it."""
        mask = sight.mask(q.dtype)
        if score is None:
            score = sight.position.score(q, sight.q_places, sight.k_places)
        if score is None:
            return mask
        score = score * self.scale
        if mask is None:
            return score
        return score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask

    def in_blocks(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, size: int) -> Tensor:
        """Short-sighted attention in time and memory O(S · reach): each block of queries meets only keys in reach.

        Blocks are split once and joined again, because the gradient of n overlapping slices would cost n full copies.
        """
        back, ahead = (-(-(reach or 0) // size) for reach in sight.rule.reach)
        ks, vs, out = k.split(size, 2), v.split(size, 2), []
        for i, q_i in enumerate(q.split(size, 2)):
            first, last = max(0, i - back), min(len(ks), i + ahead + 1)
            here = sight.part(slice(i * size, (i + 1) * size), slice(first * size, last * size))
            k_i, v_i = torch.cat(ks[first:last], 2), torch.cat(vs[first:last], 2)
            out.append(self.run(q_i, k_i, v_i, self.dense(q_i, here), causal=False))
        return torch.cat(out, 2)


class FusedKernel(Kernel):
    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        dropout, grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        if attends(q, k, v, mask):
            return attend(q, k, v, mask, causal, self.scale, dropout)
        if dropout and q.device.type == "cpu":  # the mask of machine/attention.c; torch has no fused kernel for it here
            return self.spelled_out(q, k, v, triangle(q, k) if causal else mask)
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=self.scale, enable_gqa=grouped)

    def in_blocks(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, size: int) -> Tensor:
        """A plain window needs no blocks and no masks: machine/attention.c goes along its band."""
        one, window = sight.q_places[:, :1], (sight.rule.reach[0] or 0) + 1
        hidden = sight.rule != Window(window) or sight.keep is not None or sight.k_docs is not None
        scored = sight.position.bias(one, one) is not None or sight.position.score(q[:, :, :1], one, one) is not None
        dropout = self.dropout if self.training else 0.0
        if hidden or scored or not bands(q, k, v, dropout):
            return super().in_blocks(q, k, v, sight, size)
        return attend_window(q, k, v, self.scale, dropout, window)


class XFormersKernel(Kernel):
    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        mask, dropout = triangle(q, k) if causal else mask, self.dropout if self.training else 0.0
        return xformers_attention(q, k, v, mask, dropout, self.scale)


def triangle(q: Tensor, k: Tensor) -> Tensor:
    """[Q, S] True where the key stands at or before the query."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
