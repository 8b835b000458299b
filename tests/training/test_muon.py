"""Muon: steps along U Vᵀ, of AdamW's size, for the matrices alone; its state is kept like any other."""

import pytest
import torch
from tests.training.toy import learn, small
from torch import nn

from headwater.errors import BadSetting
from headwater.training.config import parse_config
from headwater.training.optim import (
    ADAMW_RMS,
    Muon,
    build_optimizer,
    decay_parameters,
    load_optimizer_state,
    optimizer_state,
    orthogonalize,
)


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32), (3, 48, 16), (1, 8)])
def test_singular_values_become_one_and_singular_vectors_stay(shape):
    torch.manual_seed(0)
    given = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(given, full_matrices=False)
    out = orthogonalize(given)
    inside = u.mT @ out @ v.mT  # diagonal, if the vectors stayed
    values = inside.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(inside, torch.diag_embed(values), atol=1e-9, rtol=0)
    large = s / s.norm(dim=-1, keepdim=True) > 0.01
    assert values[large].min() > 0.72 and values.max() < 1.28


def test_a_plain_gradient_would_be_seen():
    given = torch.diag(torch.tensor([1.0, 0.1, 0.05]))
    assert (
        given.diagonal().min() / given.diagonal().max() < 0.1 < 0.5 < torch.linalg.svdvals(orthogonalize(given)).min()
    )


def test_zero_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(4, 8)), torch.zeros(4, 8))


def settings(**more):
    return parse_config({"optimizer": "muon", "weight_decay": 0.1, **more})


def test_a_first_step_is_the_formula():
    model, lr = small(), 0.01
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, lr, settings())
    assert isinstance(optimizer, Muon)
    nn.functional.cross_entropy(model(torch.arange(11)), torch.arange(11)).backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, p in model.named_parameters():
        if name in decay_parameters(model):  # momentum and Nesterov scale the first gradient, and scale is taken out
            step = orthogonalize(grads[name]) * ADAMW_RMS * max(p.shape) ** 0.5
            torch.testing.assert_close(p.detach(), before[name] * (1 - lr * 0.1) - lr * step, atol=1e-6, rtol=1e-5)
        else:  # AdamW's first step is lr · sign(gradient)
            moved = grads[name].abs() > 1e-6
            torch.testing.assert_close(
                (before[name] - p.detach())[moved], lr * grads[name].sign()[moved], atol=1e-5, rtol=1e-3
            )
    assert decay_parameters(model) == {"inner.weight", "out.weight"}  # fmt: skip


def test_it_learns():
    assert learn(small(), build_optimizer(small(), 0.01, settings()), 1) > 2  # the other model's: nothing moves
    model = small()
    assert learn(model, build_optimizer(model, 0.02, settings()), 150) < 0.1


def test_its_state_goes_on_as_if_never_stopped():
    one, two = small(), small()
    first = build_optimizer(one, 0.01, settings())
    learn(one, first, 3)
    kept = {name: t.clone() for name, t in optimizer_state(first, one).items()}
    assert "exp_avg:inner.weight" in kept and "exp_avg_sq:inner.weight" not in kept and "exp_avg_sq:norm.weight" in kept
    two.load_state_dict(one.state_dict())
    second = build_optimizer(two, 0.01, settings())
    load_optimizer_state(second, two, kept)
    learn(one, first, 3, seed=3)
    learn(two, second, 3, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_what_cannot_be_is_said():
    with pytest.raises(BadSetting, match="no optimizer is called 'muom'; did you mean 'muon'"):
        build_optimizer(small(), 0.01, settings(optimizer="muom"))
    with pytest.raises(BadSetting, match="muon needs full matrices, and fsdp shards them"):
        build_optimizer(small(), 0.01, settings(fsdp=True))
