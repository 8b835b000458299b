"""Image processor: pixels to the tensor of a model, as preprocessor_config.json says. Pillow's resampling is the rule.

    RGB uint8 ── resize ── center crop ── · rescale factor ── (x - mean) / std ── [B, C, H, W] float32

Resizing comes first and stays in uint8, so that its result can be cached; the rest is arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from headwater.errors import BadFile, BadInput
from headwater.i18n import _
from headwater.io.files import atomic_write, read_limited
from headwater.io.strict_json import parse_json_object
from headwater.vision.images import Pixels
from headwater.weights.hf_config import HFConfig

PROCESSOR_NAME = "preprocessor_config.json"
MAX_BYTES = 1 << 20
MAX_SIDE = 8192
RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
GRAY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow's mode L
# The defaults of transformers by the name of the image processor: a file may leave out what equals them.
PROCESSOR_DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {"size": {"height": 224, "width": 224}, "resample": 2, "image_mean": HALF, "image_std": HALF},
    "DeiT": {
        "size": {"height": 256, "width": 256},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": HALF,
        "image_std": HALF,
    },
    "CLIP": {
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "Siglip": {"size": {"height": 224, "width": 224}, "resample": 3, "image_mean": HALF, "image_std": HALF},
}


@dataclass(frozen=True)
class ImageProcessor:
    """How images become tensors.

    size: (height, width) to resize to, or (shortest edge,), or () to leave the size. crop: (height, width) of a center
    crop, or (). One number in mean and std makes gray images of one channel.
    """

    size: tuple[int, ...] = (224, 224)
    crop: tuple[int, ...] = ()
    resample: int = 2
    rescale: float = 1 / 255
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    kind: str = "ViT"  # whose processor it is in transformers

    @property
    def channels(self) -> int:
        return len(self.mean)

    def resize(self, pixels: Pixels) -> Pixels:
        """[H, W, 3] to the size of the model, uint8."""
        image = Image.fromarray(pixels)
        height, width = self.target_size(*pixels.shape[:2])
        if (height, width) != pixels.shape[:2]:
            image = image.resize((width, height), self.resample)
        resized = np.asarray(image)
        return center_crop(resized, *self.crop) if self.crop else resized

    def target_size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing, before the crop. The longer side of `shortest edge` is rounded down."""
        if len(self.size) == 2:
            return self.size[0], self.size[1]
        if not self.size:
            return height, width
        edge = self.size[0]
        longer = int(edge * max(height, width) / min(height, width))
        if longer > MAX_SIDE:
            raise BadInput(
                _(
                    "an image of {height} x {width} would be {longer:,} pixels long, at most {maximum:,} are allowed; "
                    "crop it first",
                    height=height,
                    width=width,
                    longer=longer,
                    maximum=MAX_SIDE,
                )
            )
        return (edge, longer) if height <= width else (longer, edge)

    def normalize(self, pixels: np.ndarray | Tensor) -> Tensor:
        """Resized pixels [B, H, W, 3] uint8 -> [B, C, H, W] float32."""
        x = torch.as_tensor(pixels).movedim(-1, 1).float()  # [B, 3, H, W]
        if self.channels == 1:
            weights = torch.tensor(GRAY_WEIGHTS)[None, :, None, None]
            x = (x * weights).sum(1, keepdim=True).round()
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        return ((x * self.rescale - mean) / std).contiguous()

    def __call__(self, images: Sequence[Pixels]) -> Tensor:
        """Images [H, W, 3] of any sizes -> [B, C, H, W] float32."""
        resized = [self.resize(image) for image in images]
        if len({image.shape for image in resized}) > 1:
            shapes = ", ".join(sorted({f"{image.shape[0]} x {image.shape[1]}" for image in resized})[:4])
            raise BadInput(
                _(
                    "images of one batch must have one size, these have {shapes}; give a size to resize to",
                    shapes=shapes,
                )
            )
        return self.normalize(np.stack(resized))

    # ------------------------------------------------------------------------------------------------------- the file

    @classmethod
    def from_config(cls, values: dict[str, Any], where: object = PROCESSOR_NAME) -> ImageProcessor:
        """From the contents of a preprocessor_config.json; missing keys have transformers' defaults for its type."""
        name = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "ViT")
        kind = next((kind for kind in PROCESSOR_DEFAULTS if name.startswith(kind)), "ViT")
        config = HFConfig({**PROCESSOR_DEFAULTS[kind], **{k: v for k, v in values.items() if v is not None}}, where)
        resizes = config.get_bool("do_resize", default=True)
        crops = config.get_bool("do_center_crop", default=False)
        normalizes = config.get_bool("do_normalize", default=True)
        mean, std = (_statistics(config, key) for key in ("image_mean", "image_std"))
        if not normalizes:
            mean = (0.0,) * len(mean)
            std = (1.0,) * len(std)
        rescales = config.get_bool("do_rescale", default=True)
        return cls(
            size=_read_size(config, "size", square=kind != "CLIP") if resizes else (),
            crop=_read_size(config, "crop_size", square=True) if crops else (),
            resample=config.get_int("resample", minimum=0, maximum=max(RESAMPLING)),
            rescale=config.get_float("rescale_factor", default=1 / 255) if rescales else 1.0,
            mean=mean,
            std=std,
            kind=kind,
        )

    def to_config(self) -> dict[str, Any]:
        """The contents of preprocessor_config.json, as transformers writes them."""
        size = {"shortest_edge": self.size[0]} if len(self.size) == 1 else _size_dict(self.size)
        return {
            "image_processor_type": f"{self.kind}ImageProcessor",
            "do_convert_rgb": self.channels == 3,
            "do_resize": bool(self.size),
            **({"size": size} if self.size else {}),
            "resample": self.resample,
            "do_center_crop": bool(self.crop),
            **({"crop_size": _size_dict(self.crop)} if self.crop else {}),
            "do_rescale": True,
            "rescale_factor": self.rescale,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }

    def save(self, folder: str | Path) -> None:
        """Write preprocessor_config.json."""
        with atomic_write(Path(folder) / PROCESSOR_NAME) as file:
            file.write((json.dumps(self.to_config(), indent=2) + "\n").encode())


