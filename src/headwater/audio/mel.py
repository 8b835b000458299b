"""Log-mel spectrograms, exactly as Whisper's: 16 kHz samples to 100 frames a second of 80 or 128 mel bins.

    frame t     samples 160 t - 200 … 160 t + 200, times a Hann window; before the first it is mirrored
    power       |FFT|², 201 frequencies of 40 Hz
    mel         power through triangular filters, even in hertz below 1 kHz and in its logarithm above (Slaney's scale)
    log         log10, at least (the recording's maximum - 8), then (x + 4) / 4

The floor depends on the maximum of the whole recording, so `LogMel` computes that first, in blocks, and then each
window when it is asked for: memory does not grow with the length of the recording.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SAMPLE_RATE = 16_000
HOP = 160  # samples between frames
FRAMES_PER_SECOND = SAMPLE_RATE // HOP
FFT_SIZE = 400
SMALLEST_POWER = 1e-10
DYNAMIC_RANGE = 8.0  # in powers of ten
BLOCK_FRAMES = 3000


def hz_to_mel(hz: Tensor) -> Tensor:
    """Slaney's mel scale: 200/3 Hz a mel up to 1 kHz, 27 mels for each factor of 6.4 above."""
    logarithmic = 15 + 27 * torch.log(hz.clamp(min=1000) / 1000) / torch.log(torch.tensor(6.4, dtype=hz.dtype))
    return torch.where(hz < 1000, 3 * hz / 200, logarithmic)


def mel_to_hz(mel: Tensor) -> Tensor:
    """The inverse of hz_to_mel."""
    return torch.where(mel < 15, 200 * mel / 3, 1000 * 6.4 ** ((mel - 15) / 27))


@lru_cache(maxsize=4)
def mel_filters(bins: int) -> Tensor:
    """The triangular filters [bins, 201], each of the same area (Slaney's normalization)."""
    frequencies = torch.linspace(0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1, dtype=torch.float64)
    highest = hz_to_mel(torch.tensor(SAMPLE_RATE / 2, dtype=torch.float64))
    corners = mel_to_hz(torch.linspace(0, float(highest), bins + 2, dtype=torch.float64))
    rising = (frequencies - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - frequencies) / (corners[2:] - corners[1:-1])[:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0)
    return (triangles * (2 / (corners[2:] - corners[:-2]))[:, None]).float()


def log_power(samples: Tensor, bins: int) -> Tensor:
    """log10 of the mel power [bins, frames] of samples that hold whole frames, (frames - 1) · 160 + 400 of them."""
    window = torch.hann_window(FFT_SIZE)
    spectrum = torch.stft(samples, FFT_SIZE, HOP, window=window, center=False, return_complex=True)  # [201, frames]
    power = spectrum.real.square() + spectrum.imag.square()
    return (mel_filters(bins) @ power).clamp(min=SMALLEST_POWER).log10()


def normalize(log_mel: Tensor, maximum: float) -> Tensor:
    """(max(log_mel, maximum - 8) + 4) / 4"""
    return (log_mel.clamp(min=maximum - DYNAMIC_RANGE) + 4) / 4


class LogMel:
    """The log-mel spectrogram of a recording [N], a window at a time; after its end there is silence."""

    def __init__(self, samples: Tensor, bins: int = 80) -> None:
        self.samples = samples
        self.bins = bins
        self.frames = len(samples) // HOP

    @cached_property
    def maximum(self) -> float:
        """The largest log10 power of the recording, computed a block at a time."""
        frames = self.frames + 2  # the last sample is in the windows of two more
        blocks = range(0, frames, BLOCK_FRAMES)
        return max(float(self._log_power(first, min(BLOCK_FRAMES, frames - first)).max()) for first in blocks)

    @property
    def floor(self) -> float:
        """The value of silence."""
        return (max(math.log10(SMALLEST_POWER), self.maximum - DYNAMIC_RANGE) + 4) / 4

    def window(self, first: int, frames: int) -> Tensor:
        """Frames first … first + frames, [bins, frames]."""
        return normalize(self._log_power(first, frames), self.maximum)

    def _log_power(self, first: int, frames: int) -> Tensor:
        begin = first * HOP - FFT_SIZE // 2
        end = (first + frames - 1) * HOP + FFT_SIZE // 2
        samples = self.samples[max(begin, 0) : max(end, 0)].float()
        mirrored = self.samples[1 : 1 - begin].flip(0).float() if begin < 0 else samples[:0]
        before = torch.cat((torch.zeros(max(0, -begin - len(mirrored))), mirrored))
        missing = max(0, end - begin - len(before) - len(samples))
        return log_power(torch.cat((before, samples, torch.zeros(missing))), self.bins)


def log_mel(samples: Tensor, bins: int = 80, seconds: float | None = None) -> Tensor:
    """The log-mel spectrogram [bins, frames] of samples [N], followed by silence up to `seconds` if given."""
    spectrogram = LogMel(samples, bins)
    frames = spectrogram.frames if seconds is None else round(seconds * FRAMES_PER_SECOND)
    return spectrogram.window(0, frames)
