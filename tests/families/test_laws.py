"""headwater.check on every family: no position depends on the future, the padding, or another row."""

from __future__ import annotations

import pytest
import torch
from tiny_models import CONFIGS, tiny

import headwater

DECODERS = ["gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gpt_neox", "mixtral"]


IMAGES = ["vit", "deit", "clip_vision_model", "siglip_vision_model"]
TOWERS = ["clip", "siglip"]
PADDED = ["siglip_text_model"]  # it pools the last place, padding or not, as published


@pytest.mark.parametrize("family", [name for name in CONFIGS if name not in (*IMAGES, *TOWERS, *PADDED)])
def test_every_family_keeps_the_laws(family):
    report = headwater.check(tiny(family).model, num_probes=2)
    assert report.ok, str(report)
    kept = {verdict.law for verdict in report.verdicts if verdict.status == "passed"}
    assert "numbers" in kept
    assert "future" in kept or family not in DECODERS


@pytest.mark.parametrize("family", IMAGES)
@torch.no_grad()
def test_images_of_a_batch_do_not_see_each_other(family):
    model = tiny(family).model.eval()
    embed = model.encoder.spec.embed
    pixels = torch.randn(3, embed.channels, *embed.image_size)
    together = model(pixels)
    alone = torch.cat([model(image[None]) for image in pixels])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert not torch.allclose(model(pixels.flip(0)), together, atol=1e-3), "another image gives another output"


def test_a_leak_is_seen():
    from headwater.core import Bidirectional, Causal
    from headwater.parts import swap

    leaky = swap(tiny("llama").spec, Causal, lambda rule: Bidirectional()).build(seed=0)
    assert not headwater.check(leaky, causal=True, num_probes=2).ok
