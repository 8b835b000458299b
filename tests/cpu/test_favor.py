"""FAVOR+ attention in C is its formula in float64: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.cpu import build
from headwater.cpu.build import TensorMismatch, training_library
from headwater.cpu.favor import fused_favor
from headwater.variants.favor import FavorState, favor_attention
from headwater.variants.performer import RandomFeatures

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def directions(features: int = 48, width: int = 32) -> Tensor:
    module = RandomFeatures(features, width, seed=3)
    module.init_buffers()
    return module.projection


def sides(length: int, kinds: str, causal: bool = True, heads: int = 4, kv_heads: int = 2) -> list[list[Tensor]]:
    """Outputs, states and gradients: of C in float32, and of the formula in float64. A letter asks for each extra."""
    mask = drawn(2, length, seed=5) > -0.5 if "m" in kinds else None
    size = 4.0 if "l" in kinds else 1.0  # long keys: the maximum grows, and older sums shrink
    results = []
    for dtype in (torch.float32, torch.float64):
        shapes = ((heads, length, 32), (kv_heads, length, 32), (kv_heads, length, 16))
        q, k, v = (drawn(2, *shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes))
        inputs, state = [q, k, v], None
        if "s" in kinds:
            sums = drawn(2, kv_heads, 48, 16, seed=6), drawn(2, kv_heads, 48, seed=7).abs(), drawn(2, kv_heads, 16)
            inputs += [t.to(dtype).requires_grad_() for t in sums]
            state = FavorState(*inputs[3:], torch.full((2, kv_heads), 3, dtype=dtype), drawn(2, kv_heads).to(dtype))
        out, after = favor_attention(q, size * k, v, directions().to(dtype), causal, 0.2, state, mask)
        goal = sum((t * drawn(*t.shape, seed=8 + i).to(dtype)).sum() for i, t in enumerate((out, *after[:3])))
        results.append([out, *after, *torch.autograd.grad(goal, inputs)])
    return results


def assert_alike(results: list[list[Tensor]]) -> None:
    for in_c, formula in zip(*results, strict=True):
        assert in_c.dtype == torch.float32
        bound = 2e-4 * max(1.0, float(formula.detach().abs().max()))
        torch.testing.assert_close(in_c.double(), formula, rtol=2e-4, atol=bound)


@pytest.mark.parametrize("length", [1, 15, 64, 65, 200])
@pytest.mark.parametrize("kinds", ["", "m", "l", "s", "mls"])
def test_causal_is_the_formula(length: int, kinds: str):
    assert_alike(sides(length, kinds))


@pytest.mark.parametrize("kinds", ["", "m", "l", "ml"])
def test_two_way_is_the_formula(kinds: str):
    assert_alike(sides(150, kinds, causal=False))


@settings(max_examples=10, deadline=None)
@given(
    length=st.integers(1, 300), kinds=st.sampled_from(["", "ml", "s"]), groups=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
)  # fmt: skip
def test_any_length_and_any_groups(length, kinds, groups, causal):
    assert_alike(sides(length, kinds if causal else kinds.replace("s", ""), causal, kv_heads=groups))


def test_no_later_key_changes_an_answer_however_long_it_is():
    q, k, v = (drawn(1, 2, 100, 32, seed=i) for i in range(3))
    out, _state = favor_attention(q, k, v, directions(), True, 0.2)
    longer = k.clone()
    longer[:, :, 70] *= 6
    other, _state = favor_attention(q, longer, v, directions(), True, 0.2)
    assert torch.equal(other[:, :, :70], out[:, :, :70])
    assert (other[:, :, 70:] - out[:, :, 70:]).abs().amax((0, 1, 3)).min() > 1e-6


def test_the_published_maximum_would_show():
    """One maximum over all keys, as published, is not what C computes for any query but the last."""
    q, k, v = (drawn(1, 2, 100, 32, seed=i).double() for i in range(3))
    k = k * torch.linspace(0.2, 3, 100)[:, None]
    out, _state = favor_attention(q.float(), k.float(), v.float(), directions(), True, 0.2)
    first = slice(0, 60)
    short, _state = favor_attention(
        q[:, :, first].float(), k.float(), v.float(), directions(), False, 0.2, None, torch.arange(100)[None] < 60
    )
    torch.testing.assert_close(short[:, :, -1], out[:, :, 59], rtol=1e-4, atol=1e-5)
    u = k * 0.2**0.5 @ directions().double().mT
    leaking = (u.amax((2, 3)) - u[:, :, first].amax((2, 3))).min()
    assert leaking > 1  # ε of the published form would weigh e times as much


def test_padding_has_no_gradient_and_a_row_without_keys_is_zero():
    q, k, v = (drawn(1, 2, 90, 32, seed=i).requires_grad_() for i in range(3))
    mask = torch.arange(90)[None] >= 70
    out, _state = favor_attention(q, k, v, directions(), True, 0.2, None, mask)
    assert not out[:, :, :70].any() and out[:, :, 70:].all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() and not grad[:, :, :70].any() for grad in grads)


def test_what_does_not_fit_does_not_reach_c():
    q = drawn(1, 2, 32, 32)
    w = directions()
    misfits = [
        (drawn(1, 2, 31, 32), drawn(1, 2, 30, 32), w, None),
        (drawn(1, 3, 32, 32), drawn(1, 3, 32, 32), w, None),
        (q, q, directions(40), None),
        (q, q, directions(48, 16), None),
        (q, q, w, torch.ones(1, 31, dtype=torch.bool)),
        (drawn(1, 2, 40, 32), drawn(1, 2, 40, 32), w, None),
    ]
    for k, v, projection, mask in misfits:
        with pytest.raises(TensorMismatch):
            fused_favor(q, k, v, projection, True, 0.2, 1e-4, None, mask)
    sums = drawn(1, 2, 48, 31), drawn(1, 2, 48), drawn(1, 2, 32), drawn(1, 2), drawn(1, 2)
    with pytest.raises(TensorMismatch):
        fused_favor(q, q, q, w, True, 0.2, 1e-4, sums, None)
