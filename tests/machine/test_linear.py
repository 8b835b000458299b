"""Linear maps of training equal their formulas: bias, activation, dropout, slopes; each row alone, and heard."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.utils import prune

from headwater.core import FeedForward
from headwater.machine import build
from headwater.machine import linear as module
from headwater.machine.dropout import Drop, kept
from headwater.machine.library import compiled
from headwater.machine.linear import Linear, activated, multiplies

pytestmark = pytest.mark.skipif(compiled() is None, reason=f"nothing is compiled here: {build.missing()}")
MANY = module.FEW
ACTS = {"none": None, "relu": F.relu, "gelu": F.gelu}


@pytest.fixture(scope="module", autouse=True)
def small_ones_too():
    module.FEW = 0
    yield
    module.FEW = MANY


def near(one, other, times=1.0):
    """Sums of K numbers in another order: some units in the last place of what is summed."""
    torch.testing.assert_close(
        one, other.float(), rtol=0, atol=times * 2e-6 * max(1.0, float(other.detach().abs().max()))
    )


def smooth(x, w, b, act):
    """Whether no ReLU stands where rounding decides its side: there a slope may be 0 or 1."""
    z = F.linear(x.double(), w.double(), None if b is None else b.double())
    return act is not F.relu or float(z.detach().abs().min()) > 1e-5


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 250),
    inner=st.sampled_from([16, 48, 512, 528, 1040]),
    outer=st.sampled_from([16, 64, 80, 208]),
    act=st.sampled_from(sorted(ACTS)),
    p=st.sampled_from([0.0, 0.1, 0.6]),
    bias=st.booleans(),
)
def test_a_map_and_its_slopes_are_the_formula(rows, inner, outer, act, p, bias):
    torch.manual_seed(rows)
    map, act = Linear(inner, outer, bias), ACTS[act]
    p = p if act else 0.0
    x = torch.randn(rows, inner, requires_grad=True)
    assert multiplies(x, map.weight)
    torch.manual_seed(7)
    ours = activated(map, act, p, x) if act else map(x)
    torch.manual_seed(7)
    mask = kept(rows * outer, Drop.drawn(p)).view(rows, outer).double() if p else 1.0
    wide = [t.detach().double().requires_grad_() for t in (x, *map.parameters())]
    theirs = F.linear(*wide)
    theirs = act(theirs) * mask if act else theirs
    near(ours, theirs, 4.0)
    if smooth(x, map.weight, map.bias, act):
        above = torch.randn(ours.shape)
        mine = torch.autograd.grad(ours, (x, *map.parameters()), above)
        for one, other in zip(mine, torch.autograd.grad(theirs, wide, above.double()), strict=True):
            near(one, other, 8.0)


def test_gelu_is_the_exact_one_everywhere():
    """Tails, zero and what is not finite; the tanh form, 5e-4 away, would be noticed."""
    z = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -0.0, 1e-30, -40.0, 40.0, float("inf")])])
    z = F.pad(z, (0, -len(z) % 16))
    eye, zeros = torch.eye(16), torch.zeros(16)
    layer = Linear(16, 16)
    layer.weight.data, layer.bias.data = eye, zeros
    finite = torch.where(z.isfinite(), z, 3.0).view(-1, 16)
    ours = activated(layer, F.gelu, 0.0, finite)
    near(ours, F.gelu(finite.double()))
    assert (ours - F.gelu(finite, approximate="tanh")).abs().max() > 1e-4
    x = torch.full((48, 16), float("nan"))
    assert activated(layer, F.gelu, 0.0, x).isnan().all() and activated(layer, F.relu, 0.0, x).isnan().all()


def test_a_row_does_not_depend_on_the_others_nor_on_the_threads():
    map, x = Linear(528, 80), torch.randn(250, 528)
    whole, threads = map(x), torch.get_num_threads()
    assert torch.equal(whole[100:170], map(x[100:170]))
    assert torch.equal(whole[1:], map(x[1:]))
    try:
        torch.set_num_threads(1)
        assert torch.equal(whole, map(x))
    finally:
        torch.set_num_threads(threads)


def test_a_bias_forgotten_would_be_seen(monkeypatch):
    """The planted fault: the slope of the bias is that of a ReLU that lets everything through."""
    layer, x = Linear(32, 32), torch.randn(64, 32)
    right = torch.autograd.grad(activated(layer, F.relu, 0.0, x).sum(), layer.bias)[0]
    monkeypatch.setattr(module, "_act_back", lambda y, above, act, drop: (above, above.sum(0)))
    wrong = torch.autograd.grad(activated(layer, F.relu, 0.0, x).sum(), layer.bias)[0]
    assert not torch.allclose(right, wrong)


def test_who_listens_to_a_layer_hears_what_it_gives():
    ffn = FeedForward(64).build(32)
    x, heard = torch.randn(60, 32), []
    quiet = ffn(x)
    ffn.up.register_forward_hook(lambda _, __, out: heard.append(out))
    near(ffn(x), quiet)
    near(heard[0], F.linear(x, ffn.up.weight, ffn.up.bias))
    assert (heard[0] < 0).any()  # before the ReLU


def test_a_weight_made_anew_before_each_use_is_the_one_used():
    """torch's pruning works out the weight in a hook; passing by it would train on an old one."""
    ffn, x, calls = FeedForward(64).build(32), torch.randn(60, 32), []
    prune.random_unstructured(ffn.up, "weight", amount=0.5)
    with torch.no_grad():
        ffn.up.weight_orig.mul_(3)
    near(ffn(x), ffn.down(F.relu(F.linear(x, ffn.up.weight_orig * ffn.up.weight_mask, ffn.up.bias))))
    other = FeedForward(64).build(32)
    other.up.register_full_backward_hook(lambda *_: calls.append(1))
    other(x.requires_grad_()).sum().backward()
    assert calls


@pytest.mark.parametrize(
    "why, x, width",
    [
        ("no whole panels", torch.randn(64, 40), 32),
        ("half precision", torch.randn(64, 32, dtype=torch.bfloat16), 32),
        ("nothing to learn", None, 32),
    ],
)
def test_torch_does_the_rest(why, x, width):
    layer = Linear(32 if x is None else x.shape[-1], width)
    if x is None:
        x = torch.randn(64, 32)
        with torch.no_grad():
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
            assert not multiplies(x, layer.weight)
    else:
        layer = layer.to(x.dtype)
        assert not multiplies(x, layer.weight)
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_little_work_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(module, "FEW", MANY)
    layer = Linear(256, 1024)
    assert multiplies(torch.randn(128, 256), layer.weight) and not multiplies(torch.randn(127, 256), layer.weight)


def test_half_precision_asked_for_by_autocast_is_given():
    layer, x = Linear(32, 32), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert activated(layer, F.relu, 0.0, x).dtype == torch.bfloat16


def test_rows_that_do_not_lie_side_by_side():
    layer = Linear(32, 48)
    x = torch.randn(32, 70).t()
    near(layer(x), F.linear(x, layer.weight, layer.bias))
    y = layer(x.contiguous().requires_grad_())
    strange = torch.ones(1, 1).expand(y.shape)
    near(torch.autograd.grad(y, layer.weight, strange)[0], strange.t() @ x)
