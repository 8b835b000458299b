"""Linformer: learned mixtures of positions; right padding changes nothing, and everything else is refused."""

from __future__ import annotations

import pytest
import torch

import headwater
from headwater import core as hw
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding
from headwater.errors import BadInput, BadSetting, TooLong
from headwater.families.builders import decoder, encoder
from headwater.generation.kv_cache import BatchKVCache
from headwater.variants.linformer import Linformer

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "position": "sinusoidal", "dropout": 0.0}


def model(attention="linformer:length=24,features=6"):
    built = encoder(40, **SIZES, attention=attention).build(seed=0).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(3)  # so that a wrong term shows
    return built


def test_the_formula():
    kernel = hw.Attention(2, kv_heads=1, kernel=Linformer(5, 3)).build_kernel(4).double()
    torch.nn.init.normal_(kernel.key_mixtures)
    torch.nn.init.normal_(kernel.value_mixtures)
    q, k, v = torch.randn(1, 2, 4, 4).double(), torch.randn(1, 1, 4, 4).double(), torch.randn(1, 1, 4, 4).double()
    places = torch.arange(4)[None]
    mask = AttentionMask(hw.Bidirectional(), PositionEncoding(), places, places)
    keys, values = kernel.key_mixtures[:4].mT @ k[:, 0], kernel.value_mixtures[:4].mT @ v[:, 0]
    expected = (q @ keys.mT[:, None] / 2).softmax(-1) @ values[:, None]
    torch.testing.assert_close(kernel(q, k, v, mask, None), expected)


def test_padding_on_the_right_and_other_rows_change_nothing():
    linformer, ids = model(), torch.randint(0, 40, (2, 9))
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    padded = linformer(ids, attention_mask=keep)
    torch.testing.assert_close(padded[1:, :6], linformer(ids[1:, :6]))
    torch.testing.assert_close(padded[:1], linformer(ids[:1]))
    assert (padded[1, :6] - linformer(ids)[1, :6]).abs().max() > 1e-3, "padding that is seen would be noticed"


def test_it_learns():
    linformer = model().float().train()
    linformer(torch.randint(0, 40, (2, 9))).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in linformer.parameters())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: decoder(40, **SIZES, attention="linformer").build(), "attention linformer reads both directions"),
        (
            lambda: hw.Attention(4, mask=hw.Causal(), kernel=Linformer(9, 3)).build(32),
            "the mask of Attention must be Bidirectional, for every key is a mixture of all, got 'Causal'",
        ),
        (lambda: model("linformer:length=4,features=5"), "features must be at most length (4)"),
        (lambda: model("linformer:length=9,features=0"), "features must be at least 1"),
        (
            lambda: encoder(40, **{**SIZES, "position": "alibi"}, attention="linformer").build(),
            "Linformer cannot be used with a position encoding that adds a bias",
        ),
        (lambda: model()(torch.ones(1, 25, dtype=torch.long)), "its length is 24 positions, got 25"),
        (lambda: BatchKVCache(model()), "this model looks ahead"),
        (
            lambda: model()(torch.ones(1, 3, dtype=torch.long), document_ids=torch.ones(1, 3, dtype=torch.long)),
            "Linformer cannot be used with packed documents; it mixes all positions",
        ),
        (
            lambda: model()(torch.ones(1, 2, dtype=torch.long), attention_mask=torch.tensor([[False, True]])),
            "Linformer cannot be used with padding on the left",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(call, words):
    with pytest.raises((BadInput, BadSetting, TooLong)) as fault:
        call()
    assert words in str(fault.value) and "\n" not in str(fault.value)


def test_attention_weights_are_of_the_mixtures():
    linformer, seen = model(), []
    tap = linformer.get_submodule("encoder.layers.0.self_attn.kernel.weights")
    tap.register_forward_hook(lambda _m, _i, out: seen.append(out))
    ids = torch.randint(0, 40, (1, 9))
    hooked = linformer(ids)
    tap._forward_hooks.clear()
    assert seen[0].shape == (1, 4, 9, 6)
    torch.testing.assert_close(hooked, linformer(ids))


def test_every_law_it_promises_holds():
    report = headwater.check(model())
    assert report.ok and {v.law for v in report.verdicts if v.status == "passed"} >= {"batch", "padding", "gradients"}
