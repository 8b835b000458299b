"""Image files: every mode becomes upright, opaque RGB of 8 bits; damaged, lying and huge files are refused."""

from __future__ import annotations

import base64
import importlib.util
import io
import os
import random
import re
import struct
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import pytest
from PIL import Image

from headwater.errors import BadFile, Fault, NotFound, Unavailable
from headwater.vision import images
from headwater.vision.images import decode_image, find_images, read_image

rng = np.random.default_rng(0)
RGB = rng.integers(0, 256, (6, 9, 3), dtype=np.uint8)
GRAY = RGB[..., 0]
SVG = '<svg xmlns="http://www.w3.org/2000/svg"'


def encoded(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, file_format, **options)
    return out.getvalue()


def gray(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


# --------------------------------------------------------------------------------------------------------------- modes


def test_color_and_gray_keep_their_values():
    assert np.array_equal(decode_image(encoded(Image.fromarray(RGB))), RGB)
    assert np.array_equal(decode_image(encoded(Image.fromarray(GRAY))), gray(GRAY))
    assert np.array_equal(decode_image(encoded(Image.fromarray(GRAY > 99))), gray(np.where(GRAY > 99, 255, 0)))


def test_transparency_is_drawn_on_white():
    pixels = np.dstack((RGB, np.full(GRAY.shape, 255, np.uint8)))
    pixels[:3, :, 3] = 0
    expected = RGB.copy()
    expected[:3] = 255
    assert np.array_equal(decode_image(encoded(Image.fromarray(pixels))), expected)
    half = np.dstack((np.zeros_like(RGB), np.full(GRAY.shape, 128, np.uint8)))
    assert set(np.unique(decode_image(encoded(Image.fromarray(half))))) == {127}


def test_a_palette_with_a_transparent_color_is_drawn_on_white():
    image = Image.new("P", (4, 2), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((0, 0), 0)
    pixels = decode_image(encoded(image, "GIF", transparency=0))
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 3].tolist() == [10, 20, 30]


def test_cmyk_is_what_pillow_shows():
    image = Image.fromarray(RGB).convert("CMYK")
    assert np.array_equal(decode_image(encoded(image, "TIFF")), np.asarray(image.convert("RGB")))


def test_16_bits_are_scaled_not_clipped():
    values = np.array([[0, 257, 32768, 65535]], np.uint16)
    assert decode_image(encoded(Image.fromarray(values)))[0, :, 0].tolist() == [0, 1, 128, 255]
    small = np.array([[0, 7, 200]], np.uint16)  # 8 bits in a file of 16
    assert decode_image(encoded(Image.fromarray(small)))[0, :, 1].tolist() == [0, 7, 200]
    fractions = np.array([[0, 0.5, 1]], np.float32) * 0.75
    assert decode_image(encoded(Image.fromarray(fractions), "TIFF"))[0, :, 2].tolist() == [0, 96, 191]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(orientation):
    shown = Image.fromarray(RGB)
    undo = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
            5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
            8: Image.Transpose.ROTATE_270}  # fmt: skip
    stored = shown.transpose(undo[orientation]) if orientation > 1 else shown
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(decode_image(encoded(stored, exif=exif)), RGB)


def test_damaged_exif_does_not_hide_a_picture():
    data = encoded(Image.fromarray(RGB), "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert np.array_equal(decode_image(data), RGB)


def test_of_an_animation_the_first_frame_is_read():
    frames = [Image.new("RGB", (4, 4), color) for color in ((255, 0, 0), (0, 255, 0))]
    for file_format in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **(
            {"lossless": True} if file_format == "WEBP" else {}))  # fmt: skip
        assert decode_image(data)[0, 0].tolist() == [255, 0, 0]


# ----------------------------------------------------------------------------------------------------------- bad input


def refused(data: bytes) -> str:
    with pytest.raises(BadFile) as caught:
        decode_image(data, "cat.png")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 999)) + chunk(b"IEND", b"")
    )


def test_a_bomb_is_refused_by_its_size_before_it_is_decoded():
    start = time.monotonic()
    assert "at most 100,000,000 pixels, it says more" in refused(png_header(60_000, 60_000))
    assert "at most 100,000,000 pixels, it says 12,000 x 12,000" in refused(png_header(12_000, 12_000))
    assert time.monotonic() - start < 1


