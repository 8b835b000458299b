"""The convolutional stem: shapes, laws, what is saved, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headwater.core import Attention, Block, ClassificationHead, FeedForward, LayerNorm, Model, Pooled, Stack, pre
from headwater.errors import BadSetting, Fault
from headwater.families.load import load, save
from headwater.parts import from_dict, to_dict
from headwater.variants.conv_stem import ConvStem, conv_stem_for
from headwater.variants.patches import LinearProjection, Patches

STEM = ConvStem((8, 16, 24))


def vit(projection=STEM, image=(16, 24), **fields):
    norm = LayerNorm(1e-6)
    block = Block((pre(norm, self_attn=Attention(4, bias="qkvo")), pre(norm, ffn=FeedForward(32, "gelu"))))
    embed = Patches(image, (4, 4), projection=projection, **fields)
    return Model(encoder=Stack(16, embed, (block,), norm), head=ClassificationHead(3, Pooled()))


def pixels(rows=3, size=(16, 24), seed=0):
    return torch.randn(rows, 3, *size, generator=torch.Generator().manual_seed(seed))


def test_it_is_these_convolutions():
    model = vit().build(seed=0)
    stem = model.encoder.embed.projection
    x = pixels()
    for conv, norm, stride in zip(stem.convs, stem.norms, (1, 2, 2), strict=True):
        x = F.conv2d(x, conv.weight, stride=stride, padding=1)
        mean = x.mean(1, keepdim=True)
        variance = x.var(1, keepdim=True, unbiased=False)
        x = (x - mean) / (variance + 1e-6).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = x.relu()
    expected = F.linear(x.flatten(2).transpose(1, 2), stem.out.weight, stem.out.bias)
    assert expected.shape == (3, 24, 16)
    assert torch.allclose(stem(pixels()), expected, atol=1e-5)


def test_a_batch_gives_what_single_images_give_while_training_too():
    model = vit().build(seed=0).train()
    batched = model(pixels())
    single = torch.cat([model(row[None]) for row in pixels()])
    assert torch.allclose(batched, single, atol=1e-5)
    statistics_of_the_batch = torch.nn.BatchNorm2d(3)  # the usual norm of such stems would break it
    assert not torch.allclose(statistics_of_the_batch(pixels())[:1], statistics_of_the_batch(pixels()[:1]), atol=1e-2)


def test_another_image_size_is_read():
    assert vit().build(seed=0)(pixels(size=(32, 16))).shape == (3, 3)


def test_what_is_saved_is_what_was_built(tmp_path):
    spec = vit()
    assert from_dict(to_dict(spec)) == spec and "ConvStem(channels=(8, 16, 24))" in repr(spec)
    model = spec.build(seed=0).eval()
    save(model, tmp_path / "model")
    assert torch.equal(load(tmp_path / "model").model(pixels()), model(pixels()))
    plain = vit(LinearProjection())
    assert plain == vit(LinearProjection()) != spec


def test_a_layout_without_a_stem_is_refused(tmp_path):
    with pytest.raises(Fault) as caught:
        save(vit().build(seed=0), tmp_path / "model", layout="transformers")
    assert "\n" not in str(caught.value)


def test_the_stem_for_a_model_doubles_its_channels():
    assert conv_stem_for(4, 128).channels == (32, 64, 128)
    assert conv_stem_for(8, 128).channels == (16, 32, 64, 128)
    assert conv_stem_for(1, 64).channels == (64,)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ConvStem(()), "channels must be positive, at least one"),
        (lambda: ConvStem((8, 0)), "channels must be positive"),
        (lambda: vit(ConvStem((8,))).build(seed=0), "at most 2 to the number of convolutions 1, got .4, 4."),
        (lambda: vit(mask_token=True), "a mask token needs a projection that sees each patch alone"),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    with pytest.raises(BadSetting, match=words):
        make()
