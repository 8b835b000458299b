"""A linear layer between encoder and decoder, where their widths differ (MusicGen reads a narrower T5)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from headwater.core.base import BridgeSpec, check_positive
from headwater.core.embeddings import ModelInputs
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part


@part
class LinearBridge(BridgeSpec):
    """The encoder output [B, S, source_width] through a linear layer to `width`, that of the decoder."""

    source_width: int
    width: int

    def __post_init__(self) -> None:
        check_positive(self, "source_width", _("give d_model of the encoder"))
        check_positive(self, "width", _("give d_model of the decoder"))

    def build(self) -> nn.Module:
        return LinearBridgeLayer(self)

    def output_width(self, width: int) -> int:
        must(
            width == self.source_width, self, _("source_width must be that of the encoder"), width, _("make them equal")
        )
        return self.width


class LinearBridgeLayer(nn.Module):
    """The module of LinearBridge."""

    def __init__(self, spec: LinearBridge) -> None:
        super().__init__()
        self.projection = nn.Linear(spec.source_width, spec.width)

    def forward(self, memory: ModelInputs) -> ModelInputs:
        """Hidden states [B, S, source_width] -> [B, S, width]"""
        if memory.hidden_states is None:
            raise BadInput(_("bridge: it reads the output of an encoder, got none; memory = model.encode(source)"))
        return replace(memory, hidden_states=self.projection(memory.hidden_states))
