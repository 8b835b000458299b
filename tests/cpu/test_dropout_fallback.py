"""Dropout without the C library draws the same masks as with it, and takes as much from the generator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import Linear
from torch.nn import functional as F

from headwater import core as hw
from headwater.core.functional import add_dropout, add_norm, attention_dropout, dropout, feed_forward
from headwater.core.masks import AttentionMask, SlidingWindow
from headwater.core.positions import PositionEncoding
from headwater.cpu import build
from headwater.cpu.attention import KeyRules, fused_banded_attention
from headwater.cpu.dropout import DropoutKey, DropoutMask, keep_mask
from headwater.families import builders
from headwater.parts import swap

pytestmark = pytest.mark.skipif(
    build.training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
P = 0.3
KERNEL = hw.Attention(4, scale=0.25, dropout=P)


def without_c(work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "training_library", lambda: None)
        return work()


def both_ways(work, seed=11):
    """What comes of it with C and without, and the state of the generator after each."""
    made = []
    for run in (lambda: work(), lambda: without_c(work)):
        torch.manual_seed(seed)
        made.append((run(), torch.get_rng_state()))
    (with_c, state), (plain, after) = made
    assert torch.equal(state, after), "the two ways must take equally much from the generator"
    return with_c, plain


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5), (2, 70_001), (4, 48, 64)])
def test_masks_of_plain_dropout(shape):
    x = torch.ones(shape)
    with_c, plain = both_ways(lambda: dropout(x, P))
    assert torch.equal(with_c, plain)
    assert x.numel() < 15 or 0 < (with_c == 0).float().mean() < 1
    turned = torch.randn(64, 48).t()  # not contiguous: the index is that of the numbers in their order
    with_c, plain = both_ways(lambda: dropout(turned, P))
    assert torch.equal(with_c, plain)


def test_another_mask_would_be_seen():
    x = torch.ones(1000)

    def torch_alone():
        return F.dropout(x, P) if build.training_library() is None else dropout(x, P)

    with pytest.raises(AssertionError, match="equally much from the generator"):
        both_ways(torch_alone)


def test_masks_of_a_residual_sum():
    x, y = torch.randn(6, 40), torch.randn(6, 40)
    with_c, plain = both_ways(lambda: add_dropout(x, y, P))
    torch.testing.assert_close(with_c, plain, rtol=1e-6, atol=1e-6)
    with_c, plain = both_ways(lambda: add_dropout(torch.zeros(6, 40), torch.ones(6, 40), P))
    assert torch.equal(with_c, plain)


@pytest.mark.parametrize("centred", [True, False])
def test_masks_inside_a_norm(centred):
    x, y, weight = torch.randn(9, 32), torch.randn(9, 32, requires_grad=True), torch.randn(32)

    def work():
        out = add_norm(x, y, P, weight, None, 1e-5, centred)
        return out.detach(), torch.autograd.grad(out.square().sum(), y)[0]

    (out, slope), (plain_out, plain_slope) = both_ways(work)
    torch.testing.assert_close(out, plain_out, rtol=1e-5, atol=1e-5)
    assert torch.equal(slope == 0, plain_slope == 0) and (slope == 0).any()


@pytest.mark.parametrize("act", [F.relu, F.gelu])
def test_masks_inside_a_feed_forward(act):
    torch.manual_seed(0)
    up, down, x = Linear(128, 512), Linear(512, 128), torch.randn(512, 128)

    def work():
        out = feed_forward(x, up, act, P, down)
        return out.detach(), *torch.autograd.grad(out.square().sum(), [up.weight, down.weight])

    for one, other in zip(*both_ways(work), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("keys", [16, 13, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_inside_attention(keys, causal):
    """With v the identity, the output is the weights themselves: zeros show what was dropped."""
    kernel = KERNEL.build_kernel(48).train()
    q = torch.randn(2, 4, keys, 48, requires_grad=True)
    k, v = torch.randn(2, 2, keys, 48), torch.eye(keys, 48).expand(2, 2, keys, 48)
    with_c, plain = both_ways(lambda: kernel.attend(q, k, v, None, causal).detach())
    assert torch.equal(with_c == 0, plain == 0)
    torch.testing.assert_close(with_c, plain, rtol=1e-5, atol=1e-6)
    scores = 0.25 * (q @ k.repeat_interleave(2, 1).mT).detach()
    seen = torch.ones(keys, keys, dtype=torch.bool).tril(0 if causal else keys)
    torch.manual_seed(11)
    dropped = attention_dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1), P)
    torch.testing.assert_close(dropped, with_c[..., :keys], rtol=1e-5, atol=1e-6)


def sight_of(window, length):
    places = torch.arange(length)[None]
    return AttentionMask(SlidingWindow(window), PositionEncoding(), places, places, aligned=True)


@pytest.mark.parametrize(("length", "window"), [(300, 5), (517, 64), (700, 130)])
def test_masks_of_a_window(length, window):
    kernel, sight = KERNEL.build_kernel(48).train(), sight_of(window, length)
    q, k = torch.randn(2, 2, length, 16, requires_grad=True), torch.randn(2, 1, length, 16)
    assert sight.block_size
    with_c, plain = both_ways(lambda: kernel(q, k, k, sight, None).detach())
    torch.testing.assert_close(with_c, plain, rtol=1e-4, atol=1e-5)


def test_masks_beyond_the_first_four_billion_weights():
    """66,000 queries of 66,000 keys, of which each sees few: indices of more than 32 bits."""
    length = 66_000
    q, k = torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16)
    torch.manual_seed(5)
    with_c = fused_banded_attention(q, k, k, KeyRules(3, 0), 0.25, P)
    torch.manual_seed(5)
    drop, first = DropoutMask.sample(P), length - 100
    band = torch.ones(100, 112).tril(12).triu(9).bool()
    scores = (0.25 * q[:, :, first:] @ k[:, :, first - 12 :].mT).masked_fill(~band, -torch.inf)
    dropped = drop.apply_slice(scores.softmax(-1), length, length, first, first - 12)
    assert first * length > 2**32
    torch.testing.assert_close(with_c[:, :, first:], dropped @ k[:, :, first - 12 :], rtol=1e-5, atol=1e-5)


def test_what_is_drawn_is_the_spelled_out_hash():
    x = torch.ones(5000)
    torch.manual_seed(2)
    plain = DropoutMask.sample(P)(x)
    torch.manual_seed(2)
    assert torch.equal(plain, keep_mask(5000, DropoutKey.sample(P)))
    assert DropoutMask.sample(P)(x.double()).dtype == torch.float64
    half = DropoutMask.sample(P)(x.bfloat16())
    assert half.dtype == torch.bfloat16 and set(half.tolist()) == {0.0, float(torch.tensor(1 / 0.7).bfloat16())}


SIZES = {"d_model": 64, "heads": 4, "layers": 2, "d_ff": 128, "dropout": P}
MODELS = {
    "pre": builders.decoder(50, norm_position="pre", position="rotary", norm="rms", **SIZES),
    "post": builders.decoder(50, norm_position="post", position="learned", max_positions=64, **SIZES),
    "gated, grouped": builders.decoder(50, norm_position="pre", gated=True, kv_heads=2, position="alibi", **SIZES),
    "relative": builders.encoder(50, position="relative", **SIZES),
    "both": builders.transformer(50, position="sinusoidal", **SIZES),
    "plain": builders.encoder(50, position="none", backend="eager", **SIZES),
    "odd heads": builders.decoder(50, position="rotary", **{**SIZES, "heads": 8}),
    "last": swap(builders.encoder(50, **SIZES), hw.Stack, lambda stack: replace(stack, dropout=P)),
    "classes": builders.encoder(50, hw.ClassificationHead(3, hw.Pooled(hw.MeanPooling()), dropout=P), **SIZES),
    "window": swap(
        builders.decoder(50, position="rotary", **SIZES), hw.Attention, lambda a: replace(a, mask=hw.SlidingWindow(9))
    ),
}


def learned(name, length, recompute=False, dtype=None):
    """The loss of a batch and its slopes, of a model that drops in all places."""
    spec = MODELS[name]
    model = spec.build(seed=1).train()
    if recompute:
        model.gradient_checkpointing()
    ids = torch.arange(2 * length).view(2, length) * 7 % 50
    more = {"source": ids.flip(1)} if spec.encoder is not None and spec.decoder is not None else {}
    if name in ("pre", "both"):
        more["attention_mask"] = torch.ones(2, length, dtype=torch.bool)
        more["attention_mask"][0, length - 3 :] = False
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = model(ids, **more).float().logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(one, other, loss=1e-5, slopes=1e-4):
    assert abs(one[0] - other[0]) <= loss * abs(other[0])
    assert (one[1] - other[1]).norm() <= slopes * other[1].norm()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_whole_models_learn_the_same(name, recompute):
    compare(*both_ways(lambda: learned(name, 270 if name == "window" else 29, recompute)))


@pytest.mark.parametrize("name", ["pre", "post", "both"])
def test_whole_models_learn_the_same_in_bfloat16(name):
    compare(*both_ways(lambda: learned(name, 29, dtype=torch.bfloat16)), loss=1e-2, slopes=5e-2)


def test_recomputing_changes_nothing_without_c():
    for name in ("pre", "both"):
        made = []
        for recompute in (False, True):
            torch.manual_seed(4)
            made.append(without_c(lambda n=name, r=recompute: learned(n, 29, r)))
        compare(*made)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre", "post", "both", "classes"])
def test_compiled_stacks_draw_the_same(name):
    """As a trainer compiles them: chance stays torch's own."""
    spec, ids = MODELS[name], torch.arange(58).view(2, 29) * 7 % 50
    found = []
    for compiled in (False, True):
        model = spec.build(seed=1).train()
        for stack in filter(None, (model.encoder, model.decoder) if compiled else ()):
            stack.compile(dynamic=True, options={"fallback_random": True})
        torch.manual_seed(9)
        more = {"source": ids.flip(1)} if spec.encoder is not None and spec.decoder is not None else {}
        loss = model(ids, **more).logsumexp(-1).square().mean()
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    compare(*found)
