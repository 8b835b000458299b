"""Nothing reaches C that is not what C will touch: each odd tensor gives what torch gives, or is refused in words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headwater
from headwater.core.functional import add_norm, feed_forward, linear
from headwater.core.norms import LayerNorm, RMSNorm
from headwater.cpu import build
from headwater.cpu.adamw8bit import AdamWParams, adamw8bit_step, init_moments
from headwater.cpu.attention import attention_supported, full_attention_supported, fused_attention
from headwater.cpu.build import TensorMismatch, checked_ptr, float_ptr, training_library
from headwater.cpu.linear import gemm_bias_act, linear_grad_input_act, linear_grad_weight, linear_supported
from headwater.cpu.loss import cross_entropy_grad_
from headwater.cpu.norm import norm_supported
from headwater.errors import BadInput
from headwater.tasks.losses import chunked_cross_entropy

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)

SOURCE = Path(headwater.__file__).parent
LEFT_ALONE = {"cpu/build.py", "cpu/memory.py", "cpu/dropout.py"}  # its own; madvise; out = like y


def gradients(out: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out.square().sum(), of)]


def alike(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


def test_addresses_are_taken_in_one_place():
    """What C calls go through is checked there; identity of memory elsewhere is nobody's address."""
    for folder in ("cpu", "quantization", "generation", "training"):
        for path in sorted((SOURCE / folder).rglob("*.py")):
            name = path.relative_to(SOURCE).as_posix()
            assert name in LEFT_ALONE or ".data_ptr(" not in path.read_text(encoding="utf-8"), name


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).double(),
        torch.zeros(3, 5),
        torch.zeros(4, 3),
        torch.zeros(4, 3).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(12),
        torch.zeros(3, 4, device="meta"),
        torch._neg_view(torch.zeros(3, 4)),
    ],
    ids=["dtype", "columns", "turned over", "transposed", "strided", "flat", "device", "negative bit"],
)
def test_a_tensor_is_what_c_reads_or_a_misfit(tensor: torch.Tensor):
    assert checked_ptr(torch.zeros(3, 4), torch.float32, 3, 4) and float_ptr(None, 3, 4) is None
    with pytest.raises(TensorMismatch, match="C needs"):
        checked_ptr(tensor, torch.float32, 3, 4)


# --------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("part", [LayerNorm(), RMSNorm()])
def test_a_norm_whose_weight_is_a_strided_view(part):
    torch.manual_seed(0)
    norm = part.build(64)
    norm.reset_parameters()
    for name, parameter in list(norm.named_parameters()):
        wide = torch.randn(128)
        wide[1::2] = 1e6  # what must not be read
        setattr(norm, name, nn.Parameter(wide[::2]))
        assert not getattr(norm, name).is_contiguous() and parameter.shape == (64,)
    x = torch.randn(10, 64, requires_grad=True)
    bias = getattr(norm, "bias", None)
    want = F.layer_norm(x, (64,), norm.weight, bias, norm.eps) if isinstance(norm, nn.LayerNorm) else None
    want = F.rms_norm(x, (64,), norm.weight, norm.eps) if want is None else want
    learned = [x, *norm.parameters()]
    alike(gradients(norm(x), *learned), gradients(want, *learned))


@pytest.mark.parametrize("size", [32, 63, 128])
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_norm_of_another_width_is_torchs_to_refuse(size: int, which: str):
    x, sizes = torch.randn(4, 64, requires_grad=True), {"weight": 64, "bias": 64, which: size}
    weight, bias = torch.ones(sizes["weight"]), torch.ones(sizes["bias"])
    assert not norm_supported(x, weight, bias)
    with pytest.raises(RuntimeError):
        add_norm(x, None, 0.0, weight, bias, 1e-5, centered=True)


def test_a_norm_with_a_bias_of_other_precision_is_left_to_torch():
    assert not norm_supported(torch.randn(4, 64), torch.ones(64), torch.ones(64).double())
    assert not norm_supported(torch.tensor(1.0), torch.ones(1))


# --------------------------------------------------------------------------------------------------------- linear maps


@pytest.fixture
def little_work_too(monkeypatch):
    monkeypatch.setattr("headwater.cpu.linear.MIN_MACS", 1)


