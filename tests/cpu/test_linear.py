"""Linear maps of training equal their formulas: bias, activation, dropout, slopes; each row alone, and received."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import Linear
from torch.nn import functional as F
from torch.nn.utils import prune

from headwater.core import FeedForward
from headwater.core.functional import feed_forward, linear, linears
from headwater.cpu import build
from headwater.cpu import linear as module
from headwater.cpu.activations import ACTIVATION_CODES
from headwater.cpu.build import training_library
from headwater.cpu.dropout import DropoutKey, keep_mask
from headwater.cpu.linear import linear_grad_weight, linear_supported

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)
MANY = module.MIN_MACS
ACTS = {code.__name__: code for code in ACTIVATION_CODES}


@pytest.fixture(scope="module", autouse=True)
def small_ones_too():
    module.MIN_MACS = 0
    yield
    module.MIN_MACS = MANY


def near(one, other, times=1.0):
    """Sums of K numbers in another order: some units in the last place of what is summed."""
    torch.testing.assert_close(
        one, other.float(), rtol=0, atol=times * 2e-6 * max(1.0, float(other.detach().abs().max()))
    )


def equal_slopes(ours, mine, theirs, wide):
    above = torch.randn(ours.shape)
    slopes = torch.autograd.grad(ours, mine, above), torch.autograd.grad(theirs, wide, above.double())
    for one, other in zip(*slopes, strict=True):
        near(one, other, 8.0)


def widened(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 250),
    inner=st.sampled_from([16, 48, 512, 528, 1040]),
    outer=st.sampled_from([16, 64, 80, 208]),
    bias=st.booleans(),
)
def test_a_map_and_its_slopes_are_the_formula(rows, inner, outer, bias):
    torch.manual_seed(rows)
    layer, x = Linear(inner, outer, bias), torch.randn(rows, inner, requires_grad=True)
    assert linear_supported(x, layer.weight)
    mine = (x, *layer.parameters())
    wide = widened(*mine)
    ours, theirs = linear(x, layer), F.linear(*wide)
    near(ours, theirs, 4.0)
    equal_slopes(ours, mine, theirs, wide)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 250),
    width=st.sampled_from([16, 48, 528]),
    inner=st.sampled_from([16, 64, 80, 528]),
    act=st.sampled_from(sorted(ACTS)),
    p=st.sampled_from([0.0, 0.1, 0.6]),
    biases=st.tuples(st.booleans(), st.booleans()),
)
def test_a_feed_forward_and_its_slopes_are_the_formula(rows, width, inner, act, p, biases):
    torch.manual_seed(rows)
    up, down = Linear(width, inner, biases[0]), Linear(inner, width, biases[1])
    x = torch.randn(rows, width, requires_grad=True)
    with torch.no_grad():  # no ReLU stands where rounding decides its side: there a slope may be 0 or 1
        assume(F.linear(x, up.weight, up.bias).abs().min() > 1e-5)
    torch.manual_seed(7)
    ours = feed_forward(x, up, ACTS[act], p, down)
    assert ours.grad_fn.name() == "_FeedForwardBackward"
    torch.manual_seed(7)
    mask = keep_mask(rows * inner, DropoutKey.sample(p)).view(rows, inner).double() if p else 1.0
    mine = (x, *up.parameters(), *down.parameters())
    wide = widened(*mine)
    first, second = wide[1 : 2 + biases[0]], wide[2 + biases[0] :]
    theirs = F.linear(ACTS[act](F.linear(wide[0], *first)) * mask, *second)
    near(ours, theirs, 4.0)
    equal_slopes(ours, mine, theirs, wide)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 250),
    width=st.sampled_from([16, 528]),
    outer=st.lists(st.sampled_from([16, 64, 80]), min_size=2, max_size=3),
)
def test_maps_of_one_x_are_each_the_formula_and_their_slopes_add_up(rows, width, outer):
    torch.manual_seed(rows)
    layers = [Linear(width, n, bias) for n, bias in zip(outer, (True, False, True), strict=False)]
    x = torch.randn(rows, width, requires_grad=True)
    mine = (x, *(p for layer in layers for p in layer.parameters()))
    ours = torch.cat(list(linears(x, *layers)), -1)
    wide, theirs = widened(*mine), []
    left = iter(wide[1:])
    for layer in layers:
        theirs.append(F.linear(wide[0], next(left), next(left) if layer.bias is not None else None))
    near(ours, torch.cat(theirs, -1), 4.0)
    equal_slopes(ours, mine, torch.cat(theirs, -1), wide)


def test_a_slope_that_is_not_added_would_be_seen(monkeypatch):
    """The planted fault: of two maps only the last says something of x."""
    one, two, x = Linear(32, 32), Linear(32, 48), torch.randn(64, 32, requires_grad=True)
    right = torch.autograd.grad(sum(y.sum() for y in linears(x, one, two)), x)[0]
    alone = module.gemm_bias_act
    monkeypatch.setattr(module, "gemm_bias_act", lambda *args, accumulate_into=None: alone(*args))
    wrong = torch.autograd.grad(sum(y.sum() for y in linears(x, one, two)), x)[0]
    near(right, one.weight.sum(0).expand(64, 32) + two.weight.sum(0), 8.0)
    assert not torch.allclose(right, wrong)


def test_of_several_maps_one_that_is_listened_to_is_heard():
    one, two, x, received = Linear(32, 32), Linear(32, 48), torch.randn(64, 32), []
    two.register_forward_hook(lambda _, __, out: received.append(out))
    near(linears(x, one, two)[1], received[0])


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 800), k=st.sampled_from([16, 80, 272]), n=st.sampled_from([16, 48, 112, 400]))
def test_the_slope_of_weights_is_a_sum_over_all_rows(rows, k, n):
    torch.manual_seed(rows)
    above, x = torch.randn(rows, n), torch.randn(rows, k)
    near(linear_grad_weight(above, x), above.double().t() @ x.double(), 8.0)


def test_a_row_left_out_of_the_slope_of_weights_would_be_seen():
    """The planted fault: one row of 513 is forgotten, where a third block of rows begins."""
    above, x = torch.randn(513, 48), torch.randn(513, 32)
    wrong = above.clone()
    wrong[342] = 0
    right = above.double().t() @ x.double()
    near(linear_grad_weight(above, x), right, 8.0)
    with pytest.raises(AssertionError):
        near(linear_grad_weight(wrong, x), right, 8.0)


@pytest.mark.parametrize("act", sorted(ACTS))
def test_without_gradients_the_same_bits(act):
    """Training and inference compute one thing, in less memory."""
    up, down, x = Linear(48, 80), Linear(80, 48), torch.randn(70, 48)
    learned = feed_forward(x, up, ACTS[act], 0.0, down), linear(x, up)
    with torch.inference_mode():
        assert all(map(torch.equal, learned, (feed_forward(x, up, ACTS[act], 0.0, down), linear(x, up))))
    assert x.grad_fn is None


def test_gelu_is_the_exact_one_everywhere():
    """Tails, zero and what is not finite; the tanh form, 5e-4 away, would be noticed."""
    z = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -0.0, 1e-30, -40.0, 40.0])])
    z = F.pad(z, (0, -len(z) % 16)).view(-1, 16)
    up, down = Linear(16, 16, False), Linear(16, 16, False)
    up.weight.data = down.weight.data = torch.eye(16)
    ours = feed_forward(z, up, F.gelu, 0.0, down)
    near(ours, F.gelu(z.double()))
    assert (ours - F.gelu(z, approximate="tanh")).abs().max() > 1e-4
    x = torch.full((48, 16), float("nan"))
    assert all(feed_forward(x, up, act, 0.0, down).isnan().all() for act in ACTS.values())


def test_a_row_does_not_depend_on_the_others_nor_anything_on_the_threads():
    layer, x, threads = Linear(528, 80), torch.randn(250, 528), torch.get_num_threads()
    ffn, above = FeedForward(208, activation="gelu").build(80), torch.randn(250, 80)

    def all_of_it():
        narrow = above.clone().requires_grad_()
        return linear(x, layer), *torch.autograd.grad(ffn(narrow), (narrow, *ffn.parameters()), above)

    whole = all_of_it()
    assert torch.equal(whole[0][100:170], linear(x[100:170], layer))
    assert torch.equal(whole[0][1:], linear(x[1:], layer))
    try:
        torch.set_num_threads(1)
        assert all(map(torch.equal, whole, all_of_it()))
    finally:
        torch.set_num_threads(threads)


def test_a_slope_forgotten_would_be_seen(monkeypatch):
    """The planted fault: in the backward pass the ReLU lets everything through."""
    ffn, x = FeedForward(32).build(32), torch.randn(64, 32)
    right = torch.autograd.grad(ffn(x).sum(), ffn.up.bias)[0]
    through = "headwater.cpu.linear.linear_grad_input_act"
    monkeypatch.setattr(through, lambda above, w, act, drop, z: (above @ w, (above @ w).sum(0)))
    wrong = torch.autograd.grad(ffn(x).sum(), ffn.up.bias)[0]
    assert not torch.allclose(right, wrong)


def test_who_listens_to_a_layer_hears_what_it_gives():
    ffn = FeedForward(64).build(32)
    x, received = torch.randn(60, 32), []
    quiet = ffn(x)
    ffn.up.register_forward_hook(lambda _, __, out: received.append(out))
    near(ffn(x), quiet)
    near(received[0], F.linear(x, ffn.up.weight, ffn.up.bias))
    assert (received[0] < 0).any()  # before the ReLU


def test_a_weight_made_anew_before_each_use_is_the_one_used():
    """torch's pruning works out the weight in a hook; passing by it would train on an old one."""
    ffn, x, calls = FeedForward(64).build(32), torch.randn(60, 32), []
    prune.random_unstructured(ffn.up, "weight", amount=0.5)
    with torch.no_grad():
        ffn.up.weight_orig.mul_(3)
    near(ffn(x), ffn.down(F.relu(F.linear(x, ffn.up.weight_orig * ffn.up.weight_mask, ffn.up.bias))))
    other = FeedForward(64).build(32)
    other.up.register_full_backward_hook(lambda *_: calls.append(1))
    other.down.register_forward_hook(lambda *_: calls.append(1))
    other(x.requires_grad_()).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize(
    "why, x, width",
    [("no whole panels", torch.randn(64, 40), 32), ("half precision", torch.randn(64, 32, dtype=torch.bfloat16), 32)],
)
def test_torch_does_the_rest(why, x, width):
    layer = Linear(x.shape[-1], width).to(x.dtype)
    assert not linear_supported(x, layer.weight)
    assert torch.equal(linear(x, layer), F.linear(x, layer.weight, layer.bias))


def test_little_work_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(module, "MIN_MACS", MANY)
    layer = Linear(256, 1024)
    assert linear_supported(torch.randn(128, 256), layer.weight) and not linear_supported(
        torch.randn(127, 256), layer.weight
    )


def test_half_precision_asked_for_by_autocast_is_given():
    layer, x = Linear(32, 32), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, layer).dtype == feed_forward(x, layer, F.relu, 0.0, layer).dtype == torch.bfloat16


def test_rows_that_do_not_lie_side_by_side():
    layer = Linear(32, 48)
    x = torch.randn(32, 70).t()
    near(linear(x, layer), F.linear(x, layer.weight, layer.bias))
    y = linear(x.contiguous().requires_grad_(), layer)
    strange = torch.ones(1, 1).expand(y.shape)
    near(torch.autograd.grad(y, layer.weight, strange)[0], strange.t() @ x)
