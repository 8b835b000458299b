"""Maps of image models: rollout by hand, attribution of a linear model, and pictures from the command."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from headwater.cli import main
from headwater.core import Attention, Block, ClassificationHead, FeedForward, LayerNorm, Model, Pooled, Stack, pre
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder
from headwater.families.load import save
from headwater.inspection.hooks import watch
from headwater.inspection.image_figures import plot_similarity
from headwater.inspection.image_maps import attribute, image_maps, rollout
from headwater.variants.image_heads import PatchMean
from headwater.variants.patches import Patches
from headwater.vision.processor import ImageProcessor


def vit(layers: int = 2, first_tokens: int = 1) -> Model:
    norm = LayerNorm(1e-6)
    block = Block((pre(norm, self_attn=Attention(2, bias="qkvo")), pre(norm, ffn=FeedForward(32, "gelu"))))
    embed = Patches((12, 16), (4, 4), first_tokens=first_tokens)
    pooling = Pooled() if first_tokens else Pooled(PatchMean(0))
    return Model(encoder=Stack(16, embed, (block,) * layers, norm), head=ClassificationHead(3, pooling))


PIXELS = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("first_tokens", [0, 1])
def test_maps_have_the_grid_of_the_patches(first_tokens):
    maps = image_maps(vit(first_tokens=first_tokens).build(seed=0), PIXELS)
    assert maps.attention.shape == (2, 2, 3, 4)
    assert maps.rollout.shape == maps.attribution.shape == (3, 4)
    assert (maps.attention.sum((2, 3)) <= 1 + 1e-5).all() and maps.rollout.sum() <= 1 + 1e-5


def test_the_query_may_be_a_patch():
    model = vit().build(seed=0)
    with watch(model, "encoder.layers.*.self_attn.kernel.weights") as seen:
        model(PIXELS)
    weights = torch.stack([seen[path][0] for path in seen])
    maps = image_maps(model, PIXELS, patch=7)
    assert np.allclose(maps.attention.reshape(2, 2, 12), weights[:, :, 1 + 7, 1:], atol=1e-6)
    assert np.allclose(maps.rollout.flatten(), rollout(weights)[1 + 7, 1:], atol=1e-6)
    assert not np.allclose(maps.attention, image_maps(model, PIXELS, patch=8).attention, atol=1e-6)
    assert np.allclose(maps.output, model(PIXELS)[0].detach(), atol=1e-5)
    with pytest.raises(BadInput, match="patch must be from 0 to 11, got 12: the image has 12 patches"):
        image_maps(model, PIXELS, patch=12)


def test_rollout_is_the_product_of_the_layers():
    weights = torch.rand(3, 2, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    expected = torch.eye(5)
    for layer in weights:
        expected = (0.5 * layer.mean(0) + 0.5 * torch.eye(5)) @ expected
    assert torch.allclose(rollout(weights), expected)
    assert torch.allclose(rollout(weights).sum(-1), torch.ones(5))
    assert not torch.allclose(rollout(weights.flip(0)), expected)  # another order of the layers would show


def test_without_layers_attribution_is_the_whole_output():
    """With a head that is linear in the mean of the patches, the attributions add up to the logit."""
    stack = Stack(16, Patches((12, 16), (4, 4), first_tokens=0), ())
    model = Model(encoder=stack, head=ClassificationHead(3, Pooled(PatchMean(0)))).build(seed=0)
    credit, best, _output = attribute(model, PIXELS)
    assert float(credit.sum()) == pytest.approx(float(model(PIXELS)[0].max() - model.head.out.bias[best]), abs=1e-5)


def test_the_command_draws_overlays(tmp_path, capsys):
    model = vit().build(seed=0)
    folder = save(model, tmp_path / "model", layout="transformers")
    ImageProcessor(size=(12, 16)).save(folder)
    Image.fromarray(np.full((30, 40, 3), 99, np.uint8)).save(tmp_path / "photo.png")
    assert main(["inspect", str(folder), str(tmp_path / "photo.png"), "--out", str(tmp_path / "out")]) == 0
    assert "3 x 4 patches; most attended: row" in capsys.readouterr().out
    for name in ("attention.png", "heads.png"):
        assert Image.open(tmp_path / "out" / name).size[0] > 300
    assert main(["inspect", str(folder), str(tmp_path / "photo.png"), "--json"]) == 0
    assert np.array(json.loads(capsys.readouterr().out)["rollout"]).shape == (3, 4)


def test_models_of_texts_are_refused():
    with pytest.raises(BadInput, match="an image needs a model of images"):
        image_maps(decoder(20, d_model=8, heads=2, layers=1).build(seed=0), PIXELS)


def test_the_matrix_shows_any_names_and_any_number_of_them(tmp_path):
    names = [f"{n}.png" for n in range(1400)]
    plot_similarity(np.zeros((1400, 2), np.float32), names, ["costs $5 and $\\no", "红色的袋鼠"], tmp_path / "m.png")
    with Image.open(tmp_path / "m.png") as picture:
        assert max(picture.size) < 4000
    with pytest.raises(BadSetting, match=r"must be a .png, .svg or .pdf file, got 'm.gif'"):
        plot_similarity(np.zeros((1, 1)), ["a"], ["b"], tmp_path / "m.gif")
