"""Contact sheets: many small pictures as one PNG, in a grid."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from headwater.io.files import atomic_write

GAP = 2  # pixels between pictures
MIN_SIDE = 96  # pixels of a small picture on a sheet, enlarged without smoothing
PAPER = 255


def to_pixels(pictures: Tensor) -> np.ndarray:
    """Pictures [B, 3, H, W] in 0 … 1 as pixels [B, H, W, 3] uint8."""
    return np.asarray((pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu())


def contact_sheet(pixels: np.ndarray, columns: int, enlarge: int = 0) -> Image.Image:
    """Pixels [N, H, W, 3] in rows of `columns`. enlarge: how many times a side; 0: until it has MIN_SIDE pixels."""
    count, height, width = pixels.shape[:3]
    enlarge = enlarge or max(1, -(-MIN_SIDE // max(height, width)))
    rows = -(-count // columns)
    step_down = height * enlarge + GAP
    step_right = width * enlarge + GAP
    sheet = np.full((rows * step_down - GAP, columns * step_right - GAP, 3), PAPER, np.uint8)
    for n, picture in enumerate(pixels):
        top = n // columns * step_down
        left = n % columns * step_right
        large = picture.repeat(enlarge, 0).repeat(enlarge, 1)
        sheet[top : top + height * enlarge, left : left + width * enlarge] = large
    return Image.fromarray(sheet)


def write_png(image: Image.Image, path: str | Path) -> Path:
    """Write a PNG; after a crash the file is complete or absent."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(buffer.getvalue())
    return Path(path)
