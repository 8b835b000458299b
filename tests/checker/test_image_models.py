"""The laws of image models: batch, patches, sizes; planted faults show."""

from __future__ import annotations

import json

import pytest
import torch

from headwater.checker.api import IMAGE_LAWS, check
from headwater.cli import main
from headwater.core import (
    Attention,
    Block,
    ClassificationHead,
    Embeddings,
    FeedForward,
    LayerNorm,
    Learned,
    Model,
    Pooled,
    Stack,
    pre,
)
from headwater.errors import BadInput, BadSetting
from headwater.variants.conv_stem import ConvStem
from headwater.variants.image_heads import FirstTokenOf, HighestToken, PixelHead, ProjectionHead
from headwater.variants.patches import Patches, PatchesLayer
from headwater.variants.towers import Towers
from headwater.weights.native import save_native

NORM = LayerNorm(1e-6)
BLOCK = Block((pre(NORM, self_attn=Attention(2, bias="qkvo")), pre(NORM, ffn=FeedForward(32, "gelu"))))


def vit(head=None, **settings):
    embed = Patches((12, 16), (4, 4), **settings)
    spec = Model(head or ClassificationHead(5, Pooled()), encoder=Stack(16, embed, (BLOCK,) * 2, NORM))
    return spec.build(seed=0)


@pytest.mark.parametrize(
    "model",
    [vit(), vit(first_tokens=2), vit(projection=ConvStem((8, 8, 16))), vit(PixelHead(4, 3), mask_token=True)],
    ids=["class token", "two first tokens", "conv stem", "masked image modeling"],
)
def test_image_models_keep_the_laws(model):
    report = check(model)
    assert report.ok, str(report)
    assert report["batch"].status == report["sizes"].status == report["backend"].status == "passed"
    assert report["patches"].status == ("passed" if model.encoder.embed.spec.projection.sees_one_patch else "skipped")
    assert [verdict.law for verdict in report.verdicts] == list(IMAGE_LAWS)
    assert report.length == model.encoder.embed.spec.first_tokens + 12


def faulty(method):
    """A model whose patch embedding has another method."""
    model = vit(mask_token=True)
    embed = model.encoder.embed
    embed.__class__ = type("Faulty", (PatchesLayer,), {method.__name__: method})
    return model


def test_a_patch_that_leaks_into_another_is_found():
    def forward(self, inputs, positions):
        x = PatchesLayer.forward(self, inputs, positions)
        return x + 1e-3 * x.roll(1, 1)

    verdict = check(faulty(forward), laws=["patches"])["patches"]
    assert verdict.status == "failed" and "vector of another patch" in str(verdict.message)
    assert verdict.module is not None and "embed" in verdict.module


def test_a_masked_patch_that_is_seen_is_found():
    def _masked(self, x, token_types):
        return torch.where(token_types[..., None] == 1, self.mask_token + 1e-3 * x, x)

    verdict = check(faulty(_masked), laws=["patches"])["patches"]
    assert verdict.status == "failed" and "a masked patch is seen" in str(verdict.message)


def test_a_batch_that_mixes_images_is_found():
    def forward(self, inputs, positions):
        x = PatchesLayer.forward(self, inputs, positions)
        return x - x.mean(0, keepdim=True)

    report = check(faulty(forward), laws=["batch", "sizes"])
    assert report["batch"].status == report["sizes"].status == "failed"


def test_a_size_that_changes_the_model_is_found():
    def forward(self, inputs, positions):
        if inputs.signal.shape[2] != 12:
            self.position.table.weight.data.mul_(1.01)  # resized in place, as some do
        return PatchesLayer.forward(self, inputs, positions)

    assert check(faulty(forward), laws=["sizes"])["sizes"].status == "failed"


@pytest.mark.parametrize("pooling", [FirstTokenOf(3), HighestToken()])
def test_the_end_of_text_is_not_looked_for_in_padding(pooling):
    model = Model(ProjectionHead(8, pooling), encoder=Stack(16, Embeddings(30, Learned(20)), (BLOCK,), NORM)).build(0)
    text = torch.tensor([[5, 3, 4]])
    padded = torch.tensor([[3, 29, 5, 3, 4, 29]])
    mask = torch.tensor([[False, False, True, True, True, False]])
    assert torch.allclose(model(padded, attention_mask=mask), model(text), atol=1e-6)


def two_towers():
    text = Stack(16, Embeddings(30, Learned(20)), (BLOCK,), NORM)
    image = Stack(16, Patches((12, 16), (4, 4)), (BLOCK,))
    head = ProjectionHead(8, FirstTokenOf(0))
    return Towers(text=Model(head, encoder=text), image=Model(ProjectionHead(8, Pooled().pooling), encoder=image))


def test_the_command_checks_both_towers(tmp_path, capsys):
    model = two_towers().build(seed=0)
    with pytest.raises(BadInput, match="check model.text and model.image"):
        check(model)
    save_native(tmp_path, model, {})
    assert main(["check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("all laws hold") == 2 and "a patch makes its own vector" in out
    assert main(["check", str(tmp_path), "--json", "--only", "batch"]) == 0
    decoder = json.JSONDecoder()
    text = capsys.readouterr().out
    first, end = decoder.raw_decode(text)
    assert first["ok"] and decoder.raw_decode(text[end:].lstrip())[0]["ok"]


def test_the_length_of_an_image_is_fixed():
    assert check(vit(), length=13, laws=["batch"]).ok
    with pytest.raises(BadSetting, match="images of this model have 13 tokens, got length 20; leave it out"):
        check(vit(), length=20)
