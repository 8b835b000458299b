"""Frames: the embedding of a log-mel spectrogram by two convolutions, the stem of Whisper's encoder.

log-mel [B, mels, T]  ── conv 3 ── gelu ── conv 3, stride 2 ── gelu ──  [B, Q, D] + positions,  Q = (T - 1) // 2 + 1
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.base import EmbeddingSpec, InitSpec, PositionSpec, check_dropout, check_positive
from headwater.core.embeddings import InputEmbedding, ModelInputs, describe, signal_inputs
from headwater.core.modules import Dropout
from headwater.core.positions import NoPosition
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import part


@part
class Frames(EmbeddingSpec):
    """Input embedding of spectrogram frames: two convolutions, the second of stride 2, and positions."""

    mels: int
    position: PositionSpec = NoPosition()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "mels", _("80 is usual"))
        check_dropout(self)

    def build(self, d_model: int) -> InputEmbedding:
        return FramesLayer(self, d_model)


class FramesLayer(InputEmbedding):
    """The convolutions and positions of Frames."""

    def __init__(self, spec: Frames, d_model: int) -> None:
        super().__init__()
        self.mels = spec.mels
        self.first = nn.Conv1d(spec.mels, d_model, 3, padding=1)
        self.second = nn.Conv1d(d_model, d_model, 3, stride=2, padding=1)
        self.position = spec.position.build(d_model)
        self.dropout = Dropout(spec.dropout)

    def read(self, x: Tensor, name: str) -> ModelInputs:
        """A spectrogram [B, mels, T], checked for dtype and shape; one slot for every two frames."""
        is_spectrogram = isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 3
        if not is_spectrogram or x.shape[1] != self.mels or not x.shape[2]:
            raise BadInput(
                _(
                    "model: {name} must be a log-mel spectrogram, floats [batch, {mels}, frames], got {got}; make it "
                    "with headwater.audio.mel.log_mel",
                    name=name,
                    mels=self.mels,
                    got=describe(x),
                )
            )
        return signal_inputs(x, slots(x.shape[2]))

    def random_input(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random spectrograms [rows, mels, 2 · length], which `length` slots are made of."""
        return torch.randn(rows, self.mels, 2 * length, generator=generator)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """signal [B, mels, T] -> [B, Q, D]"""
        assert inputs.signal is not None
        x = F.gelu(self.first(inputs.signal))
        x = F.gelu(self.second(x)).mT  # [B, Q, D]
        return self.dropout(self.position.add(x, positions))


def slots(frames: int) -> int:
    """The number of vectors that Frames makes of so many frames."""
    return (frames - 1) // 2 + 1


@part
class SinusoidTable(InitSpec):
    """A position table that starts as sinusoids of wavelengths from 2π to 2π · 10⁴: sines first, then cosines."""

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        size, width = tensor.shape
        half = width // 2
        speed = torch.exp(-torch.arange(half) * (torch.log(torch.tensor(10_000.0)) / max(half - 1, 1)))
        angles = torch.arange(size)[:, None] * speed
        tensor.zero_()
        tensor[:, :half] = angles.sin()
        tensor[:, half : 2 * half] = angles.cos()
