"""LSH attention in C is its formula, for the same order: outputs, gradients, dropout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwater.core import Bidirectional, Causal
from headwater.cpu import build
from headwater.cpu.build import TensorMismatch, training_library
from headwater.cpu.lsh_attention import SortedChunks, fused_lsh_attention
from headwater.variants.lsh_attention import LSHAttention, LSHLayer

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
HEADS, WIDTH = 3, 16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(**settings) -> LSHLayer:
    layer = LSHAttention(HEADS, head_dim=WIDTH, **{"chunk": 16, "buckets": (8,), **settings}).build(HEADS * WIDTH)
    return layer.eval()


def both(layer: LSHLayer, chunks: int, masked: bool = False, p: float = 0.0) -> list[tuple[Tensor, Tensor]]:
    """Outputs and gradients of C and of the formula, for one order.

    Both in float32: of a row that sees only itself in every round, -1e5 leaves the weights of rounds three digits.
    """
    length = chunks * layer.spec.chunk
    key_mask = torch.arange(length) < torch.tensor([[length], [length - 21]]) if masked else None
    layer.train(p > 0)
    layer.kernel.dropout = p
    layer.replayed_choice = layer._order(drawn(2, HEADS, length, WIDTH), key_mask)
    results = []
    for attend in (layer._hashed, lambda qk, v, mask: layer._formula(qk, v, layer.replayed_choice, mask)):
        qk, v = (drawn(2, HEADS, length, WIDTH, seed=i).requires_grad_() for i in range(2))
        torch.manual_seed(5)
        out = attend(qk, v, key_mask)
        real = 1.0 if key_mask is None else key_mask[:, None, :, None]  # the answers of padding are nobody's
        grads = torch.autograd.grad((out * real * drawn(*out.shape, seed=9)).sum(), (qk, v))
        results.append([out * real, *grads])
    return list(zip(*results, strict=True))


def assert_alike(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for in_c, formula in pairs:
        torch.testing.assert_close(in_c, formula, rtol=1e-4, atol=1e-4)


CASES = {
    "one round": {},
    "causal": {"mask": Causal()},
    "three rounds": {"rounds": 3},
    "both neighbours": {"after": 1, "rounds": 2},
    "no neighbours": {"before": 0, "chunk": 32},
    "chunks of more than a tile": {"chunk": 80, "after": 1},
    "a window wider than the ring": {"before": 2, "after": 2},
    "more chunks before than the ring has": {"before": 9, "after": 1},
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula(name: str, masked: bool):
    assert_alike(both(layer_of(**CASES[name]), 4, masked))


@pytest.mark.parametrize("name", ["causal", "both neighbours", "chunks of more than a tile"])
def test_it_drops_what_the_formula_drops(name: str):
    assert_alike(both(layer_of(**CASES[name]), 4, p=0.3))


@settings(max_examples=15, deadline=None)
@given(
    chunk=st.sampled_from([16, 48, 64]), chunks=st.integers(2, 7), before=st.integers(0, 4), after=st.integers(0, 4),
    rounds=st.integers(1, 4), causal=st.booleans(), masked=st.booleans(),
)  # fmt: skip
def test_any_chunks_are_the_formula(chunk, chunks, before, after, rounds, causal, masked):
    mask = Causal() if causal else Bidirectional()
    layer = layer_of(chunk=chunk, before=before, after=after, rounds=rounds, mask=mask)
    assert_alike(both(layer, chunks, masked and chunk * chunks > 40))


def direct(q: Tensor, order: Tensor, **changed) -> Tensor:
    plain = {"chunk": 16, "before": 1, "after": 0, "rounds": 1, "causal": True, "itself": -1e5}
    chunks = SortedChunks(**(plain | changed))
    return fused_lsh_attention(q, q, order, chunks, None, 0.3, 1e-6, 0.0)


def test_faults_would_show():
    """A ring that does not close, a leak, rounds that are not weighted: each changes the answer."""
    q = drawn(1, 2, 64, 16)
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(2)])[None]
    right = direct(q, order, causal=False)
    ring = direct(q, order.roll(16, -1), causal=False)  # the same ring, entered at another chunk
    torch.testing.assert_close(ring, right)
    for wrong in ({"before": 0}, {"before": 0, "after": 1}, {"itself": 0.0}, {"causal": True}):
        assert (direct(q, order, **({"causal": False} | wrong)) - right).abs().max() > 1e-2


def test_no_later_value_reaches_an_answer():
    q = drawn(1, 2, 64, 16)
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(2)])[None]
    chunks = SortedChunks(16, 1, 0, 1, True, -1e5)
    v = drawn(1, 2, 64, 16, seed=1)
    changed = v.clone()
    changed[:, :, 40:] += 1
    out, other = (fused_lsh_attention(q, t, order, chunks, None, 0.3, 1e-6, 0.0) for t in (v, changed))
    assert torch.equal(out[:, :, :40], other[:, :, :40]) and not torch.equal(out[:, :, 40:], other[:, :, 40:])


def test_what_does_not_fit_does_not_reach_c():
    q = drawn(1, 2, 64, 16)
    order = torch.arange(64).expand(1, 2, 64)
    misfits = [
        (q, order + 1, {}),
        (q, order - 1, {}),
        (q, order[:, :, :63], {}),
        (q, order, {"rounds": 2}),
        (q, order, {"chunk": 48}),
        (q, order, {"chunk": 8}),
        (q, order, {"before": -1}),
        (drawn(1, 2, 64, 15), order, {}),
    ]
    for qk, wrong_order, changed in misfits:
        with pytest.raises(TensorMismatch):
            direct(qk, wrong_order, **changed)
    with pytest.raises(TensorMismatch):
        mask = torch.ones(1, 63, dtype=torch.bool)
        fused_lsh_attention(q, q, order, SortedChunks(16, 1, 0, 1, True, -1e5), mask, 0.3, 1e-6, 0.0)
