"""Augmentation and the cache of pixels: functions of (seed, epoch, example) alone, and the same in any batch."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from headwater.vision import pixel_cache
from headwater.vision.augment import ImageAugmenter
from headwater.vision.pixel_cache import decode_images
from headwater.vision.processor import ImageProcessor

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 12, 12, 3), dtype=np.uint8)
EXAMPLES = np.arange(16)
ALL = ImageAugmenter(flip=0.5, crop=0.2, color=0.4, erase=0.5, mixup=0.4, cutmix=0.4, seed=3)


def test_a_batch_is_what_its_images_are_alone():
    whole = ALL(PIXELS, EXAMPLES, epoch=2)
    alone = np.concatenate([ALL(PIXELS[i : i + 1], EXAMPLES[i : i + 1], epoch=2) for i in EXAMPLES])
    assert np.array_equal(whole, alone)
    others = PIXELS[::-1]
    mixed = ALL.mix(PIXELS, others, EXAMPLES, 2)
    for i in EXAMPLES:
        one = ALL.mix(PIXELS[i : i + 1], others[i : i + 1], EXAMPLES[i : i + 1], 2)
        assert np.array_equal(one.pixels[0], mixed.pixels[i])
        assert one.own_share[0] == mixed.own_share[i]


def test_epochs_and_seeds_differ():
    first = ALL(PIXELS, EXAMPLES, 0)
    assert not np.array_equal(first, ALL(PIXELS, EXAMPLES, 1))
    assert not np.array_equal(first, ImageAugmenter(flip=0.5, crop=0.2, seed=4)(PIXELS, EXAMPLES, 0))
    assert np.array_equal(ImageAugmenter()(PIXELS, EXAMPLES, 0), PIXELS)


def test_a_flip_mirrors_and_nothing_else():
    flipped = ImageAugmenter(flip=1.0)(PIXELS, EXAMPLES, 0)
    assert np.array_equal(flipped, PIXELS[:, :, ::-1])


def test_a_crop_shifts_by_at_most_its_margin():
    crop = ImageAugmenter(crop=0.25)(PIXELS, EXAMPLES, 0)
    padded = np.pad(PIXELS, ((0, 0), (3, 3), (3, 3), (0, 0)), mode="reflect")
    windows = [[padded[i, y : y + 12, x : x + 12] for y in range(7) for x in range(7)] for i in EXAMPLES]
    assert all(any(np.array_equal(crop[i], window) for window in windows[i]) for i in EXAMPLES)


def test_erasing_covers_the_area_it_says():
    erased = ImageAugmenter(erase=1.0)(PIXELS, EXAMPLES, 0)
    changed = (erased != PIXELS).any(3).mean((1, 2))
    assert (changed > 0.005).all() and (changed < 0.5).all()


def test_shares_of_mixed_images_are_those_of_their_pixels():
    white, black = np.full_like(PIXELS, 255), np.zeros_like(PIXELS)
    for augmenter in (ImageAugmenter(mixup=1.0), ImageAugmenter(cutmix=1.0)):
        mixed = augmenter.mix(white, black, EXAMPLES, 0)
        assert np.allclose(mixed.pixels.mean((1, 2, 3)) / 255, mixed.own_share, atol=0.003)
    untouched = ImageAugmenter().mix(white, black, EXAMPLES, 0)
    assert (untouched.own_share == 1).all() and (untouched.pixels == 255).all()


def test_rates_are_met():
    many = np.arange(4000)
    draws = ImageAugmenter(mixup=0.3, cutmix=0.2).mix(np.zeros((4000, 2, 2, 3), np.uint8),
                                                     np.full((4000, 2, 2, 3), 255, np.uint8), many, 0)  # fmt: skip
    assert abs(float((draws.own_share < 1).mean()) - 0.5) < 0.03


# ------------------------------------------------------------------------------------------------------ pixel cache


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    paths = []
    for i in range(5):
        paths.append(tmp_path / f"{i}.png")
        Image.fromarray(PIXELS[i]).save(paths[-1])
    paths.insert(2, tmp_path / "bad.png")
    paths[2].write_bytes(b"bad")
    return paths


def test_images_are_decoded_once(files, monkeypatch):
    processor = ImageProcessor(size=(12, 12))
    first = decode_images(files, processor)
    assert np.array_equal(first.pixels, PIXELS[:5])
    assert first.readable.tolist() == [0, 1, 3, 4, 5]
    assert len(first.problems) == 1 and "bad.png" in first.problems[0]

    monkeypatch.setattr(pixel_cache, "_decode", None)  # would fail if it were called
    again = decode_images(files, processor)
    assert np.array_equal(again.pixels, first.pixels) and again.problems == first.problems


def test_a_changed_file_is_decoded_again(files):
    processor = ImageProcessor(size=(12, 12))
    decode_images(files, processor)
    Image.fromarray(PIXELS[9]).save(files[0])
    os.utime(files[0], ns=(1, 1))
    assert np.array_equal(decode_images(files, processor).pixels[0], PIXELS[9])
    assert decode_images(files, ImageProcessor(size=(6, 6))).pixels.shape == (5, 6, 6, 3)
