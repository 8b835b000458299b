"""Reward model: a decoder with one output, read at the last token of an answer, learned from preference pairs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwater.core import ClassificationHead, LastToken, Model, Pooled
from headwater.core.model import Transformer
from headwater.data.answers import ChatEncoder
from headwater.data.collate import IGNORE_INDEX, SpecialTokens
from headwater.data.conversations import REWARD_FORMAT, ChatTurn, PreferencePair
from headwater.families.builders import decoder
from headwater.tasks.base import TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch, forward_logits
from headwater.tasks.pairs import PairTask, build_pair_data
from headwater.tasks.preference_losses import bradley_terry_loss
from headwater.text.tokenizer import Tokenizer, pad_sequences

BATCH_SIZE = 32  # texts that are scored at once
REWARD_HEAD = ClassificationHead(1, pooler=Pooled(LastToken()), bias=False)


class RewardModel(PairTask):
    """Bradley-Terry: -log σ(r chosen - r rejected - margin)."""

    name = "reward"
    example_format = REWARD_FORMAT
    uses_dropout = False
    stacks = (False, True)
    lr_factor = 0.5
    default_metric = "accuracy"
    output_columns = ("reward",)
    center = 0.0

    def configured(self, config: Any) -> RewardModel:
        task = copy.copy(self)
        task.center = config.center_rewards
        return task

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[PreferencePair],
        valid: Sequence[PreferencePair],
        labels: Sequence[str] = (),
    ) -> TaskData:
        return build_pair_data(self, config, tokenizer, train, valid)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return replace(decoder(vocab_size, **stack_sizes(config)), head=REWARD_HEAD, tied=())

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return spec.head == REWARD_HEAD

    # ---------------------------------------------------------------------------------------------------------- loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        chosen, rejected = self.batch_rewards(model, batch)
        losses = bradley_terry_loss(chosen, rejected, batch["margins"], self.center)
        is_pair = (batch["targets"] != IGNORE_INDEX).any(1)[: len(losses)]  # a filler has no targets
        return losses.where(is_pair, torch.zeros_like(losses)).sum()

    def batch_rewards(self, model: Transformer, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        chosen, rejected = forward_logits(model, batch)[:, 0].float().chunk(2)
        return chosen, rejected

    # --------------------------------------------------------------------------------------------------- predictions

    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[tuple[str, str]],
        **options: Any,
    ) -> list[float]:
        """The rewards of pairs of prompt and answer."""
        conversations = [((ChatTurn("user", prompt),), answer) for prompt, answer in inputs]
        return score_answers(model, tokenizer, conversations)

    @property
    def command(self) -> str:
        return "headwater train PROMPTS --init-from MODEL --task ppo --reward {run}"


@torch.no_grad()
def score_answers(
    model: Transformer, tokenizer: Tokenizer, answers: Sequence[tuple[Sequence[ChatTurn], str]]
) -> list[float]:
    """The reward of each answer to a conversation, read at its end."""
    special_tokens = SpecialTokens.from_tokenizer(tokenizer)
    encoder = ChatEncoder(tokenizer, special_tokens.eos_id)
    scores: list[float] = []
    for first in range(0, len(answers), BATCH_SIZE):
        rows = [encoder.answer_row(prompt, answer).ids for prompt, answer in answers[first : first + BATCH_SIZE]]
        batch = pad_sequences(rows, special_tokens.pad_id)
        scores += model(batch.ids, attention_mask=batch.attention_mask)[:, 0].float().tolist()
    return scores
