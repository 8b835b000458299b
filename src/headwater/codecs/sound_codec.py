"""A small sound codec that trains in minutes: EnCodec's convolutions, and codebooks that move by averages.

loss = time · |x - y|  +  Σ over windows of a spectrogram (|S(x) - S(y)| + |log S(x) - log S(y)|)  +  β · commitment

y is decode(quantized). EnCodec adds discriminators, which a large set needs; here the spectrograms alone say what
sounds alike. A row of a codebook that no frame chooses restarts at a vector of the batch (codebook.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwater.codecs.codebook import Quantized, ResidualCodebooks
from headwater.codecs.encodec import EnCodec, EnCodecModel, NormedWeight, SoundTransposedConv
from headwater.i18n import _
from headwater.parts import must, part

WINDOWS = (128, 512, 2048)  # samples of the spectrograms' windows; four windows overlap
FLOOR = 1e-3  # below which a magnitude counts as silence in the logarithm
MEL_WINDOW = 1024


@part
class SoundCodec(EnCodec):
    """EnCodec of small sizes for 16 kHz, which learns. decay, min_count: see EMACodebook.

    commitment: the weight β of the commitment loss; time_weight: of the waveform.
    """

    sampling_rate: int = 16000
    filters: int = 16
    width: int = 32
    ratios: tuple[int, ...] = (5, 4, 4, 4)
    lstm_layers: int = 1
    num_books: int = 8
    num_codes: int = 256
    decay: float = 0.99
    min_count: float = 0.2
    commitment: float = 0.25
    time_weight: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        must(0 < self.decay < 1, self, _("decay must be above 0 and below 1"), self.decay, _("0.99 is usual"))

    def build_module(self) -> SoundCodecModel:
        return SoundCodecModel(self)


class SoundOutput(NamedTuple):
    """A training forward pass: the reconstruction [B, C, T], and the quantized latents."""

    reconstruction: Tensor
    quantized: Quantized


class SoundCodecModel(EnCodecModel):
    """The networks of EnCodec, whose codebooks move in training."""

    def __init__(self, spec: SoundCodec) -> None:
        super().__init__(spec)
        self.spec: SoundCodec = spec
        self.quantizer = ResidualCodebooks(spec.num_books, spec.num_codes, spec.width, spec.decay, spec.min_count)
        for module in self.modules():
            if isinstance(module, NormedWeight):
                keep_variance(module)

    def forward(self, sounds: Tensor) -> SoundOutput:
        """Reconstruct sounds [B, C, T]; in training the codebooks move."""
        quantized = self.quantizer(self.encoder(sounds).transpose(1, 2))
        decoded = self.decoder(quantized.vectors.transpose(1, 2))
        return SoundOutput(decoded[..., : sounds.shape[-1]], quantized)

    def loss(self, sounds: Tensor) -> Tensor:
        """The training loss of sounds [B, C, T], a mean over them."""
        output = self(sounds)
        spec = self.spec
        waveform = (output.reconstruction - sounds).abs().mean()
        spectral = spectral_distance(output.reconstruction, sounds)
        return spec.time_weight * waveform + spectral + spec.commitment * output.quantized.commitment


@torch.no_grad()
def keep_variance(conv: NormedWeight) -> None:
    """Scale the initial weight of a convolution so that its output varies as much as its input.

    With the usual initialization a sound fades from layer to layer, all frames choose one code, and nothing is learned.
    """
    if conv.group_norm:
        return
    incoming, outgoing, kernel = conv.direction.shape
    values = outgoing * kernel  # that the initial bound is made for: fan_in of a convolution
    fan_in = incoming * kernel / conv.ratio if isinstance(conv, SoundTransposedConv) else values
    conv.scale.mul_((3 * values / fan_in) ** 0.5)


def spectral_distance(a: Tensor, b: Tensor) -> Tensor:
    """The mean distance of spectrograms of sounds [B, C, T], over several lengths of windows."""
    total = a.new_zeros(())
    for size in WINDOWS:
        x, y = (magnitudes(sound, size) for sound in (a, b))
        logs = (x.clamp(min=FLOOR).log() - y.clamp(min=FLOOR).log()).abs().mean()
        total = total + (x - y).abs().mean() + logs
    return total / len(WINDOWS)


def magnitudes(sounds: Tensor, size: int) -> Tensor:
    """Magnitudes of the spectrogram [B · C, size / 2 + 1, frames], such that they do not grow with the window."""
    window = torch.hann_window(size, device=sounds.device)
    flat = torch.nn.functional.pad(sounds.flatten(0, 1), (0, max(0, size - sounds.shape[-1])))
    spectrum = torch.stft(
        flat.float(), size, size // 4, window=window, center=True, pad_mode="constant", return_complex=True
    )
    power = spectrum.real.square() + spectrum.imag.square()
    return (power + 1e-10).sqrt() / size**0.5


def snr(sounds: Tensor, decoded: Tensor) -> Tensor:
    """Signal-to-noise ratio of sounds [B, C, T] in decibels, for each: power of the sound over that of the error."""
    signal = sounds.square().flatten(1).mean(1).clamp(min=1e-10)
    error = (sounds - decoded).square().flatten(1).mean(1).clamp(min=1e-10)
    return 10 * (signal / error).log10()


def spectrum_decibels(sounds: Tensor, decoded: Tensor) -> Tensor:
    """The mean difference of the spectrograms of sounds [B, C, T] in decibels, for each."""
    x, y = (20 * magnitudes(sound, MEL_WINDOW).clamp(min=FLOOR).log10() for sound in (sounds, decoded))
    return (x - y).abs().flatten(1).mean(1)
