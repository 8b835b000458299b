"""LSH attention equals the NumPy edition, and the laws that it keeps beside those of tests/laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater import core as hw
from headwater.reference import lsh as reference
from headwater.variants import lsh_attention
from headwater.variants.lsh_attention import LSHAttention, draw_directions, hash_buckets, sort_by_bucket

HEADS, WIDTH, LENGTH = 2, 6, 32


def vectors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """qk and v [1, H, S, K] in float64."""
    draw = torch.Generator().manual_seed(seed)
    qk, v = (torch.randn(1, HEADS, LENGTH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2))
    return qk, v


def layer_of(**settings) -> lsh_attention.LSHLayer:
    spec = LSHAttention(HEADS, head_dim=WIDTH, **{"chunk": 4, "buckets": (8,), **settings})
    return spec.build(HEADS * WIDTH).double().eval()


def differences(layer: lsh_attention.LSHLayer) -> float:
    """The largest difference from the NumPy edition."""
    spec = layer.spec
    qk, v = vectors()
    with torch.no_grad():
        out = layer._hashed(qk, v, None)[0].numpy()
    directions = draw_directions(HEADS, WIDTH, spec.rounds, spec.factors(LENGTH), spec.seed).double().numpy()
    sizes = spec.chunk, spec.before, spec.after, spec.mask == hw.Causal()
    want = [reference.lsh_attention(qk[0, h].numpy(), v[0, h].numpy(), directions[h], *sizes) for h in range(HEADS)]
    return float(np.abs(out - np.stack(want)).max())


SETTINGS = {
    "one round": {},
    "three rounds": {"rounds": 3},
    "causal": {"rounds": 2, "mask": hw.Causal()},
    "both neighbours": {"after": 1, "rounds": 2},
    "long chunks": {"chunk": 16, "before": 0},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_equals_the_numpy_edition(name):
    assert differences(layer_of(**SETTINGS[name])) < 1e-10


def wrong_order(patch):
    patch.setattr(lsh_attention, "sort_by_bucket", lambda buckets: buckets.argsort(-1, descending=True).flatten(-2))


def opposite_directions_are_forgotten(patch):
    hashed = hash_buckets
    patch.setattr(lsh_attention, "hash_buckets", lambda qk, directions, factors: hashed(qk, directions, factors) % 4)


def keys_keep_their_length(patch):
    patch.setattr(lsh_attention.LSHLayer, "keys", lambda self, qk: qk)


@pytest.mark.parametrize("plant", [wrong_order, opposite_directions_are_forgotten, keys_keep_their_length])
def test_a_wrong_form_differs(plant, monkeypatch):
    plant(monkeypatch)
    assert differences(layer_of(rounds=2)) > 1e-3


def test_tokens_are_sorted_by_bucket_and_position():
    qk, _v = vectors()
    buckets = hash_buckets(qk, draw_directions(HEADS, WIDTH, 2, (4, 6), 0).double(), (4, 6))
    assert buckets.shape == (1, HEADS, 2, LENGTH) and buckets.min() >= 0 and buckets.max() < 24
    order = sort_by_bucket(buckets).unflatten(-1, (2, LENGTH))
    keys = buckets.gather(-1, order) * LENGTH + order
    assert (keys.diff(dim=-1) > 0).all()
    np.testing.assert_array_equal(
        reference.sort_by_bucket(buckets[0, 0].numpy()), sort_by_bucket(buckets)[0, 0].numpy()
    )


def test_near_vectors_share_a_bucket_more_often():
    qk, _v = vectors()
    directions = draw_directions(HEADS, WIDTH, 64, (8,), 1).double()
    near = hash_buckets(qk + 0.05 * vectors(1)[0], directions, (8,))
    far = hash_buckets(vectors(2)[0], directions, (8,))
    own = hash_buckets(qk, directions, (8,))
    assert (near == own).double().mean() > 0.85 and (far == own).double().mean() < 0.25


def test_one_chunk_is_exact_attention():
    """With a chunk as long as the row, every token but the query itself is read, and nothing is hashed."""
    layer = layer_of(chunk=LENGTH)
    qk, v = vectors()
    scores = qk @ (qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt()).mT / math.sqrt(WIDTH)
    want = scores.masked_fill(torch.eye(LENGTH, dtype=torch.bool), -torch.inf).softmax(-1) @ v
    with torch.no_grad():
        assert (layer._one_chunk(qk, v, None) - want).abs().max() < 1e-12
        many = layer_of(chunk=4, before=4, after=3)._hashed(qk, v, None)  # all chunks are near
    assert (many - want).abs().max() < 1e-12


def test_the_same_seed_gives_the_same_answer():
    qk, v = vectors()
    with torch.no_grad():
        fixed = [layer_of()._hashed(qk, v, None) for _ in range(2)]
        free = [layer_of(seed=None)._hashed(qk, v, None) for _ in range(2)]
    assert torch.equal(*fixed) and not torch.equal(*free)


def test_causal_values_never_flow_back_but_the_choice_of_keys_may():
    """No value of a later token reaches an answer. Which earlier keys an answer reads depends on the whole row."""
    qk, v = (t.requires_grad_() for t in vectors())
    out = layer_of(mask=hw.Causal(), rounds=2)._hashed(qk, v, None)
    out[0, :, 10].sum().backward()
    assert qk.grad[0, :, 11:].abs().max() == 0 and v.grad[0, :, 11:].abs().max() == 0
    assert v.grad[0, :, :11].abs().max() > 0
    with torch.no_grad():
        changed = qk.clone()
        changed[0, :, 20:] += 3
        again = layer_of(mask=hw.Causal(), rounds=2)._hashed(changed, v, None)
    assert (again - out)[0, :, :20].abs().max() > 1e-3  # other chunks


def test_the_number_of_buckets_follows_the_length():
    spec = LSHAttention(4, chunk=64, max_positions=4096)
    assert spec.factors(128) == (4,) and spec.factors(1024) == (32,) and spec.factors(4096) == (128,)
    assert LSHAttention(4, chunk=4, max_positions=64).factors(64) == (4, 8)
