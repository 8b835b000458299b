"""The C of training equals the formulas: dropout by its hash, attention and its gradients, the loss and its slope."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from headwater.core import Attention, Block, Causal, Embeddings, FeedForward, LayerNorm, Stack, pre
from headwater.core.functional import add_dropout, dropout
from headwater.core.modules import Dropout
from headwater.cpu import build
from headwater.cpu.attention import KeyRules, full_attention_supported, fused_attention, fused_banded_attention
from headwater.cpu.build import supported, training_library
from headwater.cpu.dropout import DropoutKey, keep_mask
from headwater.cpu.loss import cross_entropy_grad_

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 70_000), p=st.floats(0.001, 0.99), seed=st.integers(0, 2**30))
def test_dropout_is_its_formula_bit_for_bit(n, p, seed):
    x, y = torch.randn(n), torch.randn(n, requires_grad=True)
    torch.manual_seed(seed)
    out = add_dropout(x, y, p)
    torch.manual_seed(seed)
    mask = keep_mask(n, DropoutKey.sample(p))
    assert torch.equal(dropout_again(seed, y, p), y * mask)
    torch.testing.assert_close(out, x + y * mask, rtol=1e-6, atol=1e-6)
    out.sum().backward()
    assert torch.equal(y.grad, mask)


def dropout_again(seed, y, p):
    torch.manual_seed(seed)
    return dropout(y.detach(), p)


def test_the_hash_is_fair_and_without_memory():
    """Rate, neighbours, and two draws: all as independent coins would have them, within five standard deviations."""
    n, p = 2_000_000, 0.1
    torch.manual_seed(1)
    one, two = (keep_mask(n, DropoutKey.sample(p)) == 0 for _ in range(2))
    sure = 5 * (p * (1 - p) / n) ** 0.5
    assert abs(one.float().mean() - p) < sure
    for lag in (1, 2, 8, 64, 256, 1024, 65536):
        both = (one[lag:] & one[:-lag]).float().mean()
        assert abs(both - p * p) < 5 * (p * p / n) ** 0.5, lag
    assert abs((one & two).float().mean() - p * p) < 5 * (p * p / n) ** 0.5


def test_a_weak_hash_would_be_seen():
    index = torch.arange(2_000_000) * 2654435761 % 2**32  # a plain multiplication: neighbours know of each other
    one = index < 0.1 * 2**32
    assert any(abs((one[lag:] & one[:-lag]).float().mean() - 0.01) > 5 * (0.01 / 2e6) ** 0.5 for lag in (1, 2, 8, 64))


def spelled_out(q, k, v, mask, causal, scale, drop):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = scale * (q @ k.mT)
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask
    weights = scores.masked_fill(~allowed, -1e30).softmax(-1).masked_fill(~allowed, 0)
    return (weights * drop) @ v


SHAPES = [
    (2, 4, 4, 32, 32, 64),
    (3, 4, 2, 17, 45, 32),
    (1, 2, 1, 200, 200, 16),
    (2, 1, 1, 1, 1, 16),
    (1, 3, 3, 5, 300, 48),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", ["all", "causal", "bool", "float", "causal and bool"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_attention_and_its_gradients_are_the_formula(shape, masked, p):
    batch, heads, groups, queries, keys, width = shape
    causal = "causal" in masked
    if causal and queries != keys:
        pytest.skip("the triangle is for as many keys as queries")
    torch.manual_seed(3)
    sizes = ((queries, heads), (keys, groups), (keys, groups))
    q, k, v = (torch.randn(batch, n, h, width).transpose(1, 2).requires_grad_() for n, h in sizes)
    mask = torch.randn(1, heads, queries, keys) if masked == "float" else None
    if "bool" in masked:
        mask = (torch.rand(batch, 1, 1, keys) > 0.4).expand(batch, 1, queries, keys).clone()
        mask[0, 0, 0] = False  # a row that sees nothing gives zeros
    torch.manual_seed(7)
    out = fused_attention(q, k, v, mask, causal, 0.2, p)
    torch.manual_seed(7)
    wide = -(-keys // 16) * 16
    drop = (
        keep_mask(batch * heads * queries * wide, DropoutKey.sample(p)).view(batch, heads, queries, wide)[..., :keys]
        if p
        else 1
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = spelled_out(*exact, mask, causal, 0.2, drop)
    above = torch.randn_like(wanted)
    out.backward(above.float())
    wanted.backward(above)
    for ours, formula in ((out, wanted), *zip((q.grad, k.grad, v.grad), (t.grad for t in exact), strict=True)):
        torch.testing.assert_close(ours.double(), formula, rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 1500), window=st.integers(1, 700), p=st.sampled_from([0.0, 0.3]), groups=st.sampled_from([1, 2])
)
def test_a_window_is_the_formula_with_a_band(n, window, p, groups):
    """Spans of 512 queries and more, tiles of 48, keys from a multiple of 16 on: none of it may be seen."""
    torch.manual_seed(n)
    q, k, v = (torch.randn(1, h, n, 16, requires_grad=True) for h in (2, groups, groups))
    torch.manual_seed(7)
    out = fused_banded_attention(q, k, v, KeyRules(window - 1, 0), 0.25, p)
    torch.manual_seed(7)
    wide = -(-n // 16) * 16
    drop = keep_mask(2 * n * wide, DropoutKey.sample(p)).view(1, 2, n, wide)[..., :n] if p else 1
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = spelled_out(*exact, torch.ones(n, n, dtype=torch.bool).triu(1 - window), True, 0.25, drop)
    above = torch.randn_like(wanted)
    out.backward(above.float())
    wanted.backward(above)
    for ours, formula in ((out, wanted), *zip((q.grad, k.grad, v.grad), (t.grad for t in exact), strict=True)):
        torch.testing.assert_close(ours.double(), formula, rtol=1e-5, atol=1e-5)
    if window < n:
        assert not torch.allclose(
            fused_banded_attention(q, k, v, KeyRules(window, 0), 0.25, 0.0),
            fused_banded_attention(q, k, v, KeyRules(window - 1, 0), 0.25, 0.0),
        )


def test_what_it_does_not_serve_is_left_to_torch():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    assert full_attention_supported(q, q, q, None)
    many = torch.randn(1, 4, 128, 64)
    with torch.no_grad():  # much work without gradients, little work, and a single new token
        assert full_attention_supported(many, many, many, None)
        assert not full_attention_supported(q, q, q, None)
        assert not full_attention_supported(many[:, :, :1], many, many, None)
    assert not full_attention_supported(q.double(), q.double(), q.double(), None)
    odd = torch.randn(1, 2, 8, 20, requires_grad=True)
    assert not full_attention_supported(odd, odd, odd, None)
    learned = torch.zeros(8, 8, requires_grad=True)
    assert not full_attention_supported(q, q, q, learned)
    assert not supported(q.to("meta"))


@pytest.mark.parametrize("vocab", [1, 2, 7, 65, 8000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_and_its_slope_are_the_formula(vocab, smoothing):
    torch.manual_seed(0)
    scores = (torch.randn(40, vocab, dtype=torch.float64) * 5).requires_grad_()
    labels = torch.randint(vocab, (40,))
    wanted = F.cross_entropy(scores, labels, reduction="sum", label_smoothing=smoothing)
    wanted.backward()
    memory = scores.detach().float()
    loss = cross_entropy_grad_(memory, labels, smoothing)
    assert abs(loss - wanted.item()) < 1e-5 * max(1.0, abs(wanted.item()))
    torch.testing.assert_close(memory.double(), scores.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_never_hidden(bad):
    scores = torch.zeros(3, 100)
    scores[1, 50] = bad
    assert not torch.isfinite(torch.tensor(cross_entropy_grad_(scores, torch.tensor([1, 2, 3]), 0.1)))
    q = torch.randn(1, 1, 8, 16)
    q[0, 0, 3, 3] = bad
    out = fused_attention(q.requires_grad_(), torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16), None, False, 1.0, 0.0)
    assert not out[0, 0, 3].isfinite().all() and out[0, 0, 2].isfinite().all()


def test_extreme_scores_are_still_a_softmax():
    scores = torch.tensor([[1e30, -1e30, 0.0, 88.0], [-1e38, -1e38, -1e38, -1e38]])
    loss = cross_entropy_grad_(scores, torch.tensor([0, 1]), 0.0)
    assert abs(loss - torch.tensor(4.0).log().item()) < 1e-5
    assert torch.equal(scores[0], torch.zeros(4))


def small(p):
    block = Block(
        (
            pre(LayerNorm(), self_attn=Attention(2, mask=Causal(), dropout=p)),
            pre(LayerNorm(), ffn=FeedForward(32, dropout=p)),
        ),
        p,
    )
    return Stack(32, Embeddings(50, dropout=p), (block,) * 2, LayerNorm())  # fmt: skip


def gradients(threads, recompute, seed=4, p=0.2):
    from headwater.core import LMHead, Model

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    model = Model(LMHead(50), decoder=small(p)).build(seed=0).train()
    if recompute:
        model.gradient_checkpointing()
    torch.manual_seed(seed)
    ids = torch.arange(60).view(2, 30) % 50
    F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    torch.set_num_threads(before)
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_seed_brings_the_same_gradients_however_many_threads_and_when_layers_are_worked_out_again():
    plain = gradients(1, False)
    for other in (gradients(1, False), gradients(1, True)):
        assert all(torch.equal(plain[name], other[name]) for name in plain)
    two = gradients(2, False)  # torch's own sums may differ in the last bits
    assert all(torch.allclose(plain[name], two[name], rtol=1e-4, atol=1e-7) for name in plain)
    another = gradients(1, False, seed=5)
    assert any(not torch.equal(plain[name], another[name]) for name in plain)


def test_nothing_is_dropped_outside_of_training():
    x = torch.randn(100)
    layer = Dropout(0.5).eval()
    assert layer(x) is x and torch.equal(add_dropout(x, x, layer.rate), x + x)


def test_structures_are_as_long_as_the_c_says():
    assert ctypes.sizeof(DropoutKey) == 16
