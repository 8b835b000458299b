"""Resampling by a windowed sinc, one polyphase filter for each phase, a block at a time.

An output sample at time t is the sum of x[n] h(t - n) over the input samples within `ZERO_CROSSINGS` of it, where h is
the impulse response of a low-pass filter below both Nyquist frequencies: a sinc times a Kaiser window. With rates in
the ratio up : down there are only `up` different sets of taps, so they are computed once.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

ZERO_CROSSINGS = 32  # of the sinc, on each side
ROLLOFF = 0.95  # the cutoff, as a part of the lower Nyquist frequency
KAISER_BETA = 12.0  # stop band below -110 dB


@lru_cache(maxsize=8)
def polyphase_filters(source_rate: int, target_rate: int) -> Tensor:
    """The taps [up, N] of each phase; a phase's first tap is N / 2 - 1 input samples before its time, rounded down."""
    divisor = math.gcd(source_rate, target_rate)
    up = target_rate // divisor
    down = source_rate // divisor
    cutoff = ROLLOFF * min(1.0, up / down)  # in units of the input's Nyquist frequency
    half_width = math.ceil(ZERO_CROSSINGS / cutoff)

    # the distance of each tap from the time of the output sample, in input samples
    fraction = (torch.arange(up, dtype=torch.float64) * down / up) % 1
    distance = torch.arange(1 - half_width, half_width + 1, dtype=torch.float64) - fraction[:, None]  # [up, N]

    window = torch.special.i0(KAISER_BETA * (1 - (distance / half_width).square()).clamp(min=0).sqrt())
    taps = cutoff * torch.sinc(cutoff * distance) * window
    return (taps / taps.sum(1, keepdim=True)).float()  # a constant stays what it is


class Resampler:
    """Resamples a recording that arrives in blocks; the blocks together give what the whole would."""

    def __init__(self, source_rate: int, target_rate: int) -> None:
        divisor = math.gcd(source_rate, target_rate)
        self.up = target_rate // divisor
        self.down = source_rate // divisor
        self.filters = polyphase_filters(source_rate, target_rate)
        self.half_width = self.filters.shape[1] // 2
        self.buffer = torch.zeros(self.half_width - 1)  # the input from the first tap of the next output sample on
        self.received = 0  # input samples
        self.produced = 0  # output samples

    def push(self, x: Tensor) -> Tensor:
        """More input [N]; the output samples that it completes."""
        self.received += len(x)
        self.buffer = torch.cat((self.buffer, x))
        return self._produce(math.inf)

    def finish(self) -> Tensor:
        """The last output samples: as many in all as last as long as the input."""
        self.buffer = torch.cat((self.buffer, torch.zeros(self.half_width + self.down)))
        return self._produce(-(-self.received * self.up // self.down))

    def _produce(self, total: float) -> Tensor:
        """Whole periods of `up` output samples; the last one up to the total."""
        taps = self.filters.shape[1]
        periods = (len(self.buffer) - taps) // self.down  # the last phase begins less than `down` samples later
        if math.isfinite(total):
            periods = -(-(int(total) - self.produced) // self.up)
            self.buffer = torch.nn.functional.pad(
                self.buffer, (0, max(0, periods * self.down + taps - len(self.buffer)))
            )
        if periods <= 0:
            return torch.empty(0)
        out = torch.empty(periods, self.up)
        for phase in range(self.up):
            windows = self.buffer.as_strided((periods, taps), (self.down, 1), phase * self.down // self.up)
            torch.mv(windows, self.filters[phase], out=out[:, phase])
        self.buffer = self.buffer[periods * self.down :].clone()
        samples = out.flatten()
        if math.isfinite(total):
            samples = samples[: int(total) - self.produced]
        self.produced += len(samples)
        return samples


def resample(samples: Tensor, source_rate: int, target_rate: int) -> Tensor:
    """Samples [N] at another rate, [ceil(N · target_rate / source_rate)]."""
    if source_rate == target_rate:
        return samples
    resampler = Resampler(source_rate, target_rate)
    return torch.cat((resampler.push(samples), resampler.finish()))
