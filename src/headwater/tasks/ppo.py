"""PPO (Schulman et al. 2017; for text Ziegler et al. 2019): token rewards, a value head, clipped steps, a KL penalty.

1. answers are sampled at one temperature, and all probabilities are those of that temperature
2. reward of a token: -β · KL to the reference; at the last one the score, less a penalty where the answer has no end
3. advantages by generalized advantage estimation, whitened over the batch
4. a few epochs over the answers in minibatches, with clipped ratios and clipped values
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from headwater.core import LMHead, Model, TokenClassificationHead
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX
from headwater.data.conversations import PPO_FORMAT
from headwater.tasks.base import TaskMetadata
from headwater.tasks.batch import TensorBatch, forward_hidden
from headwater.tasks.logprobs import head_logprobs, language_head
from headwater.tasks.policy import MAX_RATIO, PolicyTask
from headwater.tasks.policy_losses import generalized_advantages, policy_loss, token_rewards, value_loss, whiten
from headwater.tasks.rollouts import VALUE_PATHS
from headwater.tasks.task_config import TaskConfig
from headwater.variants.multi_task_head import MultiTaskHead, MultiTaskHeadLayer

VALUE_HEAD = TokenClassificationHead(1)


class PPO(PolicyTask):
    """Proximal policy optimization. The value of a token is read before it, from the policy's own states."""

    name = "ppo"
    example_format = PPO_FORMAT
    default_beta = 0.05
    gain = 1.0  # of normalized rewards: (score - bias) · gain
    bias = 0.0
    is_normalized = False

    def num_epochs(self) -> int:
        return int(self.config.ppo_epochs)

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        """The model with a value head beside its own, whose values begin at zero."""
        return with_value_head(model)

    def new_head(self, spec: Model) -> str:
        """The value head, which learns beside an adapter too."""
        return VALUE_PATHS

    def needs_reference(self) -> bool:
        """Always: without a penalty the divergence is what shows how far the model has gone."""
        return True

    # ------------------------------------------------------------------------------------------------- advantages

    def learn(self, batch: dict[str, Tensor], scores: Tensor) -> dict[str, float]:
        settings = self.config
        mask = batch["targets"] != IGNORE_INDEX
        known = ~scores.isnan()
        raw = torch.where(known, scores, 0.0).float()
        rewards = self._normalized(raw, known) - settings.missing_end_penalty * ~batch["ended"]
        kl, answer_kl = self.divergence(batch, mask)

        # rewards per token, advantages; an answer that could not be scored is not learned from
        per_token = token_rewards(rewards, kl, mask, self.controller.beta)
        if settings.whiten_rewards:
            per_token = whiten(per_token, mask, shift_mean=False)
        advantages, returns = generalized_advantages(
            per_token, batch["old_values"], mask, settings.discount, settings.gae_lambda
        )
        scored = mask & known[:, None]
        batch["advantages"] = whiten(advantages, scored)
        batch["returns"] = returns
        batch["weights"] = scored.float()

        mean_kl = float(answer_kl.mean())
        self.controller.update(mean_kl, len(mask))
        score = float(raw.sum() / known.sum().clamp(min=1))
        return {
            "reward": score,
            "kl": mean_kl,
            "beta": self.controller.beta,
            "value": float(batch["old_values"].mean()),
        }

    def _normalized(self, scores: Tensor, known: Tensor) -> Tensor:
        """The scores, scaled by those of the first answers, which are the reference's."""
        if not self.config.normalize_rewards:
            return scores
        if not self.is_normalized:
            values = scores[known]
            self.bias = float(values.mean()) if len(values) else 0.0
            self.gain = 1 / max(float(values.std()), 1e-6) if len(values) > 1 else 1.0
            self.is_normalized = True
        return (scores - self.bias) * self.gain

    # ------------------------------------------------------------------------------------------------------- loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        settings = self.config
        mask = batch["targets"] != IGNORE_INDEX
        hidden_states, inputs = forward_hidden(model, {name: batch[name] for name in ("ids", "targets")})
        logprobs = head_logprobs(language_head(model), hidden_states, inputs, batch["targets"], settings.temperature)
        values = model.head["value"](hidden_states, inputs)[..., 0].float()  # type: ignore[index]

        policy = policy_loss(logprobs, batch["old_logprobs"], batch["advantages"], settings.clip_range,
                             settings.clip_range_high or None)  # fmt: skip
        value = value_loss(values, batch["old_values"], batch["returns"], settings.value_clip)
        self.record_ratio(logprobs, batch, mask, settings.clip_range)
        ratio = (logprobs.detach() - batch["old_logprobs"])[mask].exp()
        if len(ratio) and float(ratio.mean()) > MAX_RATIO:
            return 0.0 * (policy + value).sum()
        total: Tensor = ((policy + settings.value_weight * value) * batch["weights"] * mask).sum()
        return total

    def num_targets(self, batch: TensorBatch) -> int:
        """The number of tokens."""
        return int((batch["targets"] != IGNORE_INDEX).sum())

    # ------------------------------------------------------------------------------------------------------ state

    def learner_state(self) -> dict[str, np.ndarray]:
        scale = np.array([self.gain, self.bias, float(self.is_normalized)])
        return {**super().learner_state(), "reward_scale": scale}

    def load_learner_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        super().load_learner_state(arrays)
        self.gain, self.bias = map(float, arrays["reward_scale"][:2])
        self.is_normalized = bool(arrays["reward_scale"][2])


def with_value_head(model: Transformer) -> Transformer:
    """The model, in place, with its head as "lm" and a value head beside it, which begins at zero."""
    spec = MultiTaskHead((("lm", model.spec.head), ("value", VALUE_HEAD)))
    value = VALUE_HEAD.build(model.output_stack.spec.output_width)
    for parameter in value.parameters():
        nn.init.zeros_(parameter)
    heads = MultiTaskHeadLayer({"lm": model.head, "value": value})
    tied = tuple((f"head.lm.{path.removeprefix('head.')}" if path.startswith("head.") else path, home)
                 for path, home in model.spec.tied)  # fmt: skip
    model.head = heads.train(model.training)
    model.spec = replace(model.spec, head=spec, tied=tied)
    return model