def test_what_is_no_image_says_so():
    assert "cannot be read as an image" in refused(b"hello" * 99)
    assert "cannot be read as an image" in refused(b"")
    assert "cannot be read as an image" in refused(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    data = encoded(Image.fromarray(np.repeat(RGB, 30, axis=0)), "JPEG")
    assert "truncated" in refused(data[: len(data) // 2])


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(NotFound, match="does not exist"):
        read_image(tmp_path / "none.png")
    with pytest.raises(BadFile, match="it is a folder"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadFile, match="a pipe or a device"):
        read_image(tmp_path / "pipe.png")
    huge = tmp_path / "huge.png"
    with huge.open("wb") as file:
        file.truncate(images.MAX_FILE_BYTES + 1)
    with pytest.raises(BadFile, match="at most 268,435,456 bytes"):
        read_image(huge)


def test_images_are_found_in_folders_sorted_without_hidden_ones(tmp_path):
    for name in ("b/2.PNG", "b/1.jpg", "a.txt", ".thumbs/x.png", "b/.y.png", "c.webp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in find_images(tmp_path)] == ["c.webp", "b/1.jpg", "b/2.PNG"]


def test_svg_is_drawn():
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><rect width="10" height="10" fill="red"/></svg>'
    pixels = decode_image(svg)
    assert pixels.shape == (256, 512, 3)
    assert pixels[100, 100].tolist() == [255, 0, 0]
    assert pixels[100, 400].tolist() == [255, 255, 255]


@pytest.mark.parametrize("unit", ["", "px", "mm", "pt"])
def test_svg_without_a_view_box_has_the_proportions_of_its_size(unit):
    size = f'width="20{unit}" height="40{unit}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="50%" fill="red"/></svg>'
    pixels = decode_image(svg.encode())
    height, width = pixels.shape[:2]
    assert 1.9 < height / width < 2.1 and 490 < height < 530  # resvg rounds the size before it enlarges
    assert pixels[100, 200].tolist() == [255, 0, 0] and pixels[400, 200].tolist() == [255, 255, 255]


def test_svg_that_opens_files_is_refused(tmp_path):
    assert "links to other files" in refused(b'<svg xmlns="x"><image href="/etc/passwd"/></svg>')
    red = tmp_path / "red.png"
    Image.new("RGB", (9, 9), (255, 0, 0)).save(red)
    inner = f'{SVG} viewBox="0 0 9 9"><image width="9" height="9" href="{red}"/></svg>'
    assert "links to other files" in refused(inner.encode())
    hidden = base64.b64encode(inner.encode()).decode()
    outer = f'{SVG} viewBox="0 0 9 9"><image width="9" height="9" href="data:image/svg+xml;base64,{hidden}"/></svg>'
    assert (decode_image(outer.encode()) == 255).all()  # a drawing in a drawing opens no files either


@pytest.mark.parametrize("size", ['width="99999999" height="10"', 'viewBox="0 0 1 999999999"', 'width="1e8mm"', ""])
def test_svg_of_any_size_is_drawn_small(size):
    pixels = decode_image(f'{SVG} {size}><rect width="9" height="9"/></svg>'.encode())
    assert max(pixels.shape[:2]) == images.SVG_SIDE


def test_svg_bombs_are_refused(monkeypatch):
    monkeypatch.setattr(images, "SVG_SECONDS", 1)
    levels = "".join(f'<g id="a{n + 1}">' + f'<use href="#a{n}"/>' * 10 + "</g>" for n in range(12))
    groups = f'<defs><g id="a0"><rect width="1" height="1"/></g>{levels}</defs>'
    laughs = f'{SVG} viewBox="0 0 9 9">{groups}<use href="#a12"/></svg>'
    refused(laughs.encode())
    deep = f'{SVG} viewBox="0 0 9 9">' + "<g>" * 100_000 + "</g>" * 100_000 + "</svg>"
    assert "at most 1 s and 2 GB" in refused(deep.encode())
    noise = '<filter id="f"><feTurbulence baseFrequency="0.5" numOctaves="1000000000"/></filter>'
    slow = f'{SVG} viewBox="0 0 9 9">{noise}<rect width="9" height="9" filter="url(#f)"/></svg>'
    assert "draw it as PNG first" in refused(slow.encode())
    picture = base64.b64encode(png_header(60_000, 60_000)).decode()
    lying = f'{SVG} viewBox="0 0 9 9"><image width="9" height="9" href="data:image/png;base64,{picture}"/></svg>'
    refused(lying.encode())


def test_svg_without_the_package_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="pip install resvg-py"):
        decode_image(f"{SVG}/>".encode())


# -------------------------------------------------------------------------------------------------------------- fuzzing


def seeds() -> list[bytes]:
    color, levels = Image.fromarray(RGB), Image.fromarray(GRAY.astype(np.uint16) * 257)
    formats = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "TGA", "ICO", "PCX", "JPEG2000", "AVIF")
    found = [encoded(color, name) for name in formats if name in images._formats()]
    found += [encoded(color.convert("CMYK"), name) for name in ("JPEG", "TIFF")]
    found += [encoded(levels), encoded(levels, "TIFF"), encoded(levels, "JPEG2000")]
    found += [encoded(color.convert(mode)) for mode in ("P", "LA", "RGBA", "1")]
    found += [encoded(color, "TIFF", compression=kind) for kind in ("tiff_lzw", "tiff_deflate", "jpeg", "packbits")]
    found.append(encoded(color, "JPEG", progressive=True, quality=30))
    frames = [color.transpose(Image.Transpose.FLIP_LEFT_RIGHT), Image.fromarray(255 - RGB)]
    found += [encoded(color, name, save_all=True, append_images=frames) for name in ("GIF", "WEBP", "PNG", "TIFF")]
    exif = Image.Exif()
    exif[0x0112] = 6
    found += [encoded(color, name, exif=exif) for name in ("JPEG", "PNG", "WEBP")]
    return found


def mutated(data: bytes, random_: random.Random) -> bytes:
    """A file with bytes changed, removed, repeated, or with the numbers of its header replaced by large ones."""
    out = bytearray(data)
    kept = random_.choice(
        (0, 0, len(data) // 4, len(data) // 2)
    )  # bytes at the start that stay: the header may be right
    for _ in range(random_.choice((1, 1, 2, 8))):
        at = random_.randrange(min(kept, len(out) - 1), len(out))
        match random_.randrange(5):
            case 0:
                out[at] = random_.randrange(256)
            case 1:
                out[at] ^= 1 << random_.randrange(8)
            case 2:
                del out[at : at + random_.randint(1, 20)]
            case 3:
                out[at:at] = out[at : at + random_.randint(1, 20)]
            case 4:
                out[at : at + 4] = random_.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\0\0\xff\xff")
                )
        out = out or bytearray(b"\0")
    return bytes(out)


Mutation: TypeAlias = Callable[[bytes, random.Random], bytes]


class Survey(NamedTuple):
    """What became of mutated files, and the longest time of processor that one took."""

    read: int
    refused: int
    longest: float  # seconds


def mutated_drawing(svg: bytes, random_: random.Random) -> bytes:
    """An SVG with some of its numbers and names replaced by others."""
    words = re.split(r"([\w.#]+)", svg.decode())
    others = ("-1", "0", "1e9", "1e-9", "1e99", "nan", "99999", "#c", "#g", "text", "pattern", "mask", "use", "filter")
    for _ in range(random_.randint(1, 3)):
        words[random_.randrange(9, len(words), 2)] = random_.choice(others)  # after the name space
    return "".join(words).encode()


def survive(count: int, seed: int, files: list[bytes] | None = None, mutate: Mutation = mutated) -> Survey:
    """Decode mutated files: pixels or a Fault, quickly, of a bounded size."""
    random_ = random.Random(seed)
    files = files or seeds()
    read = 0
    longest = 0.0
    for _ in range(count):
        data = mutate(random_.choice(files), random_)
        start = time.process_time()
        try:
            pixels = decode_image(data)
        except Fault as fault:
            assert "\n" not in str(fault)
        else:
            read += 1
            assert pixels.dtype == np.uint8
            assert pixels.ndim == 3
            assert pixels.shape[2] == 3
            assert pixels.size <= 3 * images.MAX_PIXELS
        longest = max(longest, time.process_time() - start)
        assert longest < 20
    return Survey(read, count - read, longest)


def test_mutated_files_are_read_or_refused():
    assert survive(300, seed=0).read > 30  # many changes leave a picture that can be read


@pytest.mark.slow
def test_thousands_of_mutated_files_are_read_or_refused():
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    survey = survive(20_000, seed=1)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kilobytes
    print(f"{survey}, {len(seeds())} kinds of files, {grown / 1024:.0f} MB more at the peak")
    assert survey.read > 5000
    assert grown < 3 << 20  # never more than a large image


@pytest.mark.slow  # a process for each
def test_hundreds_of_mutated_drawings_are_read_or_refused(monkeypatch):
    monkeypatch.setattr(images, "SVG_SECONDS", 2)
    shapes = '<circle r="3" fill="url(#g)"/><path d="M0 0 L9 9 A 3 3 0 0 0 1 1 Z" stroke="red"/><use href="#c"/>'
    gradient = '<linearGradient id="g"><stop offset="1"/></linearGradient>'
    svg = f'{SVG} viewBox="0 0 9 9">{gradient}<g id="c">{shapes}</g></svg>'
    survey = survive(300, seed=2, files=[svg.encode()], mutate=mutated_drawing)
    print(survey)
    assert survey.read > 20


def test_the_fuzz_test_would_see_a_crash(monkeypatch):
    monkeypatch.setattr(
        images, "to_rgb", lambda image: 1 / 0 if image.mode == "CMYK" else np.zeros((1, 1, 3), np.uint16)
    )
    with pytest.raises(AssertionError):
        survive(50, seed=0)


def test_a_real_photo_is_read(public_files):
    assert read_image(public_files / "data" / "digits" / "china.jpg").shape == (427, 640, 3)