def find_processor(folder: str | Path) -> ImageProcessor | None:
    """The image processor of a model folder; None where it has none."""
    path = Path(folder) / PROCESSOR_NAME
    if not path.is_file():
        return None
    values = parse_json_object(read_limited(path, MAX_BYTES), path)
    named = str(values.get("image_processor_type") or values.get("feature_extractor_type") or "")
    if "image_mean" not in values and "Image" not in named and not named.startswith(tuple(PROCESSOR_DEFAULTS)):
        return None  # of sounds: Whisper's has the same file name
    return ImageProcessor.from_config(values, path)


def center_crop(pixels: Pixels, height: int, width: int) -> Pixels:
    """The middle of an image; one that is too small is padded with black first, as transformers does."""
    rows, columns = pixels.shape[:2]
    if rows < height or columns < width:
        padded = np.zeros((max(rows, height), max(columns, width), pixels.shape[2]), pixels.dtype)
        top = (len(padded) - rows + 1) // 2
        left = (padded.shape[1] - columns + 1) // 2
        padded[top : top + rows, left : left + columns] = pixels
        pixels = padded
        rows, columns = pixels.shape[:2]
    top = (rows - height) // 2
    left = (columns - width) // 2
    return pixels[top : top + height, left : left + width]


def _statistics(config: HFConfig, key: str) -> tuple[float, ...]:
    """The mean or std: a number for each channel."""
    values = config.get_numbers(key)
    if len(values) not in (1, 3) or (key == "image_std" and min(values) <= 0):
        raise BadFile(
            _(
                "{where}: {key} must be 1 or 3 numbers, a std above 0; got {values}",
                where=config.where,
                key=key,
                values=values,
            )
        )
    return values


def _read_size(config: HFConfig, key: str, square: bool) -> tuple[int, ...]:
    """A size in one of its three forms: a number, {"height", "width"}, {"shortest_edge"}."""
    if config.is_number(key):
        side = config.get_int(key, maximum=MAX_SIDE)
        return (side, side) if square else (side,)
    inner = config.section(key)
    if "shortest_edge" in inner:
        return (inner.get_int("shortest_edge", maximum=MAX_SIDE),)
    return inner.get_int("height", maximum=MAX_SIDE), inner.get_int("width", maximum=MAX_SIDE)


def _size_dict(size: tuple[int, ...]) -> dict[str, int]:
    return {"height": size[0], "width": size[1]} if size else {}
