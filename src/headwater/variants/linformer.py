"""Linformer: attention to a few learned mixtures of all positions (Wang et al. 2020).

    softmax(q (Eᵀ K)ᵀ · scale) Fᵀ V,   E, F [length, features] learned, one row per position, shared by all heads

Each mixture holds every position, so it cannot be causal, cached or packed. Chosen by name as --attention linformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import KernelConfig, KernelSpec, check_positive
from headwater.core.cache import LayerCache
from headwater.core.kernels import Kernel, MasklessKernel
from headwater.core.masks import AttentionMask
from headwater.errors import TooLong
from headwater.i18n import Message, _
from headwater.parts import must, part


@part
class Linformer(KernelSpec):
    """Linformer attention: `features` mixtures of at most `length` positions. share_kv: E = F."""

    length: int
    features: int = 256
    share_kv: bool = False
    unsupported: ClassVar[Mapping[str, Message]] = {
        "bias": _("its keys have no positions; use position sinusoidal or learned"),
        "cache": _("it reads all positions at once; use attention linear or window"),
        "packing": _("it mixes all positions of a row; use attention linear or window, or one document a row"),
        "left_padding": _("each of its weights belongs to a position; pad on the right"),
    }

    def __post_init__(self) -> None:
        check_positive(self, "features", _("256 is usual"))
        must(
            self.features <= self.length,
            self,
            _("features must be at most length ({length})", length=self.length),
            self.features,
            _("choose fewer features, or a greater length"),
        )

    def build(self, config: KernelConfig) -> Kernel:
        must(
            config.mask.window_size == (None, None),
            self,
            _("the mask of {layer} must be Bidirectional, for every key is a mixture of all", layer=config.name),
            type(config.mask).__name__,
            _("use attention linear, performer or window in a decoder"),
        )
        return LinformerKernel(config, self)

    def equivalent_keys(self, keys: int, head_dim: int) -> int:
        return 2 * self.features


class LinformerKernel(MasklessKernel):
    """The module of Linformer. key_mixtures, value_mixtures [length, features]: E and F."""

    def __init__(self, config: KernelConfig, spec: Linformer) -> None:
        super().__init__(config)
        self.length = spec.length
        self.key_mixtures = nn.Parameter(torch.empty(spec.length, spec.features))
        self.value_mixtures = None if spec.share_kv else nn.Parameter(torch.empty(spec.length, spec.features))

    def compute(self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, cache: LayerCache) -> Tensor:
        keys = k.shape[2]
        if keys > self.length:
            raise TooLong(
                _(
                    "Linformer: its length is {length} positions, got {keys}; shorten the input, or build it with "
                    "length={keys}",
                    length=self.length,
                    keys=keys,
                )
            )
        if mask.attention_mask is not None:
            kept = mask.attention_mask[:, None, :, None]
            k = k * kept
            v = v * kept
        value_mixtures = self.key_mixtures if self.value_mixtures is None else self.value_mixtures
        k = self.key_mixtures[:keys].mT @ k  # [B, G, features, D]
        v = value_mixtures[:keys].mT @ v
        if self.weights.has_hooks:
            return self.eager(q, k, v, None)
        return functional.attention(q, k, v, None, False, self.scale, self.dropout_rate)
