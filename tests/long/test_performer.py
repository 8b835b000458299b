"""Performer: FAVOR+ exactly causal, near to softmax, with a state of constant size; where the published form fails."""

from __future__ import annotations

import pytest
import torch

import headwater
from headwater.errors import BadInput
from headwater.families.builders import decoder, encoder
from headwater.variants import favor
from headwater.variants.performer import RandomFeatures

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "position": "rotary", "dropout": 0.0}


def projection(features=32, width=8):
    module = RandomFeatures(features, width, seed=3).double()
    return module.projection


def qkv(length=130, size=1.0):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(2, 2, length, 8, generator=draw, dtype=torch.double) * size for _ in range(3)]


def two_way(q, k, v, w, published=False):
    """FAVOR+ of all keys: one maximum over all keys and features. published: it leaves |x|² / 2 out. Scale 1."""

    def features(x, over):
        half = (x * x).sum(-1, keepdim=True) / 2
        top = (x @ w.mT - (0 if published else half)).amax(over, keepdim=True)
        return (x @ w.mT - half - top).exp() + 1e-4

    query, key = features(q, (-1,)), features(k, (-2, -1))
    weights = query @ key.mT
    return weights @ v / weights.sum(-1, keepdim=True)


def causal(q, k, v, w, **more):
    return favor.favor_attention(q, k, v, w, causal=True, scale=1.0, **more)


def test_each_place_gives_the_two_way_value_of_the_text_so_far():
    (q, k, v), w = qkv(), projection()
    out, _state = causal(q, k, v, w)
    for last in (0, 1, 62, 63, 64, 65, 129):
        prefix = slice(0, last + 1)
        expected = two_way(q[:, :, prefix], k[:, :, prefix], v[:, :, prefix], w)[:, :, -1]
        torch.testing.assert_close(out[:, :, last], expected, rtol=1e-5, atol=1e-5)


def test_a_long_later_key_changes_nothing_before_it_but_does_in_the_published_form():
    (q, k, v), w = qkv(), projection()
    longer = k.clone()
    longer[:, :, -1] *= 6
    before, after = causal(q, k, v, w)[0], causal(q, longer, v, w)[0]
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    leak = two_way(q, k, v, w, published=True) - two_way(q, longer, v, w, published=True)
    assert leak[:, :, :-1].abs().max() > 1e-2


@pytest.mark.parametrize("is_causal", [False, True])
def test_long_queries_and_keys_are_told_apart_but_not_in_the_published_form(is_causal):
    """There all features fall below ε, so that every weight is the same and no gradient says otherwise."""
    (q, k, v), w = qkv(size=4.0), projection()
    mean = v.mean(2, keepdim=True)
    assert (two_way(q, k, v, w, published=True) - mean).abs().max() < 0.1 * mean.abs().max()
    k.requires_grad_()
    out, _state = favor.favor_attention(q, k, v, w, causal=is_causal, scale=1.0)
    assert (out - mean).abs()[:, :, -30:].mean() > 3 * mean.abs().mean()
    out[:, :, -30:].square().sum().backward()
    assert k.grad.abs().max() > 1e-2


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_a_state_stands_for_all_earlier_tokens(size):
    """Also where the maximum grows by hundreds, so that older sums shrink to nothing."""
    (q, k, v), w = qkv(size=size), projection()
    all_at_once, _state = causal(q, k, v, w)
    assert all_at_once.isfinite().all()
    outs, state = [], None
    for begin, end in ((0, 1), (1, 70), (70, 71), (71, 130)):
        out, state = causal(q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], w, state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), all_at_once, rtol=1e-7, atol=1e-7)


def test_more_features_come_nearer_to_softmax():
    q, k, v = qkv(40, 0.4)
    exact = (q @ k.mT).softmax(-1) @ v
    errors = []
    for features in (16, 256, 4096):
        out, _state = favor.favor_attention(q, k, v, projection(features), causal=False, scale=1.0)
        errors.append(float((out - exact).abs().mean()))
    assert errors[0] > 2 * errors[2] and errors[1] > errors[2] and errors[2] < 0.05, errors


def test_directions_are_orthogonal_in_blocks_and_drawn_from_the_seed():
    w = projection(20, 8)
    gram = w[:8] @ w[:8].mT
    torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-9, rtol=0)
    assert torch.equal(w, projection(20, 8)) and not torch.equal(w, RandomFeatures(20, 8, seed=4).double().projection)


@pytest.mark.parametrize("build", [decoder, encoder])
def test_every_law_it_promises_holds(build):
    model = build(40, **SIZES, attention="performer:features=16").build(seed=0).double().eval()
    report = headwater.check(model)
    assert report.ok, report
    with pytest.raises(BadInput, match="Performer cannot be used with packed documents; its estimate depends on"):
        ids = torch.ones(1, 4, dtype=torch.long)
        model(ids, document_ids=ids)


def test_the_state_does_not_grow():
    (q, k, v), w = qkv(), projection()
    _out, state = causal(q, k, v, w)
    assert isinstance(state, favor.FavorState)
    assert [tuple(t.shape) for t in state] == [(2, 2, 32, 8), (2, 2, 32), (2, 2, 8), (2, 2), (2, 2)]
