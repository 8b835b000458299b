"""The number of threads changes nothing: every kernel of training gives the same bits with 1, 2, 3, 4 and 8 threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.banded import Band, LeadingKeys
from headwater.core.functional import add_dropout, add_norm, banded_attention, feed_forward, linears
from headwater.cpu import build
from headwater.cpu.adamw8bit import AdamWParams, adamw8bit_step, init_moments
from headwater.cpu.attention import KeyRules, fused_attention, fused_banded_attention
from headwater.cpu.build import training_library
from headwater.cpu.favor import fused_favor
from headwater.cpu.linear import MIN_MACS
from headwater.cpu.linear_attention import fused_linear_attention
from headwater.cpu.loss import cross_entropy_grad_
from headwater.cpu.lsh_attention import SortedChunks, fused_lsh_attention

pytestmark = pytest.mark.skipif(
    training_library() is None, reason=f"nothing is compiled here: {build.unavailable_reason()}"
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def with_gradients(out: Tensor, *inputs: Tensor) -> Tensor:
    """The result and the gradients of all inputs as one row of numbers."""
    gradients = torch.autograd.grad(out, inputs, drawn(*out.shape, seed=9).detach())
    return torch.cat([t.detach().flatten() for t in (out, *gradients)])


@pytest.mark.parametrize("masked", ["no", "causal", "window", "padding", "bias"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention(masked: str, kv_heads: int, same_bits):
    q, k, v = drawn(3, 4, 150, 32), drawn(3, kv_heads, 150, 32, seed=1), drawn(3, kv_heads, 150, 32, seed=2)
    padding = torch.arange(150) < torch.tensor([150, 90, 17]).view(3, 1, 1, 1)
    mask = {"padding": padding, "bias": drawn(1, 4, 150, 150, seed=3).detach()}.get(masked)

    def run() -> Tensor:
        torch.manual_seed(5)
        if masked == "window":
            return with_gradients(fused_banded_attention(q, k, v, KeyRules(39, 0), 0.2, 0.1), q, k, v)
        return with_gradients(fused_attention(q, k, v, mask, masked == "causal", 0.2, 0.1), q, k, v)

    same_bits(run)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_banded_attention(kv_heads: int, same_bits):
    """Several spans, leading keys, random blocks, padding: the gradients of all keys are sums over queries."""
    band, keys = Band(1, 1, block=64), 1280
    q, k, v = drawn(1, 2, keys, 16), drawn(1, kv_heads, keys, 16, seed=1), drawn(1, kv_heads, keys, 16, seed=2)
    leading = LeadingKeys(drawn(1, kv_heads, 5, 16, seed=3), drawn(1, kv_heads, 5, 16, seed=4))
    blocks = torch.randint(20, (2, 20, 2), generator=torch.Generator().manual_seed(5))
    given = {"key_mask": torch.arange(keys)[None] % 7 > 0, "leading": leading, "random_blocks": blocks}

    def run() -> Tensor:
        torch.manual_seed(5)
        out = banded_attention(q, k, v, band, 0.3, 0.1, **given)
        return with_gradients(out, q, k, v, leading.k, leading.v)

    same_bits(run)


def test_the_bias_of_distances(same_bits):
    q, k, v, bias = (
        drawn(3, 4, 150, 16),
        drawn(3, 4, 150, 16, seed=1),
        drawn(3, 4, 150, 16, seed=2),
        drawn(4, 21, seed=3),
    )
    same_bits(lambda: with_gradients(banded_attention(q, k, v, Band(10, 10), 0.3, distance_bias=bias), q, k, v, bias))


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_linear_attention(kv_heads: int, same_bits):
    q, k, v = drawn(3, 4, 150, 32), drawn(3, kv_heads, 150, 32, seed=1), drawn(3, kv_heads, 150, 32, seed=2)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    ids = torch.arange(150).expand(3, 150) // 40

    def run() -> Tensor:
        out, state = fused_linear_attention(q, k, v, None, None, ids, 1e-6)
        gradients = torch.autograd.grad(out.square().sum() + state[0].sum(), inputs)
        return torch.cat([t.detach().flatten() for t in (out, *state, *gradients)])

    same_bits(run)


@pytest.mark.parametrize("causal", [True, False])
def test_favor(causal: bool, same_bits):
    q, k, v = drawn(3, 4, 150, 32), drawn(3, 2, 150, 32, seed=1), drawn(3, 2, 150, 32, seed=2)
    directions = drawn(48, 32, seed=3).detach()
    same_bits(lambda: with_gradients(fused_favor(q, k, v, directions, causal, 0.2, 1e-4, None, None)[0], q, k, v))


def test_lsh_attention(same_bits):
    qk, v = drawn(3, 4, 160, 32), drawn(3, 4, 160, 32, seed=1)
    draws = torch.rand(3, 4, 2, 160, generator=torch.Generator().manual_seed(2))
    chunks = SortedChunks(32, 1, 1, 2, True, -1e5)

    def run() -> Tensor:
        torch.manual_seed(5)
        return with_gradients(
            fused_lsh_attention(qk, v, draws.argsort(-1).flatten(2), chunks, None, 0.2, 1e-6, 0.1), qk, v
        )

    same_bits(run)


def test_dropout_added(same_bits):
    x, y = drawn(500, 300), drawn(500, 300, seed=1)

    def run() -> Tensor:
        torch.manual_seed(5)
        return with_gradients(add_dropout(x, y, 0.1), x, y)

    same_bits(run)


@pytest.mark.parametrize("centred", [True, False])
def test_norm_of_a_sum(centred: bool, same_bits):
    x, y, weight, bias = drawn(700, 128), drawn(700, 128, seed=1), drawn(128, seed=2), drawn(128, seed=3)

    def run() -> Tensor:
        torch.manual_seed(5)
        return with_gradients(
            add_norm(x, y, 0.1, weight, bias if centred else None, 1e-5, centred),
            *(x, y, weight, bias)[: 4 if centred else 3],
        )

    same_bits(run)


@pytest.mark.parametrize("rows", [385, 600])
def test_linear_maps(rows: int, same_bits):
    torch.manual_seed(3)
    layers, x = [nn.Linear(608, 320), nn.Linear(608, 192)], drawn(rows, 608)
    assert rows * 608 * 192 >= MIN_MACS

    def run() -> Tensor:
        return with_gradients(torch.cat(list(linears(x, *layers)), -1), x, *(p for m in layers for p in m.parameters()))

    same_bits(run)


@pytest.mark.parametrize("act", [F.relu, F.gelu])
def test_feed_forward(act, same_bits):
    torch.manual_seed(3)
    up, down, x = nn.Linear(256, 608), nn.Linear(608, 256), drawn(430, 256)

    def run() -> Tensor:
        torch.manual_seed(5)
        return with_gradients(feed_forward(x, up, act, 0.1, down), x, *nn.ModuleList([up, down]).parameters())

    same_bits(run)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(smoothing: float, same_bits):
    scores, labels = drawn(333, 1003).detach(), torch.arange(333)

    def run() -> Tensor:
        mine = scores.clone()
        return torch.cat(
            [torch.tensor([cross_entropy_grad_(mine, labels, smoothing)], dtype=torch.float64), mine.double().flatten()]
        )

    same_bits(run)


def test_adamw8(same_bits):
    def run() -> Tensor:
        weight, states = drawn(70_001).detach(), init_moments(drawn(70_001))
        for step in range(3):
            gradient = drawn(70_001, seed=step).detach()
            adamw8bit_step(
                weight, gradient, *states.values(), AdamWParams(1e-3, 0.1, 0.9, 0.99, 1e-8, 2.0, 3.0, 1 + step, 7)
            )
        return torch.cat([weight, *(state.flatten().float() for state in states.values())])

    same_bits(run)