def strided(*shape: int) -> nn.Parameter:
    wide = torch.randn(*shape[:-1], 2 * shape[-1])
    wide[..., 1::2] = 1e6
    return nn.Parameter(wide[..., ::2])


def test_a_map_whose_weight_and_bias_are_strided_views(little_work_too):
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    layer.weight, layer.bias = strided(48, 32), strided(48)
    assert linear_supported(x, layer.weight, layer.bias)
    of = x, layer.weight, layer.bias
    alike(gradients(linear(x, layer), *of), gradients(F.linear(x, layer.weight, layer.bias), *of))


@pytest.mark.parametrize(
    "bias", [torch.zeros(47), torch.zeros(16), torch.zeros(48, 48)], ids=lambda b: str(list(b.shape))
)
def test_a_bias_that_does_not_fit_is_torchs_to_refuse(bias: torch.Tensor, little_work_too):
    layer, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    layer.bias = nn.Parameter(bias)
    with pytest.raises(RuntimeError):
        linear(x, layer)


def test_a_bias_of_other_precision_is_torchs_to_judge(little_work_too):
    layer, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    layer.bias = nn.Parameter(torch.ones(48).double())
    assert not linear_supported(x, layer.weight, layer.bias)


def test_two_maps_that_do_not_meet_are_torchs_to_refuse(little_work_too):
    x, up, down = torch.randn(5, 32, requires_grad=True), nn.Linear(32, 48), nn.Linear(64, 32)
    with pytest.raises(RuntimeError):
        feed_forward(x, up, F.relu, 0.0, down)
    up, down = nn.Linear(32, 48), nn.Linear(48, 32)
    down.bias = nn.Parameter(torch.zeros(16))
    with pytest.raises(RuntimeError):
        feed_forward(x, up, F.relu, 0.0, down)


def test_products_of_what_does_not_fit_are_misfits():
    with pytest.raises(TensorMismatch):
        gemm_bias_act(torch.randn(4, 32), torch.randn(48, 16), True)
    with pytest.raises(TensorMismatch):
        gemm_bias_act(torch.randn(4, 32), torch.randn(48, 32), True, torch.randn(32))
    with pytest.raises(TensorMismatch, match="multiples of 16"):
        gemm_bias_act(torch.randn(4, 24), torch.randn(48, 24), True)
    with pytest.raises(TensorMismatch):
        gemm_bias_act(torch.randn(4, 32), torch.randn(48, 32), True, accumulate_into=torch.randn(4, 32))
    with pytest.raises(TensorMismatch):
        linear_grad_weight(torch.randn(4, 32), torch.randn(3, 32))
    with pytest.raises(TensorMismatch):
        linear_grad_input_act(
            torch.randn(4, 32), torch.randn(16, 48), 1, headwater.cpu.linear.NO_DROPOUT, torch.randn(4, 48)
        )


# ----------------------------------------------------------------------------------------------------------- attention


def qkv(q=(2, 4, 5, 16), k=(2, 2, 7, 16), v=None):
    return [torch.randn(shape, requires_grad=True) for shape in (q, k, v or k)]


MISFITS = {
    "values of fewer keys": {"v": (2, 2, 6, 16)},
    "values of another batch": {"v": (1, 2, 7, 16)},
    "values of other heads": {"v": (2, 1, 7, 16)},
    "keys of another batch": {"k": (1, 2, 7, 16)},
    "keys of another width": {"k": (2, 2, 7, 32), "v": (2, 2, 7, 16)},
    "heads that do not divide": {"k": (2, 3, 7, 16)},
    "more keys' heads than queries'": {"k": (2, 8, 7, 16)},
    "no batch": {"q": (4, 5, 16), "k": (2, 7, 16)},
    "nothing": {"k": (2, 2, 0, 16)},
}


@pytest.mark.parametrize("what", MISFITS)
def test_queries_and_keys_that_do_not_fit_do_not_reach_c(what: str):
    q, k, v = qkv(**MISFITS[what])
    assert not attention_supported(q, k, v) and not full_attention_supported(q, k, v, None)
    with pytest.raises(TensorMismatch):
        fused_attention(q, k, v, None, False, 1.0, 0.0)


