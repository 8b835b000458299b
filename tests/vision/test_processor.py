"""The image processor equals transformers' (Pillow back end) through preprocessor_config.json, both ways."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.errors import BadFile, BadInput
from headwater.vision.processor import HALF, ImageProcessor, center_crop, find_processor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

CLASSES = {name: getattr(T, f"{name}ImageProcessorPil") for name in ("ViT", "DeiT", "CLIP", "Siglip")}
SHAPES = [(225, 300), (300, 225), (20, 31), (224, 224), (60, 500)]
rng = np.random.default_rng(0)


def picture(shape: tuple[int, int]) -> np.ndarray:
    return rng.integers(0, 256, (*shape, 3), dtype=np.uint8)


@pytest.mark.parametrize("settings", [{}, {"resample": 0}, {"size": {"height": 40, "width": 56}}, {"do_resize": False},
                                      {"do_rescale": False}, {"do_normalize": False}, {"crop_size": 50}],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("name", CLASSES)
def test_tensors_equal_those_of_transformers(name, settings, tmp_path):
    theirs = CLASSES[name](**settings)
    theirs.save_pretrained(tmp_path)
    ours = find_processor(tmp_path)
    for shape in SHAPES:
        pixels = picture(shape)
        expected = theirs(images=[Image.fromarray(pixels)], return_tensors="pt").pixel_values
        got = ours([pixels])
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_written_is_read_by_both(name, tmp_path):
    theirs = CLASSES[name](resample=0, image_std=[0.1, 0.2, 0.3])
    theirs.save_pretrained(tmp_path)
    ours = find_processor(tmp_path)
    (tmp_path / "again").mkdir()
    ours.save(tmp_path / "again")
    assert find_processor(tmp_path / "again") == ours
    again = CLASSES[name].from_pretrained(tmp_path / "again")
    pixels = Image.fromarray(picture((50, 70)))
    a, b = (processor(images=[pixels], return_tensors="pt").pixel_values for processor in (theirs, again))
    assert torch.equal(a, b)


def test_a_wrong_resampling_would_be_seen():
    pixels = picture((225, 300))
    bicubic, bilinear = ImageProcessor(resample=3)([pixels]), ImageProcessor(resample=2)([pixels])
    assert (bicubic - bilinear).abs().max() > 0.05


def test_old_files_write_the_size_as_a_number():
    square = ImageProcessor.from_config({"size": 32, "feature_extractor_type": "ViTFeatureExtractor"})
    assert square.size == (32, 32)
    edge = ImageProcessor.from_config({"size": 32, "crop_size": 32, "feature_extractor_type": "CLIPFeatureExtractor"})
    assert (edge.size, edge.crop) == ((32,), (32, 32))


def test_gray_models_read_color_as_pillow_does():
    processor = ImageProcessor(size=(), mean=(0.0,), std=(1.0,))
    pixels = picture((9, 9))
    gray = np.asarray(Image.fromarray(pixels).convert("L"), np.float32)
    assert (processor([pixels])[0, 0] * 255 - torch.from_numpy(gray.copy())).abs().max() <= 1.001
    same = np.repeat(pixels[..., :1], 3, axis=2)
    assert torch.equal((processor([same])[0, 0] * 255).round().byte(), torch.from_numpy(same[..., 0].copy()))


def test_a_batch_is_what_its_images_are_alone():
    pixels = [picture(shape) for shape in SHAPES]
    processor = ImageProcessor(size=(24,), crop=(24, 24), resample=3, kind="CLIP")
    assert torch.equal(processor(pixels), torch.cat([processor([each]) for each in pixels]))


def test_small_images_are_padded_with_black():
    padded = center_crop(np.full((3, 9, 3), 7, np.uint8), 6, 5)
    assert padded.shape == (6, 5, 3)
    assert padded[:, 0, 0].tolist() == [0, 0, 7, 7, 7, 0]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": {"height": 0, "width": 9}}, "height must be an integer, 1 to 8192, got '0'"),
        ({"size": {"height": 9}}, "width is missing"),
        ({"size": {"shortest_edge": 10**9}}, "shortest_edge must be an integer, 1 to 8192"),
        ({"resample": 9}, "resample must be an integer, 0 to 5"),
        ({"image_mean": [1, 2]}, "image_mean must be 1 or 3 numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "a std above 0"),
        ({"do_resize": "yes"}, "do_resize must be true or false"),
    ],
)
def test_wrong_settings_are_refused(values, words, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor"} | values)
    )
    with pytest.raises(BadFile, match=words):
        find_processor(tmp_path)


def test_a_processor_of_sounds_is_left_alone(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text('{"feature_extractor_type": "WhisperFeatureExtractor"}')
    assert find_processor(tmp_path) is None
    assert find_processor(tmp_path / "none") is None


def test_images_that_cannot_be_one_batch():
    with pytest.raises(BadInput, match="must have one size, these have 3 x 4, 5 x 4"):
        ImageProcessor(size=())([picture((3, 4)), picture((5, 4))])
    with pytest.raises(BadInput, match="at most 8,192 are allowed"):
        ImageProcessor(size=(224,), mean=HALF)([np.zeros((1, 4000, 3), np.uint8)])
