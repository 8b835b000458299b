"""GRPO (Shao et al. 2024): several answers to each prompt; an answer's advantage is its reward against those beside it.

No value head and, unless beta is given, no reference. The mean of the loss:
grpo of each answer, then over answers · bnpo over the tokens of a step · dapo over the tokens of all answers sampled
· dr_grpo over answers × the maximum length
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwater.core.base import choose
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX
from headwater.data.conversations import GRPO_FORMAT
from headwater.tasks.batch import TensorBatch
from headwater.tasks.logprobs import target_logprobs
from headwater.tasks.policy import PolicyTask
from headwater.tasks.policy_losses import group_advantages, kl_estimate, policy_loss, sequence_logprobs

MEANS = ("grpo", "bnpo", "dapo", "dr_grpo")
SCALES = ("group", "batch", "none")
IMPORTANCE = ("token", "sequence")


class GRPO(PolicyTask):
    """Group relative policy optimization."""

    name = "grpo"
    example_format = GRPO_FORMAT

    def configured(self, config: Any) -> PolicyTask:
        for name, known in (("grpo_loss", MEANS), ("group_scale", SCALES), ("importance", IMPORTANCE)):
            choose(getattr(config, name), dict.fromkeys(known), name)
        return super().configured(config)

    def num_per_prompt(self) -> int:
        return int(self.config.group_size)

    # ------------------------------------------------------------------------------------------------- advantages

    def learn(self, batch: dict[str, Tensor], scores: Tensor) -> dict[str, float]:
        settings = self.config
        mask = batch["targets"] != IGNORE_INDEX
        rewards = scores.float() - settings.missing_end_penalty * ~batch["ended"]
        advantages = group_advantages(rewards, settings.group_size, settings.group_scale)
        batch["advantages"] = advantages[:, None] * mask
        batch["weights"] = token_weights(mask, settings.grpo_loss, settings.answer_tokens)
        _kl, answer_kl = self.divergence(batch, mask)
        known = scores[~scores.isnan()]
        groups = scores.view(-1, settings.group_size)
        flat = 100 * float((groups.nan_to_num().std(1) == 0).float().mean())
        metrics = {"reward": float(known.mean()) if len(known) else 0.0, "equal_groups": flat}
        return metrics if self.controller.beta == 0 else {**metrics, "kl": float(answer_kl.mean())}

    # ------------------------------------------------------------------------------------------------------- loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        settings = self.config
        mask = batch["targets"] != IGNORE_INDEX
        inputs = {name: batch[name] for name in ("ids", "targets")}
        logprobs = target_logprobs(model, inputs, settings.temperature)
        self.record_ratio(logprobs, batch, mask, settings.clip_range)
        compared = logprobs
        if settings.importance == "sequence":
            compared = sequence_logprobs(logprobs, batch["old_logprobs"], mask)
        losses = policy_loss(compared, batch["old_logprobs"], batch["advantages"], settings.clip_range,
                             settings.clip_range_high or None)  # fmt: skip
        if self.controller.beta:
            losses = losses + self.controller.beta * kl_estimate(logprobs, batch["reference_logprobs"], "k3")
        total: Tensor = (losses * batch["weights"] * mask).sum()
        return total

    def num_targets(self, batch: TensorBatch) -> int:
        """What the loss of a step is divided by: its tokens for bnpo, else its answers."""
        if self.config is not None and self.config.grpo_loss == "bnpo":
            return int((batch["targets"] != IGNORE_INDEX).sum())
        return super().num_targets(batch)


def token_weights(mask: Tensor, mean: str, max_length: int) -> Tensor:
    """[N, Q] the weight of each token, so that the sum over a step, divided by num_targets(), is the mean meant."""
    if mean == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1)
    if mean == "dapo":
        return mask * (len(mask) / mask.sum().clamp(min=1))
    return mask / max_length if mean == "dr_grpo" else mask.float()
