"""Norms of training equal their formulas, with and without the sum of a branch, its dropout, and weights that are 0."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.norms import LayerNorm, OffsetRMSNorm, RMSNorm
from headwater.cpu import build
from headwater.cpu.build import training_library
from headwater.cpu.dropout import DropoutKey, keep_mask
from headwater.cpu.norm import norm_supported

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
NORMS = {"layer": LayerNorm(), "layer without bias": LayerNorm(bias=False), "rms": RMSNorm(), "offset": OffsetRMSNorm()}


def built(name, width, weights="usual"):
    norm = NORMS[name].build(width)
    norm.reset_parameters()
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3 * torch.randn(width))
        if weights == "zeros among them":
            norm.weight[::3] = -1.0 if name == "offset" else 0.0
        if weights == "small beside the bias" and hasattr(norm, "bias"):
            norm.weight[::2] = 1e-6
    return norm


def gradients(f, *tensors):
    out = f()
    torch.manual_seed(5)
    return [out, *torch.autograd.grad(out, tensors, torch.randn(out.shape))]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(NORMS)),
    rows=st.integers(1, 300),
    eights=st.integers(1, 40),
    p=st.sampled_from([0.0, 0.1, 0.7]),
    adds=st.booleans(),
    weights=st.sampled_from(["usual", "zeros among them", "small beside the bias"]),
)
def test_a_norm_and_its_gradients_are_the_formula(name, rows, eights, p, adds, weights):
    torch.manual_seed(rows)
    width = 8 * eights
    norm = built(name, width, weights)
    x, y = (torch.randn(rows, width, requires_grad=True) for _ in range(2))
    learned = [x, *([y] if adds else []), *norm.parameters()]
    torch.manual_seed(7)
    ours = gradients(lambda: norm(x, y, p) if adds else norm(x), *learned)
    torch.manual_seed(7)
    mask = keep_mask(rows * width, DropoutKey.sample(p)).view(rows, width) if p else torch.ones(rows, width)
    double = norm.double()
    wide = [t.detach().double().requires_grad_() for t in ((x, y) if adds else (x,))]
    s = wide[0] + wide[1] * mask if adds else wide[0]
    theirs = gradients(lambda: double(s).float(), *wide, *double.parameters())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            one, other.float(), rtol=2e-4, atol=2e-4 * max(1.0, float(other.detach().abs().max()))
        )


@pytest.mark.parametrize("weights", ["zeros among them", "small beside the bias"])
def test_going_back_through_such_weights_would_be_wrong(weights, monkeypatch):
    """The planted fault: u is always taken from the result. Then its digits are lost, and the law above sees it."""
    norm = built("layer", 64, weights)
    x = torch.randn(50, 64, requires_grad=True)
    right = gradients(lambda: norm(x), x)
    from headwater.cpu import norm as module

    run = module._kernel
    monkeypatch.setattr(module, "_kernel", lambda name: (lambda *_: 1) if name == "invertible" else run(name))
    wrong = gradients(lambda: norm(x), x)
    assert not torch.allclose(right[1], wrong[1], rtol=2e-3, atol=2e-3)


def test_only_its_result_is_kept():
    """x, y and their sum can be forgotten: what is kept beside the result is a number a row."""
    norm, kept_sizes = built("layer", 64), []
    x, y = (torch.randn(100, 64, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept_sizes.append(t.data_ptr()) or t, lambda t: t):
        out = norm(x, y, 0.1)
    assert x.data_ptr() not in kept_sizes and y.data_ptr() not in kept_sizes and out.data_ptr() in kept_sizes


def test_the_number_of_threads_changes_nothing():
    norm, x = built("layer", 256), torch.randn(2048, 256, requires_grad=True)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(gradients(lambda: norm(x), x, *norm.parameters()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_are_never_hidden(bad):
    x = torch.zeros(3, 16)
    x[1, 4] = bad
    out = built("layer", 16)(x.requires_grad_())
    assert torch.isnan(out[1]).any() and not torch.isnan(out[[0, 2]]).any()


def test_what_it_does_not_serve_is_left_to_the_formula():
    weight = torch.ones(16)
    assert norm_supported(torch.ones(2, 16), weight)
    assert not norm_supported(torch.ones(2, 12), torch.ones(12)) and not norm_supported(torch.ones(0, 16), weight)
    assert not norm_supported(torch.ones(2, 16).double(), weight.double())
    with torch.no_grad():
        assert not norm_supported(torch.ones(2, 16), weight)
