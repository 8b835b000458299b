"""Linear layers of int8 rows: C equals the formula, both are near the floats, the native decoder takes such a head."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwater.cpu.int8 import int8_linear, int8_linear_supported, quantize_rows
from headwater.families.builders import transformer
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder
from headwater.quantization.int8 import Int8Linear, quantize_int8


def layer(inputs: int = 96, outputs: int = 70, bias: bool = True) -> tuple[nn.Linear, Int8Linear]:
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias)
    return linear, Int8Linear(linear.weight, linear.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (2, 300, 96)])
@torch.no_grad()
def test_c_equals_the_formula_and_is_near_the_floats(bias, shape):
    linear, quantized = layer(bias=bias)
    x = torch.randn(shape) * torch.rand(shape[:-1])[..., None] * 10
    ours = quantized(x)
    assert torch.allclose(ours, quantized._in_torch(x.reshape(-1, 96)).view(ours.shape), atol=1e-4)
    error = (ours - linear(x)).norm() / linear(x).norm()
    assert 1e-4 < error < 0.02


@pytest.mark.parametrize("columns", [64, 192])
@pytest.mark.parametrize("outputs", [1, 16, 33, 70])
@torch.no_grad()
def test_any_number_of_rows(columns, outputs):
    """Few rows and many are computed by different loops, in tiles of which the last is not full: the sums are exact."""
    _linear, quantized = layer(columns, outputs)
    for rows in (*range(1, 15), 24, 25, 61):
        x = quantize_rows(torch.randn(rows, columns))
        product = x.values.long() @ quantized.quantized.long().t()
        expected = product * (x.scale[:, None] * quantized.scale) + quantized.bias
        assert torch.equal(x.sum.long(), x.values.long().sum(1))
        if int8_linear_supported(columns):
            assert torch.allclose(int8_linear(x, quantized.quantized, quantized.scale, quantized.bias), expected)
            without = int8_linear(x, quantized.quantized, quantized.scale, None)
            assert torch.allclose(without, expected - quantized.bias, atol=1e-6)
            moved = int8_linear(x._replace(sum=x.sum + 1), quantized.quantized, quantized.scale, quantized.bias)
            assert not torch.allclose(moved, expected)  # a planted fault: another sum


@torch.no_grad()
def test_the_largest_values_do_not_overflow():
    if not int8_linear_supported(65536):
        pytest.skip("this processor has no AVX-512 VNNI: torch multiplies")
    ones = torch.full((9, 65536), 1.0)
    x = quantize_rows(ones)
    for sign in (1, -1):
        y = int8_linear(x, (127 * sign * ones[:2]).to(torch.int8), torch.full((2,), 1 / 127), None)
        assert torch.allclose(y, torch.full((9, 2), 65536.0 * sign))


@torch.no_grad()
def test_a_wrong_scale_would_be_seen():
    linear, quantized = layer()
    x = torch.randn(40, 96)
    quantized.scale *= 1.1
    assert (quantized(x) - linear(x)).norm() / linear(x).norm() > 0.05


@torch.no_grad()
def test_zero_rows_and_nan():
    _linear, quantized = layer()
    x = torch.randn(3, 96)
    x[1] = 0
    x[2, 7] = torch.nan
    y = quantized(x)
    assert torch.equal(y[1], quantized.bias)
    assert y[2].isnan().all()
    assert y[:2].isfinite().all()


@pytest.mark.parametrize("rows", [3, 200])
def test_with_any_number_of_threads(rows, same_bits):
    _linear, quantized = layer(384, 512)
    x = torch.randn(rows, 384)
    with torch.no_grad():
        same_bits(lambda: quantized(x))


@torch.no_grad()
def test_the_native_decoder_leaves_such_a_head_to_its_module():
    model = transformer(64, 64, d_model=32, heads=2, layers=1, dropout=0.0).build(seed=0).eval()
    assert quantize_int8(model, ("head.out",)) == ["head.out"]
    source = torch.randint(1, 64, (1, 9))
    native = NativeDecoder.try_build(model)
    assert native is not None
    cache = BatchKVCache(model, [0])
    cache.set_encoder_output(model.encode(source))
    ours = native.forward(cache, [[3, 4, 5]], 3)
    theirs = model(torch.tensor([[3, 4, 5]]), source=source)[0]
    assert torch.allclose(ours, theirs, atol=0.05)
