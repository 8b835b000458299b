"""Image augmentation: flip, crop, color, random erasing, mixup and cutmix, on batches of pixels [B, H, W, 3] uint8.

An augmentation has no state: its effect on example `index` is a function of (seed, epoch, index) alone, so a resumed
run draws the same numbers, in any batch. Mixup and cutmix mix with an example drawn from the whole dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headwater.errors import BadSetting, nearest
from headwater.i18n import _
from headwater.rng import randint, uniform

ERASED_AREA = (0.02, 0.33)  # fractions of an image (Zhong et al. 2017)
MAX_CROP = 0.5


@dataclass(frozen=True)
class ImageAugmenter:
    """How images are changed in training.

    flip: probability of a mirror image. crop: the largest shift, as a fraction of the side. color: the largest change
    of brightness, contrast and saturation, as a fraction. erase: probability of a random rectangle of gray.
    mixup, cutmix: probability that an image is mixed with another, with weights that are uniform (Beta(1, 1)).
    """

    flip: float = 0.0
    crop: float = 0.0
    color: float = 0.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    seed: int = 0

    @classmethod
    def from_settings(cls, settings: Mapping[str, str], seed: int) -> ImageAugmenter:
        """From --augment flip=0.5,crop=0.1; without any, crop=0.125 alone: a mirrored letter is another letter."""
        known = ("flip", "crop", "color", "erase", "mixup", "cutmix")
        rates: dict[str, float] = {}
        for name, text in (settings or {"crop": "0.125"}).items():
            if name == "none":
                continue
            if name not in known:
                raise BadSetting(
                    _("augment: images have no {name!r}; {nearest}", name=name, nearest=nearest(name, (*known, "none")))
                )
            rates[name] = _rate(name, text)
        if rates.get("mixup", 0) + rates.get("cutmix", 0) > 1:
            raise BadSetting(_("augment: mixup and cutmix together must be at most 1; lower one of them"))
        return cls(**rates, seed=seed)

    def __call__(self, pixels: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """A changed copy of the pixels [B, H, W, 3] of these examples."""
        if self.crop:
            pixels = self._cropped(pixels, examples, epoch)
        if self.flip:
            mirrored = uniform(self.seed, epoch, examples, "flip") < self.flip
            pixels = np.where(mirrored[:, None, None, None], pixels[:, :, ::-1], pixels)
        if self.color:
            pixels = self._recolored(pixels, examples, epoch)
        if self.erase:
            pixels = self._erased(pixels, examples, epoch)
        return pixels

    def _cropped(self, pixels: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """Shifted by up to `crop` of the side; what comes in is the reflection of the border."""
        side = pixels.shape[1]
        margin = max(1, round(self.crop * side))
        padded = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="reflect")
        top, left = (randint(2 * margin + 1, self.seed, epoch, examples, name) for name in ("top", "left"))
        rows = top[:, None] + np.arange(side)  # [B, H]
        columns = left[:, None] + np.arange(pixels.shape[2])  # [B, W]
        batch = np.arange(len(pixels))[:, None, None]
        return padded[batch, rows[:, :, None], columns[:, None, :]]

    def _recolored(self, pixels: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """Brightness, contrast and saturation, each times 1 ± color."""
        factors = [
            (1 + self.color * (2 * uniform(self.seed, epoch, examples, name) - 1))[:, None, None, None]
            for name in ("brightness", "contrast", "saturation")
        ]
        x = pixels.astype(np.float32) * factors[0]
        mean = x.mean((1, 2, 3), keepdims=True)
        x = mean + (x - mean) * factors[1]
        gray = x.mean(3, keepdims=True)
        x = gray + (x - gray) * factors[2]
        return np.clip(x + 0.5, 0, 255).astype(np.uint8)

    def _erased(self, pixels: np.ndarray, examples: np.ndarray, epoch: int) -> np.ndarray:
        """A rectangle of gray in a part of the images."""
        chosen = uniform(self.seed, epoch, examples, "erase") < self.erase
        low, high = ERASED_AREA
        area = low + (high - low) * uniform(self.seed, epoch, examples, "area")
        inside = self._boxes(pixels.shape, examples, epoch, area, "erase") & chosen[:, None, None]
        return np.where(inside[..., None], np.uint8(128), pixels)

    def _boxes(
        self, shape: tuple[int, ...], examples: np.ndarray, epoch: int, area: np.ndarray, name: str
    ) -> np.ndarray:
        """[B, H, W] True in a rectangle of this fraction of each image, at a random place within it."""
        height, width = (np.maximum(1, np.round(side * np.sqrt(area))).astype(int) for side in shape[1:3])
        top = (uniform(self.seed, epoch, examples, name, "top") * (shape[1] - height + 1)).astype(int)
        left = (uniform(self.seed, epoch, examples, name, "left") * (shape[2] - width + 1)).astype(int)
        rows = np.arange(shape[1])
        columns = np.arange(shape[2])
        in_rows = (rows >= top[:, None]) & (rows < (top + height)[:, None])
        in_columns = (columns >= left[:, None]) & (columns < (left + width)[:, None])
        return in_rows[:, :, None] & in_columns[:, None, :]

    # ---------------------------------------------------------------------------------------------------------- mixing

    @property
    def mixes(self) -> bool:
        return self.mixup + self.cutmix > 0

    def partners(self, examples: np.ndarray, epoch: int, size: int) -> np.ndarray:
        """[B] the example of the dataset that each of these is mixed with."""
        return randint(size, self.seed, epoch, examples, "partner")

    def mix(self, pixels: np.ndarray, others: np.ndarray, examples: np.ndarray, epoch: int) -> Mixed:
        """Mixup (Zhang et al. 2017) or cutmix (Yun et al. 2019) with other images, or neither, for each image."""
        draw = uniform(self.seed, epoch, examples, "mix")
        other_weight = uniform(self.seed, epoch, examples, "share")
        blended = draw < self.mixup
        pasted = ~blended & (draw < self.mixup + self.cutmix)
        weights = (other_weight * blended)[:, None, None, None]
        mean = pixels * (1 - weights) + others * weights
        boxes = self._boxes(pixels.shape, examples, epoch, other_weight, "cutmix") & pasted[:, None, None]
        mixed = np.where(boxes[..., None], others, np.clip(mean + 0.5, 0, 255).astype(np.uint8))
        other_share = np.where(pasted, boxes.mean((1, 2)), other_weight * blended)
        return Mixed(mixed, (1 - other_share).astype(np.float32))


class Mixed(NamedTuple):
    """Mixed images, and the share of each in the result: the weight of its own label."""

    pixels: np.ndarray  # [B, H, W, 3] uint8
    own_share: np.ndarray  # [B] float32


def _rate(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    highest = MAX_CROP if name == "crop" else 1.0
    if not 0 <= value <= highest:
        raise BadSetting(
            _("augment: {name} must be from 0 to {highest:g}, got {text!r}", name=name, highest=highest, text=text)
        )
    return value
