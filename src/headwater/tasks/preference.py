"""Preference: DPO and its variants, which tune a decoder on pairs of a better and a worse answer.

The reference is the model before the first step. Its log-probabilities are computed once and stored in the checkpoints,
so that a step costs one model, not two, and a resumed run has the same reference.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headwater.core.base import choose
from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.data.collate import IGNORE_INDEX
from headwater.data.conversations import PREFERENCE_FORMAT, PreferencePair
from headwater.data.step_metrics import MetricMeans
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.tasks.base import TaskConfig, TaskData
from headwater.tasks.batch import TensorBatch, to_tensors
from headwater.tasks.chat import ChatModelTask
from headwater.tasks.logprobs import sum_rows, target_logprobs
from headwater.tasks.pairs import PairDataset, PairRewards, PairTask, build_pair_data, pair_metrics
from headwater.tasks.preference_losses import PREFERENCE_LOSSES, LossSettings, PairLogprobs, preference_losses
from headwater.text.tokenizer import Tokenizer

REFERENCE_BATCH_TOKENS = 4096
MAX_SMOOTHING = 0.5  # of label smoothing: from here on a pair would be the other way round


class PreferenceConfig(Protocol):
    """The settings that this task reads beside those of every task."""

    @property
    def preference_loss(self) -> str: ...
    @property
    def beta(self) -> float: ...
    @property
    def simpo_margin(self) -> float: ...
    @property
    def rpo_alpha(self) -> float: ...
    @property
    def label_smoothing(self) -> float: ...


class Preference(PairTask, ChatModelTask[PreferencePair]):
    """DPO (sigmoid), IPO, hinge, robust DPO, SimPO and ORPO."""

    name = "preference"
    example_format = PREFERENCE_FORMAT
    needs_pretrained = True
    uses_dropout = False
    lr_factor = 0.1
    loss_name = "sigmoid"
    settings = LossSettings()
    recorded = MetricMeans()  # of the steps of a run

    def configured(self, config: PreferenceConfig) -> Preference:
        task = copy.copy(self)
        loss = choose(config.preference_loss, PREFERENCE_LOSSES, "preference_loss")
        task.loss_name = config.preference_loss
        task.recorded = MetricMeans()
        beta = loss.default_beta if config.beta < 0 else config.beta
        task.settings = LossSettings(beta, config.label_smoothing, config.simpo_margin, config.rpo_alpha)
        if not 0 <= config.label_smoothing < MAX_SMOOTHING:
            raise BadSetting(
                _(
                    "label_smoothing of preference pairs must be below 0.5, got {value}; 0.1 is usual",
                    value=config.label_smoothing,
                )
            )
        if not beta:
            raise BadSetting(_("beta must be above 0: nothing would be learned; 0.1 is usual"))
        return task

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[PreferencePair],
        valid: Sequence[PreferencePair],
        labels: Sequence[str] = (),
    ) -> TaskData:
        data = build_pair_data(self, config, tokenizer, train, valid)
        assert isinstance(data.train, PairDataset)
        data.train.metrics = self.recorded
        return data

    def prepare(self, model: Transformer, data: TaskData, config: Any, resumed: bool) -> None:
        """Compute the reference log-probabilities of both answers of every pair."""
        if resumed or not PREFERENCE_LOSSES[self.loss_name].needs_reference:
            return
        for dataset in (data.train, data.valid):
            assert isinstance(dataset, PairDataset)
            compute_reference(model, dataset)

    # ---------------------------------------------------------------------------------------------------------- loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """The loss of pairs, summed."""
        pairs = self.pair_logprobs(model, batch)
        is_pair = (batch["targets"] != IGNORE_INDEX).any(1)[: len(pairs.chosen)]  # a filler has no targets
        losses = preference_losses(self.loss_name, pairs, self.settings)
        if torch.is_grad_enabled() and bool(is_pair.all()):
            self._record(pairs)
        return losses.where(is_pair, torch.zeros_like(losses)).sum()

    def _record(self, pairs: PairLogprobs) -> None:
        """Add the rewards of a training batch to the metrics of the step."""
        chosen, rejected = (rewards.tolist() for rewards in self.rewards(pairs))
        rewards = [PairRewards(first, second) for first, second in zip(chosen, rejected, strict=True)]
        means = pair_metrics(rewards)
        means["logprob_chosen"] = float(pairs.chosen.detach().mean())
        means["logprob_rejected"] = float(pairs.rejected.detach().mean())
        for name, value in means.items():
            self.recorded.add(name, len(rewards) * value, len(rewards))

    def pair_logprobs(self, model: Transformer, batch: TensorBatch) -> PairLogprobs:
        """The log-probabilities of both answers of each pair."""
        inputs = {name: value for name, value in batch.items() if name != "attention_mask"}  # padding is on the right
        sums, counts = sum_rows(target_logprobs(model, inputs), batch["targets"])
        lengths = counts.clamp(min=1)  # 0 in a filler, whose gradient would be NaN
        columns = [part for values in (sums, batch["reference_logprobs"], lengths) for part in values.chunk(2)]
        return PairLogprobs(*columns)

    # --------------------------------------------------------------------------------------------------- predictions

    def rewards(self, pairs: PairLogprobs) -> tuple[Tensor, Tensor]:
        """[B] the implicit rewards β·a and β·b; without a reference β times the mean log-probability."""
        beta = self.settings.beta
        if PREFERENCE_LOSSES[self.loss_name].needs_reference:
            return beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
        return beta * pairs.chosen_mean, beta * pairs.rejected_mean

    def batch_rewards(self, model: Transformer, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        return self.rewards(self.pair_logprobs(model, batch))


def compute_reference(model: Transformer, dataset: PairDataset) -> None:
    """Store the log-probabilities of all answers in this model."""
    device = next(model.parameters()).device
    by_length = np.argsort(dataset.lengths.sum(1), kind="stable")
    with eval_mode(model):
        for rows in dataset.micro_batches(by_length, max(REFERENCE_BATCH_TOKENS, int(dataset.lengths.sum(1).max()))):
            batch = to_tensors(dataset.collate(rows, 0), device)
            inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
            sums, _counts = sum_rows(target_logprobs(model, inputs), batch["targets"])
            dataset.reference_logprobs[rows] = sums.view(2, len(rows)).T.cpu().numpy()
