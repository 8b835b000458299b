"""Each schedule has its stated shape, and the optimizer its stated groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headwater.errors import BadFile, BadSetting
from headwater.families.builders import decoder
from headwater.training.config import TrainConfig, parse_config
from headwater.training.optim import EMA, build_optimizer, decay_parameters, load_optimizer_state, optimizer_state
from headwater.training.schedules import (
    SCHEDULES,
    ConstantSchedule,
    CosineSchedule,
    InverseSqrtSchedule,
    LinearSchedule,
    NoamSchedule,
    build_schedule,
)


def test_noam_is_the_papers_formula():
    for step in (1, 10, 3999, 4000, 4001, 100_000):
        assert NoamSchedule(512).at(step) == pytest.approx(512**-0.5 * min(step**-0.5, step * 4000**-1.5))


def test_noam_and_cosine_are_two_things():
    assert NoamSchedule(512, 10).at(1000) != pytest.approx(
        CosineSchedule(NoamSchedule(512, 10).at(10), 10, 1000).at(1000)
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_rises_straight_to_its_peak(name):
    made = build_schedule(TrainConfig(schedule=name, lr=2.0, warmup=10, max_steps=100, d_model=64))
    rates = [made.at(s) for s in range(1, 101)]
    assert max(rates) == pytest.approx(rates[9])
    for step in range(1, 11):
        assert rates[step - 1] == pytest.approx(step / 10 * rates[9])
    assert all(b <= a * (1 + 1e-12) for a, b in zip(rates[9:], rates[10:], strict=False))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_warm_up_is_allowed(name):
    assert build_schedule(TrainConfig(schedule=name, lr=2.0, warmup=0, max_steps=100, d_model=64)).at(1) > 0


def test_the_ends():
    assert CosineSchedule(1.0, 0, 100).at(50) == pytest.approx(0.5)
    assert (
        CosineSchedule(1.0, 0, 100, min_lr_ratio=0.1).at(100)
        == LinearSchedule(1.0, 0, 100, min_lr_ratio=0.1).at(100)
        == pytest.approx(0.1)
    )
    assert LinearSchedule(1.0, 10, 110).at(60) == pytest.approx(0.5)
    assert InverseSqrtSchedule(1.0, 4).at(16) == pytest.approx(0.5)
    assert ConstantSchedule(0.3).at(10**9) == 0.3
    assert CosineSchedule(1.0, 0, 100).at(500) == 0 and math.isfinite(LinearSchedule(1.0, 200, 100).at(150))


def test_an_unknown_schedule_is_refused_with_the_nearest():
    with pytest.raises(BadSetting, match="did you mean 'cosine'"):
        build_schedule(TrainConfig(schedule="cosin"))
    with pytest.raises(BadSetting, match="peak must be above 0"):
        ConstantSchedule(0.0)


def small():
    return decoder(17, d_model=8, heads=2, layers=1, d_ff=16, norm_position="pre", dropout=0.0).build(seed=0)


def test_matrices_decay_and_biases_norms_and_tables_do_not():
    chosen = decay_parameters(small())
    assert "decoder.layers.0.self_attn.q.weight" in chosen and "decoder.layers.0.ffn.up.weight" in chosen
    assert not [n for n in chosen if "bias" in n or "norm" in n or "embed" in n or n.startswith("head.out")]


def train(model, optimizer, steps, seed=0):
    for step in range(steps):
        ids = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(seed + step))
        model(ids).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


USUAL = parse_config({"weight_decay": 0.1})


def test_the_state_by_path_goes_on_as_if_never_stopped():
    one = small()
    first = build_optimizer(one, 1e-2, USUAL)
    train(one, first, 3)
    kept = {n: t.clone() for n, t in optimizer_state(first, one).items()}
    two = small()
    two.load_state_dict(one.state_dict())
    second = build_optimizer(two, 1e-2, USUAL)
    load_optimizer_state(second, two, kept)
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, 3, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_lost_state_would_be_seen():
    one, two = small(), small()
    first = build_optimizer(one, 1e-2, USUAL)
    train(one, first, 3)
    two.load_state_dict(one.state_dict())
    second = build_optimizer(two, 1e-2, USUAL)
    for model, optimizer in ((one, first), (two, second)):
        train(model, optimizer, 3, seed=3)
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_strangers_state_is_refused():
    one = small()
    first = build_optimizer(one, 1e-2, USUAL)
    train(one, first, 1)
    other = decoder(17, d_model=8, heads=2, layers=2, d_ff=32, norm_position="pre").build(seed=0)
    with pytest.raises(BadFile, match="optimizer state"):
        load_optimizer_state(build_optimizer(other, 1e-2, USUAL), other, optimizer_state(first, one))
    with pytest.raises(BadFile, match="must belong to this model"):
        load_optimizer_state(first, one, {**optimizer_state(first, one), "step:stranger": torch.zeros(1)})


def test_the_average_follows_its_law_and_gives_the_weights_back():
    model = nn.Linear(2, 1)
    average = EMA(model, 0.9)
    seen = model.weight.detach().clone()
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(1.0)
        share = 1 - min(0.9, (1 + step) / (10 + step))
        seen = seen.lerp(model.weight.detach(), share)
        average.update(model, step)
    own = model.weight.detach().clone()
    with average.swapped_in(model):
        torch.testing.assert_close(model.weight.detach(), seen)
    assert torch.equal(model.weight, own)
    nothing = EMA(model, 0.0)
    with nothing.swapped_in(model):
        assert torch.equal(model.weight, own)
