"""Voice activity detection (VAD) by energy: where the level rises above the background noise, as that of speech does.

The level is the mean power of each tenth of a second in decibels. That of speech changes by tens of decibels within a
second; that of silence, hum and white noise does not. A tenth is active if its level is well above the background,
which is a low quantile of all levels. It is made to detect silence reliably rather than speech, so whatever is shorter
than a second is active unless it is silence.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from headwater.audio.mel import BLOCK_FRAMES, FRAMES_PER_SECOND, HOP, LogMel

LEVEL_FRAMES = 10  # a tenth of a second
MIN_LEVELS = 10  # a second: of fewer levels nobody can say whether they vary
MARGIN = 6.0  # decibels above the background
MAX_BACKGROUND = -30.0  # decibels, relative to the highest level
SILENCE = -70.0  # decibels of full scale: no lower level is active
QUANTILE = 0.1
MAX_LEVELS = 1 << 20  # for the quantile; of more levels, every eighth is used


class VoiceActivity:
    """The levels of a recording, and which of them are active. highest_before: the highest level of earlier sound."""

    def __init__(self, mel: LogMel, highest_before: float = -math.inf) -> None:
        self.mel = mel
        self.highest_before = highest_before

    @cached_property
    def levels(self) -> Tensor:
        """The level of each tenth of a second in decibels of full scale, [N]; from the samples, a block at a time."""
        samples = self.mel.samples
        step = HOP * LEVEL_FRAMES
        levels = []
        for begin in range(0, len(samples), BLOCK_FRAMES * HOP):
            block = samples[begin : begin + BLOCK_FRAMES * HOP].float()
            block = torch.nn.functional.pad(block, (0, -len(block) % step)).unflatten(0, (-1, step))
            centered = block - block.mean(1, keepdim=True)
            levels.append(10 * centered.square().mean(1).clamp(min=1e-12).log10())
        return torch.cat(levels)

    @cached_property
    def threshold(self) -> float:
        """The level above which a tenth of a second is active."""
        levels = self.levels
        background = float(levels[:: 8 if len(levels) > MAX_LEVELS else 1].quantile(QUANTILE))
        highest = float(levels.max())
        varies = highest - float(levels.median()) > MARGIN or len(levels) < MIN_LEVELS
        if varies:  # recordings without a pause have no level that is background noise
            background = min(background, highest + MAX_BACKGROUND)
        return max(background + MARGIN, self.highest_before + MAX_BACKGROUND, SILENCE)

    def active_seconds(self, first: int, last: int) -> float:
        """The duration of the activity in frames first … last."""
        levels = self.levels[max(first, 0) // LEVEL_FRAMES : -(-last // LEVEL_FRAMES)]
        return float((levels > self.threshold).sum()) * LEVEL_FRAMES / FRAMES_PER_SECOND

    def is_active(self, first: int, last: int) -> bool:
        """Whether there is activity in frames first … last."""
        return self.active_seconds(first, last) > 0

    def is_active_between(self, start: float, end: float) -> bool:
        """Whether there is activity between two times in seconds."""
        return self.is_active(int(start * FRAMES_PER_SECOND), max(int(end * FRAMES_PER_SECOND), 1))
