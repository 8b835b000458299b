"""Image files to RGB pixels [H, W, 3], uint8: the formats of Pillow, and SVG where resvg is installed.

A file is what it says only after it was decoded. Size on disk and number of pixels are checked before anything is
decoded; whatever Pillow raises becomes one BadFile. EXIF rotation is applied, transparency is drawn on white, 16-bit
values are scaled, of an animation the first frame is read.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import stat
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image, ImageOps

from headwater.errors import BadFile, NotFound, Unavailable
from headwater.i18n import _
from headwater.io.files import quote
from headwater.vision import svg_process

MAX_FILE_BYTES = 2**28
MAX_PIXELS = 100_000_000  # 300 MB of RGB: more than a camera takes
# Pictures only: no format that runs a program (EPS) or opens other files.
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "TGA", "ICO", "JPEG2000", "AVIF", "PCX")
SUFFIXES = frozenset(
    (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".webp", ".bmp", ".dib", ".tif", ".tiff", ".ppm", ".pgm")
    + (".pbm", ".pnm", ".tga", ".ico", ".jp2", ".avif", ".pcx", ".svg")
)
BACKGROUND = (255, 255, 255)  # behind transparent pixels
SVG_SIDE = 512  # pixels of the longer side of a drawn SVG
SVG_SECONDS = 10  # of processor time to draw one
SVG_TIMEOUT = 60  # seconds on the clock, for a machine that is busy
SVG_MEMORY = 2 << 30  # bytes
Pixels: TypeAlias = np.ndarray  # [H, W, 3] uint8


def is_image_name(path: str | Path) -> bool:
    """Whether a file name ends as one of an image.

    >>> [is_image_name(name) for name in ("a.JPG", "b.svg", "c.txt")]
    [True, True, False]
    """
    return Path(path).suffix.lower() in SUFFIXES


def read_image(path: str | Path) -> Pixels:
    """The pixels of an image file, [H, W, 3] uint8."""
    return decode_image(read_image_bytes(path), path)


def read_image_bytes(path: str | Path) -> bytes:
    """The bytes of a regular file of at most MAX_FILE_BYTES."""
    path = Path(path)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise BadFile(_("{path} must be an image file; it is a folder, a pipe or a device", path=path))
        if status.st_size > MAX_FILE_BYTES:
            raise BadFile(
                _(
                    "{path} must be at most {maximum:,} bytes to be read as an image, it has {size:,}; make it smaller",
                    path=path,
                    maximum=MAX_FILE_BYTES,
                    size=status.st_size,
                )
            )
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        raise NotFound(_("{path} does not exist; check the path", path=path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise BadFile(_("{path} cannot be read: {reason}", path=quote(path), reason=reason)) from None


def decode_image(data: bytes, name: object = "image") -> Pixels:
    """The pixels of an encoded image, [H, W, 3] uint8. name: what an error calls it."""
    if _is_svg(data):
        data = _draw_svg(data, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, and of sizes, which are checked here
            return _decode(data, name)
    except BadFile:
        raise
    except Image.DecompressionBombError:
        raise BadFile(
            _(
                "{name} must have at most {maximum:,} pixels, it says more; make it smaller",
                name=name,
                maximum=MAX_PIXELS,
            )
        ) from None
    except MemoryError:
        raise BadFile(_("{name} needs more memory to be decoded than there is; make it smaller", name=name)) from None
    except Exception as error:  # a decoder of damaged data may raise anything
        raise BadFile(
            _("{name} cannot be read as an image ({reason}); is it damaged?", name=name, reason=_reason(error))
        ) from None


def _decode(data: bytes, name: object) -> Pixels:
    with Image.open(io.BytesIO(data), formats=_formats()) as image:
        _check_size(image.size, name)
        image.load()
        return to_rgb(image)


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this build of Pillow reads."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def to_rgb(image: Image.Image) -> Pixels:
    """A Pillow image of any mode as RGB pixels: upright, opaque, 8 bits."""
    image = _upright(image)
    if image.mode.startswith("I") or image.mode == "F":
        return np.repeat(_to_8_bits(np.asarray(image))[..., None], 3, axis=2)
    if "A" in image.getbands() or "transparency" in image.info:
        layer = image.convert("RGBA")
        opaque = Image.new("RGBA", layer.size, (*BACKGROUND, 255))
        image = Image.alpha_composite(opaque, layer)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB")).copy()


def _upright(image: Image.Image) -> Image.Image:
    """The image as its EXIF orientation shows it; damaged EXIF data is ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # metadata must not make a picture unreadable
        return image


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """Gray values of 16 bits, 32 bits or floats, [H, W] uint8. The largest value tells what white is."""
    values = np.nan_to_num(values.astype(np.float32), nan=0.0, posinf=0.0, neginf=0.0)
    largest = float(values.max(initial=0.0))
    white = next((white for white in (1.0, 255.0, 65535.0) if largest <= white), largest)
    if white == 1.0 and largest == int(largest):
        white = 255.0  # black, or nearly: integers, not fractions
    return np.clip(values * (255.0 / white) + 0.5, 0, 255).astype(np.uint8)


