"""Preference pairs: their datasets, and what DPO and reward models have in common, a reward for either answer.

A batch has the chosen answers first and then the rejected ones, as rows of one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from headwater.core.model import Transformer
from headwater.data.answers import AnswerRow, AnswerRows, ChatEncoder, answer_batch, text_spans
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.conversations import PreferencePair
from headwater.data.dataset import Dataset
from headwater.data.step_metrics import MetricMeans
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData
from headwater.tasks.batch import TensorBatch
from headwater.tasks.chat import DEFAULT_CHAT_LENGTH, chat_encoder
from headwater.text.tokenizer import Tokenizer


class PairRewards(NamedTuple):
    """The rewards of both answers of a pair."""

    chosen: float
    rejected: float

    @property
    def margin(self) -> float:
        return self.chosen - self.rejected


def pair_metrics(rewards: Sequence[PairRewards]) -> dict[str, float]:
    """The percentage of pairs whose chosen answer has the higher reward, and the mean rewards and margin."""
    count = max(1, len(rewards))
    return {
        "accuracy": 100 * sum(pair.margin > 0 for pair in rewards) / count,
        "margin": sum(pair.margin for pair in rewards) / count,
        "reward_chosen": sum(pair.chosen for pair in rewards) / count,
        "reward_rejected": sum(pair.rejected for pair in rewards) / count,
    }


class PairTask(Task[PreferencePair]):
    """A task that learns from pairs. A subclass says what the rewards of a batch are, and its loss."""

    @abstractmethod
    def batch_rewards(self, model: Transformer, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """[B] the rewards of the chosen answers, and of the rejected ones."""

    def num_targets(self, batch: TensorBatch) -> int:
        """The number of pairs."""
        return int((batch["targets"] != IGNORE_INDEX).any(1).sum()) // 2

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, PairRewards]:
        """The rewards of each pair."""
        outputs: dict[int, PairRewards] = {}
        for rows, batch in batches:
            chosen, rejected = self.batch_rewards(model, batch)
            for row, first, second in zip(rows, chosen.tolist(), rejected.tolist(), strict=True):
                outputs[int(row)] = PairRewards(first, second)
        return outputs

    def reference(self, example: PreferencePair) -> str:
        return ""

    def metrics(self, outputs: list[PairRewards], references: list[str], data: TaskData) -> dict[str, float]:
        return pair_metrics(outputs)

    def format_input(self, example: PreferencePair) -> str:
        return example.prompt[-1].content

    def output_line(self, output: Any) -> str:
        return f"{output.chosen:+.3f} > {output.rejected:+.3f}" if isinstance(output, PairRewards) else str(output)


# ----------------------------------------------------------------------------------------------------------- datasets


@dataclass(frozen=True)
class PairBatch(TrainBatch):
    """Rows 0 … B-1 are the chosen answers of B pairs, rows B … 2B-1 the rejected ones."""

    reference_logprobs: np.ndarray | None = None  # [2B] of the answers in the reference model
    margins: np.ndarray | None = None  # [B]


class PairDataset(Dataset):
    """Preference pairs. reference_logprobs [N, 2]: of both answers in the reference model, computed once.

    validation: the pairs that the run is evaluated on, whose reference log-probabilities are stored with these.
    """

    def __init__(
        self, rows: AnswerRows, margins: np.ndarray, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        self.rows = rows  # N chosen answers, then N rejected ones
        self.margins = margins.astype(np.float32)
        self.num_pairs = len(margins)
        self.reference_logprobs = np.zeros((self.num_pairs, 2), np.float32)
        self.validation: PairDataset | None = None
        self.metrics = MetricMeans()
        lengths = rows.ids.lengths.reshape(2, self.num_pairs).T
        super().__init__(lengths, special_tokens, max(batch_tokens, int(lengths.sum(1).max())), seed)

    def collate(self, examples: np.ndarray, epoch: int) -> PairBatch:
        both = np.concatenate([examples, examples + self.num_pairs])
        width = int(self.lengths[examples].max(initial=1))
        batch = answer_batch(self.rows, [np.array([i]) for i in both], width, self.special_tokens.pad_id)
        values = {field.name: getattr(batch, field.name) for field in fields(batch)} | {"document_ids": None}
        reference = self.reference_logprobs[examples].T.ravel()
        return PairBatch(**values, reference_logprobs=reference, margins=self.margins[examples])

    def take_metrics(self) -> dict[str, float]:
        return self.metrics.take()

    def state_arrays(self) -> dict[str, np.ndarray]:
        parts = {"train": self, "valid": self.validation}
        return {f"reference.{name}": part.reference_logprobs for name, part in parts.items() if part is not None}

    def load_state_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.reference_logprobs = arrays["reference.train"]
        if self.validation is not None:
            self.validation.reference_logprobs = arrays["reference.valid"]


def build_pair_data(
    task: Task[PreferencePair],
    config: TaskConfig,
    tokenizer: Tokenizer,
    train: Sequence[PreferencePair],
    valid: Sequence[PreferencePair],
) -> TaskData:
    """The datasets of preference pairs."""
    notes: list[str] = []
    special_tokens = SpecialTokens.from_tokenizer(tokenizer)
    encoder = chat_encoder(config, tokenizer, notes)
    datasets: list[PairDataset] = []
    kept: list[PreferencePair] = []
    for split, examples in (("train", train), ("valid", valid)):
        rows, left = _encode_pairs(encoder, examples, config, split, notes)
        kept = [examples[i] for i in left]
        margins = np.array([pair.margin for pair in kept])
        datasets.append(PairDataset(rows, margins, special_tokens, config.batch_tokens, config.seed))
    train_set, valid_set = datasets
    train_set.validation = valid_set
    first = AnswerRow(train_set.rows.ids[0].tolist(), [bool(n) for n in train_set.rows.learned[0]])
    return TaskData(
        task,
        tokenizer,
        train_set,
        valid_set,
        kept,
        notes=notes,
        num_tokens=len(train_set.rows.ids.values),
        num_learned=int(train_set.rows.num_learned.sum()),
        preview=tuple(text_spans(tokenizer, first)),
        eos_ids=tuple(encoder.eos_ids),
    )


def _encode_pairs(
    encoder: ChatEncoder, pairs: Sequence[PreferencePair], config: TaskConfig, split: str, notes: list[str]
) -> tuple[AnswerRows, np.ndarray]:
    """The chosen rows and then the rejected ones, of the pairs that are short enough; and the indices of these."""
    limit = config.max_length or DEFAULT_CHAT_LENGTH
    chosen = AnswerRows.from_rows(encoder.answer_row(pair.prompt, pair.chosen) for pair in pairs)
    rejected = AnswerRows.from_rows(encoder.answer_row(pair.prompt, pair.rejected) for pair in pairs)
    if config.truncate:
        chosen, rejected = chosen.truncate(limit), rejected.truncate(limit)
    fits = [(side.ids.lengths <= limit) & (side.num_learned > 0) for side in (chosen, rejected)]
    left = np.flatnonzero(fits[0] & fits[1])
    if len(left) < len(pairs):
        notes.append(
            _(
                "{n:,} of {total:,} {name} pairs have an answer beyond {limit} tokens and are left out",
                n=len(pairs) - len(left),
                total=len(pairs),
                name=split,
                limit=limit,
            )
        )
    if not len(left):
        raise BadInput(
            _("{name}: no pair has both answers within {limit} tokens; raise --max-length", name=split, limit=limit)
        )
    return AnswerRows.from_rows(
        AnswerRow(side.ids[i].tolist(), side.learned[i].tolist()) for side in (chosen, rejected) for i in left.tolist()
    ), left