def test_a_mask_that_does_not_fit_is_refused():
    q, k, v = qkv()
    with pytest.raises(RuntimeError):
        fused_attention(q, k, v, torch.ones(5, 6, dtype=torch.bool), False, 1.0, 0.0)
    assert not full_attention_supported(q, k, v, torch.ones(5, 7, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_of_any_strides(kind: torch.dtype):
    torch.manual_seed(0)
    q, k, v = qkv()
    seen = torch.rand(2, 1, 5, 7) > 0.4
    mask = seen if kind == torch.bool else torch.where(seen, torch.randn(5, 7), -math.inf)
    for given in (mask, mask.transpose(2, 3).contiguous().transpose(2, 3), mask.repeat_interleave(2, 3)[..., ::2]):
        want = F.scaled_dot_product_attention(q, k, v, given, scale=0.3, enable_gqa=True)
        alike(gradients(fused_attention(q, k, v, given, False, 0.3, 0.0), q, k, v), gradients(want, q, k, v))


def test_a_mask_made_again_in_the_backward_pass():
    """A recomputed layer makes its mask anew; the memory of the first one is somebody else's by then."""
    torch.manual_seed(0)
    q, k, v = qkv(q=(1, 2, 300, 16), k=(1, 2, 300, 16))
    seen = torch.rand(300, 300) > 0.4

    def layer(q, k, v):
        return fused_attention(q, k, v, seen & True, False, 0.3, 0.0)

    out = checkpoint(layer, q, k, v, use_reentrant=False)
    elsewhere = [torch.zeros(300, 300, dtype=torch.bool) for _ in range(200)]
    alike(gradients(out, q, k, v), gradients(layer(q, k, v), q, k, v))
    assert len(elsewhere) == 200


# --------------------------------------------------------------------------------------------------- loss and moments


@pytest.mark.parametrize("label", [-1, 50, 2**40, -(2**40)])
def test_a_label_outside_of_the_vocabulary_is_refused(label: int):
    states, weight = torch.randn(3, 8, requires_grad=True), torch.randn(50, 8)
    with pytest.raises(BadInput, match=f"labels must be from 0 to 49, got {label}"):
        chunked_cross_entropy(states, weight, None, torch.tensor([1, label, 2]))
    with pytest.raises(RuntimeError):  # as the formula does
        torch.zeros(3, 50).gather(1, torch.tensor([[1], [label], [2]]))


def test_labels_of_other_precision_or_number_are_misfits():
    for labels in (
        torch.ones(3, dtype=torch.int32),
        torch.ones(2, dtype=torch.long),
        torch.ones(6, dtype=torch.long)[::2],
    ):
        with pytest.raises(TensorMismatch):
            cross_entropy_grad_(torch.randn(3, 50), labels, 0.0)
    with pytest.raises(TensorMismatch):
        cross_entropy_grad_(torch.randn(3, 100)[:, ::2], torch.ones(3, dtype=torch.long), 0.0)


STEP = AdamWParams(1e-3, 0.0, 0.9, 0.99, 1e-8, 10.0, 100.0, 1, 2)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "block_exponents", "gradient"])
def test_moments_of_another_shape_are_misfits(name: str):
    w = torch.randn(1000)
    state = {"gradient": torch.randn(1000), **init_moments(w)}
    state[name] = state[name][: len(state[name]) // 2]
    with pytest.raises(TensorMismatch, match="moments must fit"):
        adamw8bit_step(w, state["gradient"], state["exp_avg"], state["exp_avg_sq"], state["block_exponents"], STEP)


def test_moments_of_another_kind_are_misfits():
    w = torch.randn(1000)
    state = init_moments(w)
    with pytest.raises(TensorMismatch):
        codes = state["exp_avg"].long(), state["exp_avg_sq"], state["block_exponents"]
        adamw8bit_step(w, torch.randn(1000), *codes, STEP)


def test_a_gradient_that_is_a_view_is_the_same_gradient():
    """The copy C reads must live as long as C does."""
    torch.manual_seed(0)
    gradient = torch.randn(700, 600)
    found = []
    for g in (gradient, gradient.t().contiguous().t()):
        w = torch.ones(700, 600)
        state = init_moments(w)
        for _ in range(3):
            adamw8bit_step(w, g, state["exp_avg"], state["exp_avg_sq"], state["block_exponents"], STEP)
        found.append(w)
    assert torch.equal(*found)
