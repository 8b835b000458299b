"""VQ-VAE: a small picture codec that trains in minutes (van den Oord et al. 2017).

encoder   strided convolutions, each halving the size ── residual blocks ── 1x1 ── codebook
decoder   codebook ── 3x3 ── residual blocks ── transposed convolutions, each doubling the size

loss = |x - decode(quantized)|² + β |encode(x) - quantized|²       the codebook moves by itself (codebook.py)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.codecs.base import CodecSpec, PictureCodec
from headwater.codecs.codebook import EMACodebook, Quantized, nearest_rows
from headwater.core.base import check_positive
from headwater.i18n import _
from headwater.parts import must, part


@part
class VQVAE(CodecSpec):
    """A picture codec of strided convolutions and a codebook that moves by averages.

    size: pixels of a side; factor: pixels of a side that one token stands for, a power of 2. channels: of the inner
    layers; blocks: residual blocks on each side; width: of the codebook's vectors. decay, min_count: see EMACodebook.
    commitment: the weight β of the commitment loss.
    """

    size: int = 32
    factor: int = 4
    channels: int = 128
    blocks: int = 2
    width: int = 32
    num_codes: int = 256
    decay: float = 0.99
    min_count: float = 0.5
    commitment: float = 0.25

    def __post_init__(self) -> None:
        for name in ("channels", "blocks", "width", "num_codes"):
            check_positive(self, name, _("leave it out for the default"))
        must(self.blocks <= 64, self, _("blocks must be at most {limit}", limit=64), self.blocks, _("2 is usual"))
        is_power = self.factor in (2, 4, 8, 16, 32)
        must(is_power, self, _("factor must be 2, 4, 8, 16 or 32"), self.factor, _("4 is usual"))
        fits = self.size > 0 and self.size % self.factor == 0
        must(fits, self, _("size must be a multiple of {factor}", factor=self.factor), self.size, _("32 is usual"))
        must(self.channels % 2 == 0, self, _("channels must be even"), self.channels, _("128 is usual"))
        must(0 < self.decay < 1, self, _("decay must be above 0 and below 1"), self.decay, _("0.99 is usual"))

    def build_module(self) -> VQVAECodec:
        return VQVAECodec(self)


class CodecOutput(NamedTuple):
    """A training forward pass: the reconstruction in -1 … 1, and the quantized latents."""

    reconstruction: Tensor
    quantized: Quantized


class VQVAECodec(PictureCodec):
    """The encoder, the codebook and the decoder of VQ-VAE."""

    def __init__(self, spec: VQVAE) -> None:
        super().__init__(spec, spec.num_codes, 3, spec.factor, spec.size)
        halvings = spec.factor.bit_length() - 1
        widths = [3, *[spec.channels // 2] * (halvings - 1), spec.channels]

        down: list[nn.Module] = []
        for a, b in zip(widths, widths[1:], strict=False):
            down += [nn.Conv2d(a, b, 4, stride=2, padding=1), nn.ReLU()]
        down += [nn.Conv2d(spec.channels, spec.channels, 3, padding=1)]
        down += [Residual(spec.channels) for _ in range(spec.blocks)]
        self.encoder = nn.Sequential(*down, nn.ReLU(), nn.Conv2d(spec.channels, spec.width, 1))

        self.codebook = EMACodebook(spec.num_codes, spec.width, spec.decay, spec.min_count)

        up: list[nn.Module] = [nn.Conv2d(spec.width, spec.channels, 3, padding=1)]
        up += [Residual(spec.channels) for _ in range(spec.blocks)]
        for b, a in reversed(list(zip(widths, widths[1:], strict=False))):
            up += [nn.ReLU(), nn.ConvTranspose2d(a, b, 4, stride=2, padding=1)]
        self.decoder = nn.Sequential(*up)

    def forward(self, pictures: Tensor) -> CodecOutput:
        """Reconstruct pictures [B, 3, H, W] in 0 … 1; in training the codebook moves."""
        latents = self.encoder(2 * pictures - 1).permute(0, 2, 3, 1)  # [B, rows, columns, D]
        quantized = self.codebook(latents)
        return CodecOutput(self.decoder(quantized.vectors.permute(0, 3, 1, 2)), quantized)

    def encode(self, signal: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] to ids [B, rows · columns]."""
        self.check_pictures(signal)
        latents = self.encoder(2 * signal - 1).permute(0, 2, 3, 1)
        return nearest_rows(latents, self.codebook.table).flatten(1)

    def decode(self, ids: Tensor) -> Tensor:
        """Ids [B, rows · columns] to pictures [B, 3, H, W]."""
        vectors = self.codebook.table[self.grid_ids(ids)].permute(0, 3, 1, 2)  # [B, D, rows, columns]
        return ((self.decoder(vectors) + 1) / 2).clamp(0, 1)

    def loss(self, pictures: Tensor) -> Tensor:
        """The training loss of pictures [B, 3, H, W], a mean over them."""
        assert isinstance(self.spec, VQVAE)
        output = self(pictures)
        error = (output.reconstruction - (2 * pictures - 1)).square().mean()
        loss: Tensor = error + self.spec.commitment * output.quantized.commitment
        return loss


class Residual(nn.Module):
    """x + 1x1(relu(3x3(relu(x)))) through half of the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels // 2, 3, padding=1)
        self.second = nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(torch.relu(x))))


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of pictures in 0 … 1 in decibels: -10 log10 of the mean squared error, for each."""
    error = (a - b).square().flatten(1).mean(1)
    return -10 * error.clamp(min=1e-10).log10()
