"""Policy optimization, what PPO and GRPO share: a decoder answers prompts and learns from their rewards."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch, length_mask
from headwater.data.conversations import PromptExample
from headwater.data.ragged import Ragged
from headwater.data.step_metrics import MetricMeans
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.tasks.base import EvalBatch, TaskConfig, TaskData
from headwater.tasks.batch import TensorBatch
from headwater.tasks.chat import ChatModelTask, chat_encoder
from headwater.tasks.policy_losses import KLController, kl_estimate
from headwater.tasks.rewards import Answer, load_reward
from headwater.tasks.rollouts import AdapterReference, Reference, RolloutDataset, Sampling, language_model
from headwater.text.tokenizer import Tokenizer
from headwater.tuning.base import tuning_of

MAX_RATIO = 10.0  # a batch whose mean ratio is above has gone astray and is left out


class ScoredAnswer(NamedTuple):
    """An answer in an evaluation, with its reward; None where it cannot be scored."""

    text: str
    ended: bool
    reward: float | None


class PolicyTask(ChatModelTask[PromptExample]):
    """Learning from rewards. Subclasses say how advantages follow from scores, and the loss."""

    needs_pretrained = True
    uses_dropout = False
    has_valid_loss = False
    lr_factor = 0.1
    default_metric = "reward"
    default_beta = 0.0
    epochs_of_answers = 1

    config: Any = None
    recorded = MetricMeans()  # of the steps of a run
    controller = KLController(0.0)

    def configured(self, config: Any) -> PolicyTask:
        task = copy.copy(self)
        task.config = config
        task.recorded = MetricMeans()
        beta = self.default_beta if config.beta < 0 else config.beta
        task.controller = KLController(beta, config.kl_target, config.kl_horizon)
        return task

    def num_per_prompt(self) -> int:
        """Answers to one prompt."""
        return 1

    def num_epochs(self) -> int:
        """How often the same answers are learned from."""
        return 1

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[PromptExample],
        valid: Sequence[PromptExample],
        labels: Sequence[str] = (),
    ) -> TaskData:
        settings = self.config
        group = self.num_per_prompt()
        if settings.rollouts % group or settings.minibatch > settings.rollouts:
            raise BadSetting(
                _(
                    "rollouts ({rollouts}) must be a multiple of group_size ({group}) and at least minibatch "
                    "({minibatch}); correct one",
                    rollouts=settings.rollouts,
                    group=group,
                    minibatch=settings.minibatch,
                )
            )
        notes: list[str] = []
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        encoder = chat_encoder(config, tokenizer, notes)
        reward = load_reward(settings.reward, settings.reward_errors)
        sampling = Sampling(
            settings.rollouts,
            settings.minibatch,
            self.num_epochs(),
            group,
            settings.answer_tokens,
            settings.temperature,
            config.seed,
        )
        train_set, valid_set = (
            RolloutDataset(rows, encoder, tokenizer, reward, sampling, special_tokens) for rows in (train, valid)
        )
        train_set.metrics = self.recorded
        num_tokens = sum(map(len, train_set.prompt_ids))
        return TaskData(
            self,
            tokenizer,
            train_set,
            PromptDataset(valid_set, train_set),
            list(valid),
            notes=notes,
            num_tokens=num_tokens,
            eos_ids=tuple(encoder.eos_ids),
        )

    def prepare(self, model: Transformer, data: TaskData, config: Any, resumed: bool) -> None:
        """Bind the model to the rollouts, and copy the reference where there is a penalty for leaving it."""
        dataset = data.train
        assert isinstance(dataset, RolloutDataset)
        reference: Reference | None = None
        if self.needs_reference():
            reference = Reference(model) if tuning_of(model) is None else AdapterReference()
        dataset.bind(model, self.learn, reference)
        dataset.is_rehearsal = resumed
        dataset.learner_state = self.learner_state  # type: ignore[method-assign]
        dataset.load_learner_state = self.load_learner_state  # type: ignore[method-assign]

    def needs_reference(self) -> bool:
        """Whether the divergence from the initial model is measured."""
        return self.controller.beta > 0

    def learn(self, batch: dict[str, Tensor], scores: Tensor) -> dict[str, float]:
        """Add advantages and weights to a batch of rollouts; returns metrics of the iteration."""
        raise NotImplementedError

    def saved_model(self, model: Any) -> Any:
        """The model that answers, without the value head of training."""
        return language_model(model)

    # -------------------------------------------------------------------------------------------------------- state

    def learner_state(self) -> dict[str, np.ndarray]:
        """What changes from iteration to iteration: the coefficient of the KL penalty."""
        return {"beta": np.array([self.controller.beta])}

    def load_learner_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.controller.beta = float(arrays["beta"][0])

    # ------------------------------------------------------------------------------------------------------- shared

    def num_targets(self, batch: TensorBatch) -> int:
        """The number of answers that have a token."""
        return int((batch["targets"] != IGNORE_INDEX).any(1).sum())

    def divergence(self, batch: Mapping[str, Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """[N, Q] the divergence from the reference at each token, and its sum over each answer."""
        reference = batch.get("reference_logprobs", batch["old_logprobs"])
        kl = kl_estimate(batch["old_logprobs"], reference) * mask
        return kl, kl.sum(1)

    def record_ratio(self, logprobs: Tensor, batch: TensorBatch, mask: Tensor, clip: float) -> None:
        """Add the share of clipped tokens, and the divergence from the policy that sampled, to the metrics."""
        if not torch.is_grad_enabled():
            return
        difference = (logprobs.detach() - batch["old_logprobs"])[mask]
        ratio = difference.exp()
        clipped = 100 * float(((ratio - 1).abs() > clip).sum())
        self.recorded.add("clipped", clipped, max(1, len(difference)))
        self.recorded.add("step_kl", float((ratio - 1 - difference).sum()), max(1, len(difference)))

    # --------------------------------------------------------------------------------------------------- predictions

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, ScoredAnswer]:
        """Sampled answers to the validation prompts, with the same seeds in every evaluation, and their rewards."""
        assert isinstance(data.valid, PromptDataset)
        return data.valid.score(language_model(model), [int(row) for batch in batches for row in batch.rows])

    def reference(self, example: PromptExample) -> str:
        return ""

    def metrics(self, outputs: list[ScoredAnswer], references: list[str], data: TaskData) -> dict[str, float]:
        rewards = [output.reward for output in outputs if output.reward is not None]
        return {
            "reward": sum(rewards) / max(1, len(rewards)),
            "ended": 100 * sum(output.ended for output in outputs) / max(1, len(outputs)),
        }

    def format_input(self, example: PromptExample) -> str:
        return example.prompt_text

    def output_line(self, output: Any) -> str:
        if not isinstance(output, ScoredAnswer):
            return str(output)
        reward = "-" if output.reward is None else f"{output.reward:+.3f}"
        return f"[{reward}] {output.text}".replace("\n", "⏎")


class PromptDataset(RolloutDataset):
    """The validation prompts, answered by the model that is given."""

    def __init__(self, dataset: RolloutDataset, train: RolloutDataset) -> None:
        self.__dict__.update(dataset.__dict__)
        self.train = train

    def score(self, model: Transformer, rows: Sequence[int]) -> dict[int, ScoredAnswer]:
        """An answer to each of these prompts, and its reward."""
        if not rows:
            return {}
        self.model = model
        answers = self.answer([self.prompt_ids[row] for row in rows], list(rows))
        examples = [self.prompts[row] for row in rows]
        scored = [Answer(example, answer.text) for example, answer in zip(examples, answers, strict=True)]
        rewards = [0.0] * len(rows) if self.train.is_rehearsal else self.reward(scored)
        return {
            row: ScoredAnswer(answer.text, answer.ended, reward)
            for row, answer, reward in zip(rows, answers, rewards, strict=True)
        }

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        """The prompts themselves, which predict_rows() reads by their row."""
        rows = Ragged.from_rows([self.prompt_ids[i] for i in examples])
        ids = rows.to_padded(self.special_tokens.pad_id)
        return TrainBatch(ids, length_mask(rows), np.full(ids.shape, IGNORE_INDEX))

    def micro_batches(self, examples: np.ndarray, max_tokens: int) -> Sequence[np.ndarray]:
        return [examples] if len(examples) else []

    @property
    def size(self) -> int:
        return len(self.prompts)