def _check_size(size: tuple[int, int], name: object) -> None:
    """Refuse a number of pixels that nobody photographs, before memory is taken for them."""
    width, height = size
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise BadFile(
            _(
                "{name} must have at most {maximum:,} pixels, it says {width:,} x {height:,}; make it smaller",
                name=name,
                maximum=MAX_PIXELS,
                width=width,
                height=height,
            )
        )


def _reason(error: Exception) -> str:
    """The reason in an exception of Pillow, short and without the memory address that it may hold."""
    text = re.sub(r"<[^>]*>", "", str(error)).strip() or type(error).__name__
    return quote(text.splitlines()[0], 80)


# ---------------------------------------------------------------------------------------------------------------- SVG


def _is_svg(data: bytes) -> bool:
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    return head.startswith((b"<svg", b"<?xml", b"<!--", b"<!DOCTYPE svg")) and b"<svg" in data[:65536]


def _draw_svg(data: bytes, name: object) -> bytes:
    """An SVG drawn as PNG, SVG_SIDE pixels on its longer side. Links to other files and pages are refused."""
    if importlib.util.find_spec("resvg_py") is None:
        raise Unavailable(
            _("{name} is an SVG drawing, which the package resvg_py draws; pip install resvg-py", name=name)
        )
    text = data.decode("utf-8", "replace")
    if re.search(r"href\s*=\s*[\"'](?!#|data:)", text, re.I) or "<!ENTITY" in text:
        raise BadFile(_("{name} links to other files, which is not allowed; draw it as PNG first", name=name))
    width, height = _svg_shape(text)
    longer = "width" if width > height else "height"  # the other side follows from the proportions of the drawing
    limits = {"seconds": SVG_SECONDS, "memory": SVG_MEMORY}
    request = json.dumps({"svg": text, longer: SVG_SIDE, **limits})
    command = [sys.executable, "-P", svg_process.__file__]
    try:
        drawn = subprocess.run(
            command, input=request.encode(), capture_output=True, timeout=SVG_TIMEOUT, check=False, cwd=os.path.sep
        )
    except subprocess.TimeoutExpired:
        drawn = None
    if drawn is not None and drawn.returncode == 0:
        return drawn.stdout
    if drawn is not None and drawn.returncode == 1:
        reason = _reason(ValueError(drawn.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]))
        raise BadFile(_("{name} cannot be read as an image ({reason}); is it damaged?", name=name, reason=reason))
    raise BadFile(
        _(
            "{name} must be a drawing that needs at most {seconds} s and {memory} GB, it needs more; "
            "draw it as PNG first",
            name=name,
            seconds=SVG_SECONDS,
            memory=SVG_MEMORY >> 30,
        )
    )


def _svg_shape(text: str) -> tuple[float, float]:
    """Width and height of a drawing in its own units: its size, else that of its view box, else (1, 1)."""
    start = re.search(r"<svg\b[^<>]*>", text)
    tag = start[0] if start else ""
    box = re.search(r"viewBox\s*=\s*[\"']\s*[-\d.e]+[ ,]+[-\d.e]+[ ,]+([\d.]+)[ ,]+([\d.]+)", tag)
    unit = "(?:px|pt|pc|mm|cm|in)?"  # the same for both sides, so that it cancels in their proportion
    sizes = [re.search(rf"\s{side}\s*=\s*[\"']\s*([\d.]+){unit}\s*[\"']", tag) for side in ("width", "height")]
    shape = [match[1] for match in sizes if match]
    if len(shape) < 2:
        shape = list(box.groups()) if box else []
    try:
        width, height = (float(value) for value in shape)
    except ValueError:
        return 1.0, 1.0
    return width, height


def find_images(folder: str | Path) -> list[Path]:
    """The image files of a folder and of the folders in it, sorted; hidden ones are left out."""
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths += [Path(parent) / name for name in sorted(names) if is_image_name(name) and not name.startswith(".")]
    return paths
