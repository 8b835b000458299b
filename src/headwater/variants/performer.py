"""Performer: softmax attention estimated by positive random features, FAVOR+ (Choromanski et al. 2021).

The published causal form scales the keys by their maximum over the whole text, so later keys change earlier outputs.
Here the maximum goes over the keys so far (favor.py): exactly causal, and decoding needs a state of constant size.
Chosen by name as --attention performer:features=256.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from headwater.core.base import KernelConfig, KernelSpec, check_positive
from headwater.core.cache import LayerCache
from headwater.core.kernels import Kernel
from headwater.core.masks import AttentionMask
from headwater.core.modules import ComputedBuffers
from headwater.i18n import Message, _
from headwater.parts import part
from headwater.variants import favor
from headwater.variants.linear_attention import RecurrentKernel, check_unlimited


@part
class Performer(KernelSpec):
    """FAVOR+ attention: `features` random directions, orthogonal in blocks of head_dim, drawn from `seed`."""

    features: int = 256
    seed: int = 0
    unsupported: ClassVar[Mapping[str, Message]] = {
        "bias": _("there are no scores to add it to; use position rotary, sinusoidal or learned"),
        "packing": _("its estimate depends on the largest key of the row; use attention linear, or one document a row"),
    }

    def __post_init__(self) -> None:
        check_positive(self, "features", _("256 is usual"))

    def build(self, config: KernelConfig) -> Kernel:
        check_unlimited(self, config)
        return PerformerKernel(config, self)

    def equivalent_keys(self, keys: int, head_dim: int) -> int:
        return 2 * self.features + min(keys, favor.CHUNK)

    def state_elements(self, head_dim: int, v_head_dim: int) -> int | None:
        return self.features * (v_head_dim + 1) + v_head_dim + 2


class RandomFeatures(ComputedBuffers):
    """projection [M, D]: orthogonal rows in blocks of D, each as long as a random normal vector."""

    projection: Tensor

    def __init__(self, features: int, head_dim: int, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("projection", torch.empty(features, head_dim), persistent=False)

    def init_buffers(self) -> None:
        if self.projection.is_meta:
            return
        features, width = self.projection.shape
        generator = torch.Generator().manual_seed(self.seed)
        blocks = [
            torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q.T
            for _block in range(-(-features // width))
        ]
        lengths = torch.randn(features, width, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
        self.projection.copy_(torch.cat(blocks)[:features] * lengths)


class PerformerKernel(RecurrentKernel):
    """The module of Performer."""

    def __init__(self, config: KernelConfig, spec: Performer) -> None:
        super().__init__(config)
        self.features = RandomFeatures(spec.features, config.head_dim, spec.seed)

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache) -> Tensor:
        if self.weights.has_hooks:
            return self.eager(q, k, v, mask.attention_mask)
        keep = mask.attention_mask
        if not self.is_causal:
            return self._attend(q, k, v, keep)
        projection = self.features.projection
        out, state = favor.favor_attention(q, k, v, projection, True, self.scale, cache.state, keep)
        cache.set_state(state)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None) -> Tensor:
        projection = self.features.projection
        out, _state = favor.favor_attention(
            q, k, v, projection, self.is_causal, self.scale, attention_mask=attention_mask
        )
        return out

    def eager(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        """The same, with the attention weights as a tensor: the output for v = the identity. attn_mask [B, S]."""
        keys = k.shape[2]
        identity = torch.eye(keys, dtype=v.dtype, device=v.device).expand(*k.shape[:2], keys, keys)
        weights = self.weights(self._attend(q, k, identity, attn_mask))  # [B, H, Q, S]
        return weights @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
