"""Draws are exact, independent of each other, and a function of (seed, step, token) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater import rng
from headwater.errors import BadSetting
from headwater.rng import allowed_tokens, check_seed, fork_seed, gumbel_noise

SCORES = torch.tensor([0.0, 1.0, -torch.inf, 2.5, -1.0, 1.0])


def surprise(counts, expected):
    """Chi-square, as how many standard deviations above its mean."""
    seen = expected > 0
    assert not counts[~seen].any()
    square = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    free = seen.sum() - 1
    return (square - free) / (2 * free) ** 0.5


def draw(scores, seed, step):
    (tokens,) = allowed_tokens(scores[None])
    return rng.gumbel_max(scores, tokens, seed, step)


def counted(draws):
    return np.bincount(draws, minlength=len(SCORES)).astype(float)


def test_draws_follow_the_softmax():
    many = 2500
    expected = SCORES.double().softmax(-1).numpy() * many
    assert surprise(counted([draw(SCORES, seed, 0) for seed in range(many)]), expected) < 4
    assert surprise(counted([draw(SCORES, 0, step) for step in range(many)]), expected) < 4
    assert surprise(counted([draw(SCORES / 1.4, seed, 0) for seed in range(many)]), expected) > 4, "the test can fail"


def test_draws_are_independent():
    pairs = np.array([[draw(SCORES, seed, step) for step in (0, 1)] for seed in range(2500)])
    share = SCORES.double().softmax(-1).numpy()
    both = np.zeros((6, 6))
    np.add.at(both, (pairs[:, 0], pairs[:, 1]), 1)
    assert surprise(both.ravel(), np.outer(share, share).ravel() * 2500) < 4


def test_noise_belongs_to_a_token_whoever_else_is_there():
    whole = gumbel_noise(1, 2, np.arange(50))
    assert np.array_equal(whole[[7, 3]], gumbel_noise(1, 2, np.array([7, 3])))
    assert not np.array_equal(whole, gumbel_noise(1, 3, np.arange(50))) and not np.array_equal(
        whole, gumbel_noise(2, 2, np.arange(50))
    )
    assert np.isfinite(gumbel_noise(0, 0, np.arange(10_000))).all()


def test_what_is_left_of_each_row():
    never = -torch.inf
    scores = torch.tensor([[0.0, never, 1.0], [never, never, never], [never, 2.0, never]])
    assert [row.tolist() for row in allowed_tokens(scores)] == [[0, 2], [], [1]]


def test_branches_differ_and_the_first_is_the_seed():
    seeds = [fork_seed(7, i) for i in range(100)]
    assert seeds[0] == 7 and len(set(seeds)) == 100 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None, "0"])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(BadSetting, match="seed must be an integer from 0 below"):
        check_seed(seed)
