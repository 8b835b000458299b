"""AdamW with moments of eight bits: codes that are right on average, steps that are AdamW's, a state that goes on."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.training.toy import learn, small
from torch import nn
from torch.optim import AdamW

from headwater.cpu import adamw8bit
from headwater.cpu.adamw8bit import (
    BLOCK_SIZE,
    AdamWParams,
    adamw8bit_step,
    dequantize_moments,
    init_moments,
    quantize_moments,
)
from headwater.cpu.build import training_library
from headwater.errors import BadFile, BadSetting
from headwater.training.config import parse_config
from headwater.training.optim import build_optimizer, load_optimizer_state, optimizer_state


def a_step(number, lr=1e-3):
    by = [1 / (1 - beta**number) for beta in (0.9, 0.98)]
    return AdamWParams(lr, 0.01, 0.9, 0.98, 1e-9, *by, number * 7919 % 2**32, number * 104_729 % 2**32)


def spread(n, seed=0):
    """Numbers of many sizes, some zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=draw) * 10 ** (4 * torch.rand(n, generator=draw) - 4)
    x[::17] = 0
    return x


@hypothesis_settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 1000), seed=st.integers(0, 99))
def test_a_code_is_within_an_eighth_and_its_sign_stays(n, seed):
    m = spread(n, seed)
    v = m * m
    back_m, back_v = dequantize_moments(*quantize_moments(m, v, a_step(seed + 1)))
    largest = (
        torch.nn.functional.pad(m.abs(), (0, -n % BLOCK_SIZE))
        .view(-1, BLOCK_SIZE)
        .amax(1)
        .repeat_interleave(BLOCK_SIZE)[:n]
    )
    seen = m.abs() > largest * 2.0**-15
    assert ((back_m - m).abs() <= m.abs() / 8 + 1e-30)[seen].all()
    assert ((back_v - v).abs() <= v / 8 + 1e-38)[seen].all()
    assert torch.equal(back_m[seen].sign(), m[seen].sign())
    assert ((back_v > 0) == (v > 0)).all()  # a v that became nothing would make a step without bounds


def test_on_average_a_code_is_exact():
    m = spread(2000)
    total, times = torch.zeros(2, 2000), 3000
    for i in range(times):
        total += torch.stack(
            dequantize_moments(
                *quantize_moments(m, m * m, AdamWParams(first=i * 2_654_435_761 % 2**32, second=i * 40_503 % 2**32))
            )
        )
    large = m.abs() > 1e-3
    for mean, exact in zip(total / times, (m, m * m), strict=True):
        assert (mean / exact - 1)[large].abs().max() < 0.01 and (mean / exact - 1)[large].mean().abs() < 5e-4


def test_rounding_down_always_would_be_seen(monkeypatch):
    """The planted fault: without chance a code is too small on average, and slow changes are lost."""
    monkeypatch.setattr(adamw8bit, "counter_hash", lambda count, *words: torch.zeros(count, dtype=torch.long))
    m = spread(2000)
    large = m.abs() > 1e-3
    assert (dequantize_moments(*quantize_moments(m, m * m, a_step(1)))[0] / m - 1)[large].mean() < -0.02


@pytest.mark.skipif(training_library() is None, reason="nothing is compiled here")
@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_the_c_is_the_formula(n, monkeypatch):
    def run(steps):
        w = spread(n, 1)
        state = init_moments(w)
        for i in range(1, steps + 1):
            adamw8bit_step(w, spread(n, i), *state.values(), a_step(i))
        return w, dequantize_moments(*state.values())

    ours = run(5)
    monkeypatch.setattr(adamw8bit, "supported", lambda *tensors: False)
    theirs = run(5)
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):  # a sum on the edge of a code may fall to either side
        assert ((one - other).abs() <= other.abs() / 4).all() and (one != other).float().mean() < 0.01


def settings(**more):
    return parse_config({"optimizer": "adamw8", "weight_decay": 0.1, **more})


def test_a_first_step_is_that_of_adamw_and_later_ones_stay_near():
    one, two = small(), small()
    ours, theirs = build_optimizer(one, 0.01, settings()), build_optimizer(two, 0.01, settings(optimizer="adamw"))
    assert isinstance(theirs, AdamW) and ours.state[one.inner.weight]["exp_avg"].dtype == torch.uint8
    learn(one, ours, 1), learn(two, theirs, 1)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)  # the first is computed before anything is rounded
    for number in range(30):
        last = learn(one, ours, 1, number), learn(two, theirs, 1, number)
    assert abs(last[0] - last[1]) < 0.05 * last[1]


def test_it_learns():
    model = small()
    assert learn(model, build_optimizer(model, 0.02, settings()), 200) < 0.1


def test_its_state_goes_on_as_if_never_stopped():
    one, two = small(), small()
    first = build_optimizer(one, 0.01, settings())
    learn(one, first, 3)
    kept = {name: t.clone() for name, t in optimizer_state(first, one).items()}
    two.load_state_dict(one.state_dict())
    second = build_optimizer(two, 0.01, settings())
    load_optimizer_state(second, two, kept)
    learn(one, first, 3, seed=3), learn(two, second, 3, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_its_state_is_a_quarter():
    model = nn.Linear(512, 512)
    sizes = {
        method: sum(
            t.nbytes for t in optimizer_state(build_optimizer(model, 0.01, settings(optimizer=method)), model).values()
        )
        for method in ("adamw", "adamw8")
    }
    assert sizes["adamw8"] < 0.26 * sizes["adamw"]


def test_what_cannot_be_is_said():
    with pytest.raises(BadSetting, match="adamw8 needs full tensors, and fsdp shards them"):
        build_optimizer(small(), 0.01, settings(fsdp=True))
    model = small()
    codes_of = optimizer_state(build_optimizer(model, 0.01, settings()), model)
    for method in ("adamw", "muon"):
        with pytest.raises(BadFile, match="must be of this optimizer; resume with the one the run began with"):
            load_optimizer_state(build_optimizer(model, 0.01, settings(optimizer=method)), model, codes_of)
