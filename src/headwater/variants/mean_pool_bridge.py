"""Mean pooling between encoder and decoder: cross-attention reads fewer states (a shorter source)."""

from __future__ import annotations

import torch
from torch import nn

from headwater.core.base import BridgeSpec
from headwater.core.embeddings import ModelInputs
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part


@part
class MeanPoolBridge(BridgeSpec):
    """Mean pooling of the encoder output: the decoder reads the mean of each `factor` neighbouring states."""

    factor: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, _("factor must be at least 1"), self.factor, _("2 halves the source"))

    def build(self) -> nn.Module:
        return MeanPoolBridgeLayer(self.factor)


class MeanPoolBridgeLayer(nn.Module):
    """The module of MeanPoolBridge."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, memory: ModelInputs) -> ModelInputs:
        """Hidden states [B, S, D] -> [B, S / factor, D], rounded up; padding does not count in a mean."""
        x = memory.hidden_states
        if x is None or memory.document_ids is not None:
            raise BadInput(_("bridge: packed documents cannot be pooled, got some; give one document per row"))
        num_padding = -x.shape[1] % self.factor
        mask = torch.ones_like(memory.ids, dtype=torch.bool) if memory.attention_mask is None else memory.attention_mask
        if memory.attention_mask is not None:  # move padding to the end, so that padding on the left shifts no group
            order = (~mask).byte().argsort(dim=1, stable=True)
            mask = mask.gather(1, order)
            x = torch.take_along_dim(x, order[:, :, None], 1)
        mask = nn.functional.pad(mask, (0, num_padding)).unflatten(1, (-1, self.factor))  # [B, S / factor, factor]
        x = nn.functional.pad(x, (0, 0, 0, num_padding)).unflatten(1, (-1, self.factor))  # [B, S / factor, factor, D]
        weights = mask[..., None].to(x.dtype)
        pooled = (x * weights).sum(2) / weights.sum(2).clamp(min=1)
        return ModelInputs(memory.ids, mask.any(2), hidden_states=pooled)
