"""Causal linear attention in C is its formula in float64: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.cpu import build
from headwater.cpu.build import TensorMismatch, training_library
from headwater.cpu.linear_attention import fused_linear_attention
from headwater.variants.linear_attention import linear_attention

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sides(length: int, kinds: str, heads: int = 4, kv_heads: int = 2) -> list[list[Tensor]]:
    """Outputs, states and gradients: of C in float32, and of the formula in float64. A letter asks for each extra."""
    made: dict = {}
    if "m" in kinds:
        made["attention_mask"] = drawn(2, length, seed=5) > -0.5
    if "d" in kinds:
        made["document_ids"] = torch.arange(length).expand(2, length) // torch.tensor([[33], [90]])
    results = []
    for dtype in (torch.float32, torch.float64):
        shapes = ((heads, length, 32), (kv_heads, length, 32), (kv_heads, length, 16))
        q, k, v = (drawn(2, *shape, seed=i).to(dtype).requires_grad_() for i, shape in enumerate(shapes))
        inputs, state = [q, k, v], None
        if "s" in kinds:
            state = drawn(2, kv_heads, 32, 16, seed=6).to(dtype), drawn(2, kv_heads, 32, seed=7).abs().to(dtype)
            inputs += [t.requires_grad_() for t in state]
        out, after = linear_attention(q, k, v, True, state, **made)
        goal = sum((t * drawn(*t.shape, seed=8 + i).to(dtype)).sum() for i, t in enumerate((out, *after)))
        results.append([out, *after, *torch.autograd.grad(goal, inputs)])
    return results


def assert_alike(results: list[list[Tensor]]) -> None:
    for in_c, formula in zip(*results, strict=True):
        assert in_c.dtype == torch.float32
        torch.testing.assert_close(in_c.double(), formula, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 15, 64, 65, 200])
@pytest.mark.parametrize("kinds", ["", "m", "d", "s", "mds"])
def test_it_is_the_formula(length: int, kinds: str):
    assert_alike(sides(length, kinds))


@settings(max_examples=10, deadline=None)
@given(length=st.integers(1, 300), kinds=st.sampled_from(["", "md", "s"]), groups=st.sampled_from([1, 2, 4]))
def test_any_length_and_any_groups(length, kinds, groups):
    assert_alike(sides(length, kinds, kv_heads=groups))


def test_a_leak_of_one_token_would_show():
    q, k, v = (drawn(1, 2, 100, 16, seed=i) for i in range(3))
    out, _state = linear_attention(q, k, v, True)
    changed = k.clone()
    changed[:, :, 70] += 1
    other, _state = linear_attention(q, changed, v, True)
    assert torch.equal(other[:, :, :70], out[:, :, :70])
    assert (other[:, :, 70:] - out[:, :, 70:]).abs().amax((0, 1, 3)).min() > 1e-5


def test_what_does_not_fit_does_not_reach_c():
    q = drawn(1, 2, 32, 16)
    for k, v in ((drawn(1, 2, 31, 16), drawn(1, 2, 31, 16)), (drawn(1, 3, 32, 16), drawn(1, 3, 32, 16))):
        with pytest.raises(TensorMismatch):
            fused_linear_attention(q, k, v, None, None, None, 1e-6)
    for mask, ids in ((torch.ones(1, 31, dtype=torch.bool), None), (None, torch.ones(2, 32))):
        with pytest.raises(TensorMismatch):
            fused_linear_attention(q, q, q, None, mask, ids, 1e-6)
    with pytest.raises(TensorMismatch):
        fused_linear_attention(q, q, q, (drawn(1, 2, 16, 15), drawn(1, 2, 16)), None, None, 1e-6)
