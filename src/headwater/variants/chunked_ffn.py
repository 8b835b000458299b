"""Chunked feed-forward layer: some tokens at a time, so that not all hidden values of a long row are in memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwater.core.base import check_positive
from headwater.core.feedforward import FeedForward, FeedForwardLayer
from headwater.i18n import _
from headwater.parts import part


@part
class ChunkedFeedForward(FeedForward):
    """A feed-forward layer that reads `chunk` tokens at a time. In training each chunk is computed again backwards."""

    chunk: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk", _("1024 is usual"))

    def build(self, d_model: int) -> nn.Module:
        return ChunkedFeedForwardLayer(self, d_model)


class ChunkedFeedForwardLayer(FeedForwardLayer):
    """The module of ChunkedFeedForward."""

    def __init__(self, spec: ChunkedFeedForward, d_model: int) -> None:
        super().__init__(spec, d_model)
        self.chunk = spec.chunk

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]"""
        feed_forward = super().forward
        chunks = x.split(self.chunk, 1)
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(feed_forward, chunk, use_reentrant=False) for chunk in chunks], 1)
        return torch.cat([feed_forward(chunk) for chunk in chunks], 1)
