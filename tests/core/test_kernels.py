"""Kernels: every back end gives the same answers and gradients; a row that sees nothing gives zeros in every dtype."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from headwater import core as hw
from headwater.core.masks import AttentionMask
from headwater.core.positions import PositionEncoding
from headwater.errors import BadSetting, Unavailable
from headwater.families import builders
from headwater.families.builders import BACKENDS
from headwater.variants.soft_cap import SoftCap


def stand_in() -> types.ModuleType:
    """xformers.ops as its documentation describes memory_efficient_attention.

    q, k, v [B, M, H, K]; the bias is added to [B, H, M, M]; all keys hidden gives NaN. It is stricter than the formula
    where the real one is: heads must be equal in number and the bias must have its full shape.
    """

    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None):
        assert query.dim() == key.dim() == value.dim() == 4
        assert query.shape[0::2] == key.shape[0::2] == value.shape[0::2], "batch and heads must be equal"
        assert key.shape[1] == value.shape[1] and query.shape[3] == key.shape[3]
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        scores = q @ k.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if attn_bias is not None:
            assert attn_bias.shape == scores.shape and attn_bias.dtype == query.dtype, "a bias of full shape and dtype"
            scores = scores + attn_bias
        weights = torch.nn.functional.dropout(scores.softmax(-1), p)
        return (weights @ v).transpose(1, 2)

    package, ops = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    package.__spec__ = types.SimpleNamespace(name="xformers")
    ops.memory_efficient_attention, package.ops = memory_efficient_attention, ops
    return package


@pytest.fixture
def xformers(monkeypatch):
    package = stand_in()
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", package.ops)


def qkv(dtype=torch.float32, heads=4, kv_heads=2, queries=6, keys=6, d_k=8, d_v=8):
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, queries, d_k), (kv_heads, keys, d_k), (kv_heads, keys, d_v)
    return [torch.randn(2, *shape, generator=draw).to(dtype).requires_grad_() for shape in shapes]


class Slanted(PositionEncoding):
    """A position that biases every score."""

    has_bias = True

    def bias(self, q_positions, k_positions):
        return 0.1 * (k_positions[:, None, None, :] - q_positions[:, None, :, None]).float().expand(-1, 4, -1, -1)


def sight(rule=None, position=None, attention_mask=None, queries=6, keys=6, aligned=True):
    positions = torch.arange(keys)[None]
    return AttentionMask(
        rule or hw.Causal(),
        position or PositionEncoding(),
        positions[:, -queries:],
        positions,
        attention_mask,
        aligned=aligned,
    )


def run(name, tensors, look, grads=True):
    kernel = hw.Attention(4, scale=tensors[0].shape[-1] ** -0.5, kernel=BACKENDS[name]).build_kernel(8)
    mask = None if look.is_causal and not look.position.has_bias else look.additive(tensors[0].dtype)
    out = kernel(*tensors, look, mask)
    if not grads:
        return out.detach(), []
    for t in tensors:
        t.grad = None
    (out * torch.sin(torch.arange(out.numel()).view(out.shape))).sum().backward()
    return out.detach(), [t.grad.clone() for t in tensors]


KEEP = torch.tensor([[True] * 6, [False, False, True, True, True, False]])
MASKS = {
    "everyone": sight(hw.Bidirectional()),
    "past": sight(),
    "past, padded": sight(attention_mask=KEEP),
    "window": sight(hw.SlidingWindow(2)),
    "biased": sight(position=Slanted()),
    "biased, padded": sight(hw.Bidirectional(), Slanted(), KEEP),
    "two of six": sight(queries=2, aligned=False),
    "nothing real": sight(attention_mask=torch.zeros(2, 6, dtype=torch.bool)),
}
SHAPES = {"heads": {"kv_heads": 4}, "grouped": {}, "one key": {"kv_heads": 1}, "wide values": {"d_v": 5}}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("look", MASKS)
@pytest.mark.parametrize("name", ["sdpa", "xformers"])
def test_every_back_end_is_the_formula(name, look, shape, xformers):
    tensors = qkv(**SHAPES[shape], queries=2 if look == "two of six" else 6)
    want, want_grads = run("eager", tensors, MASKS[look])
    got, got_grads = run(name, tensors, MASKS[look])
    for a, b in zip([got, *got_grads], [want, *want_grads], strict=True):
        assert (a - b).abs().max() < 1e-5


def test_the_formula_is_the_formula():
    """softmax(QKᵀ/√d)V written once more with loops, for one head."""
    q, k, v = (t.detach() for t in qkv(heads=1, kv_heads=1))
    out, _ = run("eager", [q, k, v], sight(), grads=False)
    for b in range(2):
        for i in range(6):
            scores = torch.stack([q[b, 0, i] @ k[b, 0, j] / 8**0.5 for j in range(i + 1)])
            shares = (scores - scores.max()).exp()
            want = sum(share * v[b, 0, j] for j, share in enumerate(shares / shares.sum()))
            torch.testing.assert_close(out[b, 0, i], want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "eager", "xformers"])
@pytest.mark.parametrize("position", [PositionEncoding(), Slanted()], ids=["masked", "biased"])
def test_a_row_that_sees_nothing_gives_zeros(name, dtype, position, xformers):
    keep = torch.tensor([[True] * 6, [False] * 6])
    tensors = qkv(dtype)
    out, grads = run(name, tensors, sight(hw.Bidirectional(), position, keep))
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[1] == 0).all() for grad in grads), "what nobody sees must not be pushed about"


def test_the_mistake_would_show():
    """-1e9 instead of 'may not attend': a row that sees nothing attends everywhere."""
    q, k, v = (t.detach() for t in qkv(kv_heads=4))
    wrong = (q @ k.mT / 8**0.5).masked_fill(torch.ones(6, 6, dtype=torch.bool), -1e9).softmax(-1) @ v
    assert wrong.abs().max() > 0.1


@pytest.mark.parametrize("length", [1, 5])
def test_scale_is_in_every_back_end(length, xformers):
    tensors = qkv(queries=length, keys=length)
    look = sight(hw.Bidirectional(), queries=length, keys=length)
    outs = [
        hw.Attention(4, scale=0.9, kernel=BACKENDS[name]).build_kernel(8)(*tensors, look, None) for name in BACKENDS
    ]
    other = hw.Attention(4, scale=0.1, kernel=BACKENDS["eager"]).build_kernel(8)(*tensors, look, None)
    assert all((out - outs[0]).abs().max() < 1e-5 for out in outs)
    assert length == 1 or (other - outs[0]).abs().max() > 1e-2


def test_soft_capped_scores_stay_within_the_cap():
    q, k, v = (t.detach() for t in qkv(kv_heads=4))
    kernel = hw.Attention(4, scale=1.0, kernel=SoftCap(2.0)).build_kernel(8)
    want = (2 * torch.tanh(50 * q @ k.mT / 2)).softmax(-1) @ v
    torch.testing.assert_close(kernel(50 * q, k, v, sight(hw.Bidirectional()), None), want, atol=1e-5, rtol=1e-5)


def test_watched_weights_are_those_used(xformers):
    for name in BACKENDS:
        kernel, received, tensors = hw.Attention(4, scale=0.3, kernel=BACKENDS[name]).build_kernel(8), [], qkv()
        kernel.weights.register_forward_hook(lambda *a, received=received: received.append(a[2]))
        out = kernel(*tensors, sight(), None)
        (weights,) = received
        assert weights.shape == (2, 4, 6, 6) and (weights.triu(1) == 0).all()
        torch.testing.assert_close(weights @ tensors[2].repeat_interleave(2, 1), out)


def test_dropout_acts_in_training_only(xformers):
    torch.manual_seed(0)
    for name in BACKENDS:
        kernel, tensors = hw.Attention(4, scale=0.3, dropout=0.5, kernel=BACKENDS[name]).build_kernel(8), qkv()
        whole = kernel.eval()(*tensors, sight(hw.Bidirectional()), None)
        assert torch.equal(whole, kernel(*tensors, sight(hw.Bidirectional()), None))
        dropped = kernel.train()(*tensors, sight(hw.Bidirectional()), None)
        assert not torch.allclose(dropped, whole)


def test_without_xformers_the_fault_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="xformers must be installed, it is not; pip install xformers, or use SDPA"):
        builders.decoder(9, d_model=8, heads=2, layers=1, backend="xformers").on_meta()


def test_an_unknown_back_end_is_named_with_the_nearest():
    with pytest.raises(BadSetting, match="sdpa, eager, xformers, got 'sdap'; did you mean 'sdpa'"):
        builders.decoder(9, backend="sdap")


def test_a_whole_model_on_the_stand_in(xformers):
    sizes = {"d_model": 16, "heads": 4, "kv_heads": 2, "layers": 2, "d_ff": 16, "position": "alibi", "dropout": 0.0}
    other = builders.transformer(11, backend="xformers", **sizes).build(seed=0).eval()
    plain = builders.transformer(11, backend="eager", **sizes).build(seed=0).eval()
    ids, keep = torch.arange(10).view(2, 5), torch.tensor([[True] * 5, [True, True, False, False, False]])
    got, want = (m(ids, source=ids, attention_mask=keep, source_attention_mask=keep) for m in (other, plain))
    assert (got - want)[keep].abs().max() < 1e-5
