"""Sound augmentation: speed, volume, noise, equalizer and shift of samples; VTLP and SpecAugment of the spectrogram.

An augmentation has no state: its effect on example `index` is a function of (seed, epoch, index) alone, so a resumed
run draws the same numbers, in any batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from headwater.audio.mel import SAMPLE_RATE, hz_to_mel, mel_to_hz
from headwater.audio.resample import resample
from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.rng import randint, uniform

SPEEDS = (-1.0, -0.5, 0.0, 0.5, 1.0)  # times the largest change; few, because each has filters of its own
QUIETEST_NOISE = 40.0  # decibels below the sound
MASKS = 2  # of each kind (SpecAugment's policy LD)
MAX_MASKED = 0.3  # of the frames of a recording
EQUALIZER_BANDS = (100.0, 250.0, 600.0, 1200.0, 2000.0, 3000.0, 4500.0, 8000.0)  # hertz
HIGHEST_FORMANT = 4800.0  # hertz: up to there frequencies are multiplied, above they are drawn together
FFT_MULTIPLE = 1024  # a Fourier transform of a length without large prime factors is several times faster
LIMITS = {
    "speed": 0.5,
    "volume": 40.0,
    "noise": QUIETEST_NOISE,
    "equalizer": 40.0,
    "shift": 30.0,
    "vtlp": 0.5,
    "time_mask": 1000.0,
    "mel_mask": 128.0,
}


@dataclass(frozen=True)
class SoundAugmenter:
    """How recordings are changed in training; 0: not at all.

    speed: the largest change of speed and pitch, as a fraction (Ko et al. 2015). volume: of the level, in decibels.
    noise: white noise, so many decibels below the sound or less loud. equalizer: the largest change of a band of
    frequencies, in decibels, as another microphone makes it. shift: the longest silence before the sound, in seconds.
    vtlp: the largest change of the frequencies alone, as a fraction, as a longer or shorter vocal tract makes it: vocal
    tract length perturbation (Jaitly and Hinton 2013).
    time_mask, mel_mask: the widest masks, in frames of 10 ms and in mel bins (SpecAugment, Park et al. 2019).
    """

    speed: float = 0.0
    volume: float = 0.0
    noise: float = 0.0
    equalizer: float = 0.0
    shift: float = 0.0
    vtlp: float = 0.0
    time_mask: float = 0.0
    mel_mask: float = 0.0
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: Mapping[str, str], seed: int) -> SoundAugmenter:
        """From --augment speed=0.1,time_mask=30."""
        known = [field.name for field in fields(cls) if field.name != "seed"]
        values: dict[str, float] = {}
        for name, text in settings.items():
            if name == "none":
                continue
            if name not in known:
                raise BadSetting(
                    _("augment: sounds have no {name!r}; {nearest}", name=name, nearest=nearest(name, (*known, "none")))
                )
            values[name] = _amount(name, text)
        return cls(**values, seed=seed)

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return self.changes_samples or self.vtlp + self.time_mask + self.mel_mask > 0

    @property
    def changes_samples(self) -> bool:
        """Whether it changes the samples, of which the spectrogram is then computed again."""
        return self.speed + self.volume + self.noise + self.equalizer + self.shift > 0

    @property
    def longest(self) -> float:
        """How many times longer a recording may become, without the shift."""
        return 1 / (1 - self.speed)

    def change_samples(self, samples: Tensor, index: int, epoch: int) -> Tensor:
        """The changed samples [N'] of an example."""
        if self.speed:
            factor = 1 + self.speed * SPEEDS[int(randint(len(SPEEDS), self.seed, epoch, index, "speed"))]
            samples = resample(samples, round(SAMPLE_RATE * factor / 100) * 100, SAMPLE_RATE)
        if self.volume:
            decibels = self.volume * (2 * float(uniform(self.seed, epoch, index, "volume")) - 1)
            samples = samples * 10 ** (decibels / 20)
        if self.shift:
            before = int(self.shift * SAMPLE_RATE * float(uniform(self.seed, epoch, index, "shift")))
            samples = torch.cat((torch.zeros(before), samples))
        if self.noise:
            samples = self._with_noise(samples, index, epoch)
        return self._equalized(samples, index, epoch) if self.equalizer else samples

    def _with_noise(self, samples: Tensor, index: int, epoch: int) -> Tensor:
        """White noise, from `noise` to QUIETEST_NOISE decibels below the mean level."""
        below = self.noise + (QUIETEST_NOISE - self.noise) * float(uniform(self.seed, epoch, index, "noise"))
        level = samples.square().mean().sqrt() * 10 ** (-below / 20)
        generator = torch.Generator().manual_seed(int(randint(2**31, self.seed, epoch, index, "noise samples")))
        return samples + level * torch.randn(len(samples), generator=generator)

    def _equalized(self, samples: Tensor, index: int, epoch: int) -> Tensor:
        """The samples with another gain at each of EQUALIZER_BANDS, and between them as a straight line."""
        draws = uniform(self.seed, epoch, index, "equalizer", np.arange(len(EQUALIZER_BANDS)))
        decibels = self.equalizer * (2 * draws - 1)
        size = -(-len(samples) // FFT_MULTIPLE) * FFT_MULTIPLE
        hertz = np.fft.rfftfreq(size, 1 / SAMPLE_RATE)
        gains = torch.from_numpy(10 ** (np.interp(hertz, EQUALIZER_BANDS, decibels) / 20)).float()
        return torch.fft.irfft(torch.fft.rfft(samples, size) * gains, size)[: len(samples)]

    def change_mel(self, mel: Tensor, frames: int, index: int, epoch: int) -> Tensor:
        """The changed spectrogram [mels, T] of an example of so many frames."""
        if self.vtlp:
            mel = warp_frequencies(mel, 1 + self.vtlp * (2 * float(uniform(self.seed, epoch, index, "vtlp")) - 1))
        return self._masked(mel, frames, index, epoch)

    def _masked(self, mel: Tensor, frames: int, index: int, epoch: int) -> Tensor:
        """The spectrogram [mels, T] with masks of its mean, within the first `frames`."""
        if not self.time_mask + self.mel_mask:
            return mel
        mel = mel.clone()
        mean = mel[:, :frames].mean()
        numbers = np.arange(MASKS)
        draws = [uniform(self.seed, epoch, index, name, numbers) for name in ("width", "first", "mels", "low")]
        for width_draw, first_draw, height_draw, low_draw in zip(*draws, strict=True):
            width = int(width_draw * min(self.time_mask, MAX_MASKED * frames))
            first = int(first_draw * (frames - width + 1))
            mel[:, first : first + width] = mean
            height = int(height_draw * min(self.mel_mask, mel.shape[0]))
            low = int(low_draw * (mel.shape[0] - height + 1))
            mel[low : low + height] = mean
        return mel


def warp_frequencies(mel: Tensor, factor: float) -> Tensor:
    """The spectrogram [mels, T] of a voice whose frequencies are `factor` times as high.

    What is up to HIGHEST_FORMANT before and after is multiplied; from there a straight line leads to half the sample
    rate, which stays where it is.
    """
    nyquist = SAMPLE_RATE / 2
    highest = hz_to_mel(torch.tensor(nyquist, dtype=torch.float64))
    step = highest / (mel.shape[0] + 1)
    centers = mel_to_hz(step * torch.arange(1, mel.shape[0] + 1, dtype=torch.float64))  # [mels], in hertz

    # Where each bin takes its value from, in hertz and then in bins.
    knee = HIGHEST_FORMANT * min(factor, 1.0)
    above = nyquist - (nyquist - centers) * (nyquist - knee / factor) / (nyquist - knee)
    bins = hz_to_mel(torch.where(centers <= knee, centers / factor, above)) / step - 1
    bins = bins.clamp(0, mel.shape[0] - 1)
    lower = bins.long().clamp(max=mel.shape[0] - 2)
    return torch.lerp(mel[lower], mel[lower + 1], (bins - lower).float()[:, None])


def _amount(name: str, text: str) -> float:
    """The amount of an augmentation."""
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 < amount <= LIMITS[name]:
        raise BadSetting(
            _(
                "augment: {name} must be above 0 and at most {limit:g}, got {amount!r}; leave it out for none",
                name=name,
                limit=LIMITS[name],
                amount=text,
            )
        )
    return amount
