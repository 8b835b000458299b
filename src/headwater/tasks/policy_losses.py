"""Formulas of PPO (Schulman et al. 2017) and GRPO (Shao et al. 2024) for text, on answers [B, T] and their mask.

A token is an action, the text before it the state. All tensors are [B, T]; mask is True for the tokens of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

VARIANCE_EPS = 1e-8
GROUP_EPS = 1e-4
KL_ERROR_LIMIT = 0.2  # of the adaptive controller: the largest relative error that it reacts to


# ------------------------------------------------------------------------------------------------ KL divergence


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: str = "k1") -> Tensor:
    """Estimates of KL(policy ‖ reference) per token, from tokens of the policy (Schulman 2020); d = logp - ref.

    k1 = d is unbiased; k2 = d²/2 has less variance; k3 = e⁻ᵈ - 1 + d has both, and is never negative.
    """
    difference = logprobs - reference
    if kind == "k1":
        return difference
    return difference**2 / 2 if kind == "k2" else torch.exp(-difference) - 1 + difference


@dataclass
class KLController:
    """The coefficient β of the KL penalty: fixed, or adapted so that the divergence stays near a target.

    β ← β · (1 + clip(KL / target - 1, ±0.2) · n / horizon) after n answers (Ziegler et al. 2019).
    """

    beta: float
    target: float = 0.0  # nats per answer; 0: fixed
    horizon: float = 10_000.0

    def update(self, kl: float, num_answers: int) -> None:
        """Adapt to the mean divergence of an answer."""
        if not self.target:
            return
        error = min(KL_ERROR_LIMIT, max(-KL_ERROR_LIMIT, kl / self.target - 1))
        self.beta *= 1 + error * num_answers / max(self.horizon, 1.0)


# ---------------------------------------------------------------------------------------------------- advantages


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of all answers."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Variance 1 (unbiased) over the tokens of all answers, and mean 0 where shift_mean; 0 elsewhere."""
    mean = masked_mean(values, mask)
    variance = ((values - mean) ** 2 * mask).sum() / (mask.sum() - 1).clamp(min=1)
    white = (values - mean) * torch.rsqrt(variance + VARIANCE_EPS)
    return (white if shift_mean else white + mean) * mask


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """The reward of each token: -β · KL, and at the last token of an answer its score [B] as well."""
    rewards = -beta * kl * mask
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = (mask * (positions + 1)).argmax(1)
    rewards[torch.arange(len(rewards)), last] += scores
    return rewards


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, discount: float = 1.0, decay: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016): advantages, and returns = advantages + values.

    A[t] = δ[t] + γλ A[t+1] with δ[t] = r[t] + γ V[t+1] - V[t]; after the end of an answer both are 0.
    """
    advantages = torch.zeros_like(rewards)
    following_advantage = torch.zeros_like(rewards[:, 0])
    following_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + discount * following_value - values[:, t]
        following_advantage = (delta + discount * decay * following_advantage) * mask[:, t]
        following_value = values[:, t] * mask[:, t]
        advantages[:, t] = following_advantage
    return advantages, (advantages + values) * mask


def group_advantages(scores: Tensor, group_size: int, scale: str = "group") -> Tensor:
    """GRPO: r - mean of its group, over its standard deviation. scores [B], groups one after the other.

    NaN scores have no advantage and do not count. scale: group, batch (one deviation for all) or none.
    """
    groups = scores.view(-1, group_size)
    known = ~groups.isnan()
    count = known.sum(1, keepdim=True)
    centered = torch.where(known, groups - groups.nansum(1, keepdim=True) / count.clamp(min=1), 0.0)
    if scale == "group":
        deviation = (centered.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        centered = centered / (deviation + GROUP_EPS)
    elif scale == "batch":
        rewards = scores[~scores.isnan()]
        centered = centered / (rewards.std() + GROUP_EPS if len(rewards) > 1 else 1.0)
    return centered.flatten()


# -------------------------------------------------------------------------------------------------------- losses


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip: float = 0.2, clip_high: float | None = None
) -> Tensor:
    """The clipped objective per token: max(-A ratio, -A clip(ratio, 1 - ε, 1 + ε high)), ratio = π / π old."""
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float = 0.2) -> Tensor:
    """½ max((V - R)², (clip(V, V old ± ε) - R)²) per token: a value moves by at most ε in one batch."""
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2


def sequence_logprobs(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO (Zheng et al. 2025): log-probabilities whose ratio is one for a whole answer, the mean over its tokens."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    mean = ((logprobs - old_logprobs) * mask).sum(1, keepdim=True) / lengths
    return old_logprobs + mean.expand_as(logprobs)
