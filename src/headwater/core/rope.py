"""RoPE beyond the trained length: ways to slow the rotation down. Each part answers three questions.

speeds(speed, theta)           the angular speeds to keep, from theta^(-2i/D) (float64)
at_length(speed, theta, places) the speeds for this call, [n] or [B|1, 1, 1, n], where they depend on the text's length
gain                           a factor on cos and sin
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from headwater.parts import must, part


class Scaling:
    """What a rotary position may be scaled by; this one does nothing."""

    gain: ClassVar[float] = 1.0

    def speeds(self, speed: Tensor, theta: float) -> Tensor:
        return speed

    def at_length(self, speed: Tensor, theta: float, places: Tensor) -> Tensor:
        return speed


@part
class NoScaling(Scaling):
    """The speeds as they are."""


@part
class LinearScaling(Scaling):
    """Every speed divided by the factor: places are squeezed together."""

    factor: float

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, "factor must be at least 1", self.factor, "1 changes nothing")

    def speeds(self, speed: Tensor, theta: float) -> Tensor:
        return speed / self.factor


@part
class DynamicScaling(Scaling):
    """Dynamic NTK: past the trained length L the base grows by (factor·n/L - (factor - 1))^(D/(D-2)); n of each row.

    Keys already in a cache stay as they were turned, so past L a cached answer is not quite that of the whole text.
    """

    factor: float
    trained: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, "factor must be at least 1", self.factor, "1 changes nothing")
        must(self.trained >= 1, self, "trained must be at least 1", self.trained, "give the trained length")

    def at_length(self, speed: Tensor, theta: float, places: Tensor) -> Tensor:
        width = 2 * speed.numel()
        if width <= 2:
            return speed
        length = (places.amax(1) + 1).clamp(min=self.trained).double()[:, None, None, None]
        growth = (self.factor * length / self.trained - (self.factor - 1)) ** (width / (width - 2))
        even = torch.arange(0, width, 2, device=speed.device, dtype=torch.float64)
        return ((theta * growth) ** (-even / width)).to(speed.dtype)


@part
class Llama3Scaling(Scaling):
    """By wavelength: below trained/high unchanged, above trained/low divided by factor, between: a blend of the two."""

    factor: float
    low: float
    high: float
    trained: int

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, "factor must be at least 1", self.factor, "1 changes nothing")
        must(self.trained >= 1, self, "trained must be at least 1", self.trained, "give the trained length")
        must(0 < self.low < self.high, self, "low must be above 0 and below high", (self.low, self.high), "1 and 4")

    def speeds(self, speed: Tensor, theta: float) -> Tensor:
        turns = self.trained * speed / (2 * math.pi)  # how often the wave fits into the trained length
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return speed * (share + (1 - share) / self.factor)


@part
class PerFrequency(Scaling):
    """Each speed divided by a factor of its own."""

    factors: tuple[float, ...]

    def speeds(self, speed: Tensor, theta: float) -> Tensor:
        fits = len(self.factors) == speed.numel() and all(factor > 0 for factor in self.factors)
        must(fits or speed.is_meta, self, f"there must be {speed.numel()} factors above 0", len(self.factors), "mend")
        return speed / torch.tensor(self.factors, dtype=speed.dtype, device=speed.device)


@part
class YarnScaling(Scaling):
    """YaRN: fast waves stay, slow ones are divided by factor, a ramp between; cos, sin grow by 0.1·ln(factor) + 1."""

    factor: float
    trained: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    whole_steps: bool = True

    def __post_init__(self) -> None:
        must(self.factor >= 1, self, "factor must be at least 1", self.factor, "1 changes nothing")
        must(self.trained >= 1, self, "trained must be at least 1", self.trained, "give the trained length")
        must(0 < self.slow < self.fast, self, "slow must be above 0 and below fast", (self.slow, self.fast), "1 and 32")

    @property
    def gain(self) -> float:  # type: ignore[override]
        return self.attention if self.attention is not None else 0.1 * math.log(self.factor) + 1

    def speeds(self, speed: Tensor, theta: float) -> Tensor:
        width = 2 * speed.numel()

        def dim(turns: float) -> float:
            """The dimension whose wave turns so often within the trained length."""
            return width * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim(self.fast), dim(self.slow)
        if self.whole_steps:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        step = torch.arange(speed.numel(), device=speed.device, dtype=speed.dtype)
        slowed = ((step - low) / max(high - low, 0.001)).clamp(0, 1)
        return speed * (1 - slowed) + speed / self.factor * slowed
