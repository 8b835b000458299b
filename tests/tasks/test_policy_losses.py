"""The formulas of PPO and GRPO against published numbers, and planted faults that change them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.tasks.policy_losses import (
    KLController,
    generalized_advantages,
    group_advantages,
    kl_estimate,
    masked_mean,
    policy_loss,
    sequence_logprobs,
    token_rewards,
    value_loss,
    whiten,
)

MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]], dtype=torch.bool)
REWARDS = torch.tensor([[-0.01, -0.02, 0.03, 1], [-0.02, 0.01, 0.5, 0]], dtype=torch.float64)
VALUES = torch.tensor([[0.2, 0.1, 0.3, 0.4], [0, 0.2, 0.1, 0]], dtype=torch.float64)
NEW = torch.tensor([[-1, -0.8, -1.2, -0.5], [-2, -1, -0.9, 0]], dtype=torch.float64)
OLD = torch.tensor([[-1.1, -1.1, -1, -0.5], [-1.9, -1, -1.3, 0]], dtype=torch.float64)


def close(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def test_advantages_and_returns_have_the_published_numbers():
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK, 1.0, 0.95)
    close(advantages, [[0.69275, 0.845, 0.7, 0.6], [0.4555, 0.29, 0.4, 0]])
    close(returns, [[0.89275, 0.945, 1, 1], [0.4555, 0.49, 0.5, 0]])
    close(whiten(advantages, MASK), [[0.6334, 1.41289, 0.67052, 0.15853], [-0.58128, -1.42862, -0.86544, 0]], 5e-6)


def test_values_read_one_token_late_give_other_advantages():
    """The planted fault: the value of a token is read before it; one place off, nothing is equal."""
    late, _ = generalized_advantages(REWARDS, VALUES.roll(1, 1), MASK, 1.0, 0.95)
    assert not torch.allclose(late, generalized_advantages(REWARDS, VALUES, MASK, 1.0, 0.95)[0], atol=1e-2)


def test_with_all_the_future_the_advantage_is_the_return_minus_the_value():
    """λ = 1: the sum of all later rewards; λ = 0: one step."""
    advantages, _ = generalized_advantages(REWARDS, VALUES, MASK, 1.0, 1.0)
    later = (REWARDS * MASK).flip(1).cumsum(1).flip(1)
    close(advantages, (later - VALUES) * MASK)
    one, _ = generalized_advantages(REWARDS, VALUES, MASK, 0.9, 0.0)
    following = torch.cat([(VALUES * MASK)[:, 1:], torch.zeros(2, 1)], 1)
    close(one, (REWARDS + 0.9 * following - VALUES) * MASK)


def test_whitened_rewards_keep_their_mean():
    advantages, _ = generalized_advantages(REWARDS, VALUES, MASK)
    kept = whiten(advantages, MASK, shift_mean=False)
    close(masked_mean(kept, MASK), masked_mean(advantages, MASK))
    close(kept[MASK].var(), 1.0)
    moved = whiten(advantages, MASK, shift_mean=True)
    assert abs(float(masked_mean(moved, MASK))) < 1e-12  # what would be wrong of rewards
    assert float(moved[1, 3]) == float(kept[1, 3]) == 0


def test_both_losses_have_the_published_numbers():
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK)
    white = whiten(advantages, MASK)
    moved = VALUES + torch.tensor([[0.3, -0.1, 0.05, 0], [0.1, 0.25, -0.3, 0]], dtype=torch.float64)
    policy = masked_mean(policy_loss(NEW, OLD, white, 0.2), MASK)
    value = masked_mean(value_loss(moved, VALUES, returns, 0.2), MASK)
    close(policy, 0.020382)
    close(2 * value, 0.181629 * 2, 2e-6)
    close(policy + 0.1 * value, 0.038545)


def test_the_estimates_of_the_divergence():
    for kind, expected in (("k1", 0.071429), ("k2", 0.022143), ("k3", 0.020364)):
        close(masked_mean(kl_estimate(NEW, OLD, kind), MASK), expected)
    assert bool((kl_estimate(NEW, OLD, "k3") >= 0).all())


@pytest.mark.parametrize(("kl", "expected"), [(3, 0.197952), (6.6, 0.201024), (9, 0.202048)])
def test_beta_follows_the_divergence(kl, expected):
    controller = KLController(0.2, target=6, horizon=10_000)
    controller.update(kl, 512)
    assert abs(controller.beta - expected) < 1e-6
    fixed = KLController(0.2)
    fixed.update(kl, 512)
    assert fixed.beta == 0.2


def test_the_score_stands_at_the_last_token_of_the_answer():
    rewards = token_rewards(torch.tensor([2.0, 3.0]), torch.ones(2, 4), MASK, 0.1)
    close(rewards.double(), [[-0.1, -0.1, -0.1, 1.9], [-0.1, -0.1, 2.9, 0]])


# ---------------------------------------------------------------------------------------------------------------- GRPO


def test_group_advantages_have_the_published_numbers():
    scores = torch.tensor([1.0, 0, 0, 1, 5, 5, 5, 5])
    close(group_advantages(scores, 4).double(), [0.865875, -0.865875, -0.865875, 0.865875, 0, 0, 0, 0])
    close(group_advantages(scores[:4], 4, "none").double(), [0.5, -0.5, -0.5, 0.5])
    close(group_advantages(scores, 4, "batch").double() * (scores.double().std() + 1e-4),
          [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0])  # fmt: skip


def test_an_answer_that_has_no_score_has_no_advantage():
    scores = torch.tensor([1.0, float("nan"), 0.0, float("nan")])
    found = group_advantages(scores, 4)
    assert found[1] == found[3] == 0
    close(found[[0, 2]].double(), [0.70701, -0.70701], 1e-4)


@settings(max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=4, max_size=4), st.floats(-10, 10), st.floats(0.1, 10))
def test_a_group_sees_no_shift_and_hardly_a_scale(scores, shift, scale):
    plain = torch.tensor(scores, dtype=torch.float64)
    close(group_advantages(plain + shift, 4, "none"), group_advantages(plain, 4, "none"), 1e-9)
    close(group_advantages(plain * scale, 4, "none"), scale * group_advantages(plain, 4, "none"), 1e-6)
    assert abs(float(group_advantages(plain, 4).sum())) < 1e-6


def test_the_ratio_is_one_for_the_policy_that_sampled():
    advantages = torch.randn(2, 4, dtype=torch.float64)
    close(policy_loss(OLD, OLD, advantages), -advantages)
    close(sequence_logprobs(OLD, OLD, MASK), OLD)


def test_a_sequence_has_one_ratio():
    ratio = (sequence_logprobs(NEW, OLD, MASK) - OLD)[0]
    close(ratio, [float((NEW - OLD)[0].mean())] * 4)
    assert float((sequence_logprobs(NEW, OLD, MASK) - OLD)[1, 0]) == pytest.approx(0.1)  # its three tokens alone


def test_clipping_stops_what_went_far_enough_and_nothing_else():
    logprobs = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    policy_loss(logprobs, torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0])).sum().backward()
    assert (logprobs.grad == 0).tolist() == [True, False, False, True]
    wider = torch.tensor([0.25], requires_grad=True)
    policy_loss(wider, torch.zeros(1), torch.ones(1), 0.2, 0.4).sum().backward()
    assert float(wider.grad) < 0  # ε high leaves room upwards
