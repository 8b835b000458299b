"""Losses of preference pairs: DPO (Rafailov et al. 2023) and its variants, and the Bradley-Terry loss of reward models.

Each is a value per pair. c and r are the log-probabilities of the chosen and the rejected answer, summed over their
tokens; ref those of the reference model; |c| and |r| the numbers of tokens; a = c - ref c, b = r - ref r, δ = a - b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class PairLogprobs:
    """Log-probabilities of pairs, all [B]: of the model, of the reference, and the lengths of the answers."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_length: Tensor
    rejected_length: Tensor

    @property
    def chosen_ratio(self) -> Tensor:
        """a: how much likelier the chosen answer has become."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratio(self) -> Tensor:
        """b: how much likelier the rejected answer has become."""
        return self.rejected - self.reference_rejected

    @property
    def chosen_mean(self) -> Tensor:
        return self.chosen / self.chosen_length

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_length


@dataclass(frozen=True)
class LossSettings:
    """beta: the strength of the reference; smoothing: the fraction of pairs that are the wrong way round.

    rpo_alpha: the weight of the negative log-likelihood of the chosen answer, beside any of the losses.
    """

    beta: float = 0.1
    smoothing: float = 0.0
    simpo_margin: float = 0.5
    rpo_alpha: float = 0.0


def sigmoid_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """DPO: -(1 - ε) log σ(βδ) - ε log σ(-βδ); with ε > 0 conservative DPO."""
    logits = settings.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    return -(1 - settings.smoothing) * F.logsigmoid(logits) - settings.smoothing * F.logsigmoid(-logits)


def robust_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024): (-(1 - ε) log σ(βδ) + ε log σ(-βδ)) / (1 - 2ε), unbiased under noise."""
    logits = settings.beta * (pairs.chosen_ratio - pairs.rejected_ratio)
    epsilon = settings.smoothing
    return (-(1 - epsilon) * F.logsigmoid(logits) + epsilon * F.logsigmoid(-logits)) / (1 - 2 * epsilon)


def hinge_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """SLiC (Zhao et al. 2023): max(0, 1 - βδ)."""
    return torch.relu(1 - settings.beta * (pairs.chosen_ratio - pairs.rejected_ratio))


def ipo_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """IPO (Azar et al. 2023): (a / |c| - b / |r| - 1 / 2β)²."""
    difference = pairs.chosen_ratio / pairs.chosen_length - pairs.rejected_ratio / pairs.rejected_length
    return (difference - 1 / (2 * settings.beta)) ** 2


def simpo_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """SimPO (Meng et al. 2024), without a reference: -log σ(β (c / |c| - r / |r|) - margin)."""
    difference = pairs.chosen_mean - pairs.rejected_mean
    return -F.logsigmoid(settings.beta * difference - settings.simpo_margin)


def orpo_loss(pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """ORPO (Hong et al. 2024), without a reference: -c / |c| - β log σ(log odds(c / |c|) - log odds(r / |r|))."""
    return -pairs.chosen_mean + settings.beta * odds_ratio_loss(pairs)


def odds_ratio_loss(pairs: PairLogprobs) -> Tensor:
    """-log σ of the difference of the log odds; log odds(x) = x - log(1 - eˣ)."""
    chosen_odds, rejected_odds = (x - log1mexp(x) for x in (pairs.chosen_mean, pairs.rejected_mean))
    return -F.logsigmoid(chosen_odds - rejected_odds)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - eˣ) of x <= 0, exact near 0."""
    x = x.clamp(max=-1e-7)
    return torch.where(x > -0.6931, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center: float = 0.0) -> Tensor:
    """Reward model: -log σ(r chosen - r rejected - margin) + center · (r chosen + r rejected)²."""
    return -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of pairs. default_beta: its usual β."""

    function: Callable[[PairLogprobs, LossSettings], Tensor]
    default_beta: float = 0.1
    needs_reference: bool = True


PREFERENCE_LOSSES = {
    "sigmoid": PreferenceLoss(sigmoid_loss),
    "ipo": PreferenceLoss(ipo_loss),
    "hinge": PreferenceLoss(hinge_loss),
    "robust": PreferenceLoss(robust_loss),
    "simpo": PreferenceLoss(simpo_loss, default_beta=2.0, needs_reference=False),
    "orpo": PreferenceLoss(orpo_loss, needs_reference=False),
}


def preference_losses(name: str, pairs: PairLogprobs, settings: LossSettings) -> Tensor:
    """The loss of each pair, [B]; with α > 0 plus RPO's (Pang et al. 2024) -α c / |c|.

    A preference alone may make both answers less likely, as long as the rejected one loses more; what gains is then in
    neither. The second term holds the chosen answer.
    """
    losses = PREFERENCE_LOSSES[name].function(pairs, settings)
    return losses - settings.rpo_alpha * pairs.chosen_mean if settings.rpo_alpha else losses
