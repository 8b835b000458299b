"""Classification of a text, or of a pair of texts such as premise and hypothesis. An encoder with a pooled head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headwater.core import ClassificationHead, MeanPooling, Model, Pooled
from headwater.core.model import Transformer
from headwater.data.augment import Augmenter
from headwater.data.collate import SpecialTokens, TrainBatch, classification_batch, label_ids, label_names
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, LabeledText
from headwater.data.ragged import Ragged, encode_rows
from headwater.errors import BadInput
from headwater.families.builders import encoder, with_token_types
from headwater.i18n import _
from headwater.tasks.base import (
    TaskConfig,
    TaskData,
    TaskMetadata,
    build_augmenter,
    max_length,
    rows_within_max_length,
    stack_sizes,
)
from headwater.tasks.batch import TensorBatch, forward_hidden, forward_logits, to_tensors
from headwater.tasks.labels import LabelTask, label_probabilities
from headwater.tasks.losses import cross_entropy
from headwater.text.tokenizer import Tokenizer


class ClassificationDataset(Dataset):
    """Classification of a text, or of a pair of texts."""

    augmenter: Augmenter | None = None  # the first texts, where they are augmented

    def __init__(
        self,
        texts: Ragged,
        labels: np.ndarray,
        special_tokens: SpecialTokens,
        batch_tokens: int,
        seed: int,
        second_texts: Ragged | None = None,
    ) -> None:
        more = 0 if second_texts is None else second_texts.lengths + 1
        super().__init__(texts.lengths + 2 + more, special_tokens, batch_tokens, seed)
        self.texts = texts
        self.labels = labels
        self.second_texts = second_texts

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        seconds = None if self.second_texts is None else self.second_texts.take(examples)
        texts = self.augmenter.encode(examples, epoch) if self.augmenter else self.texts.take(examples)
        return classification_batch(texts, self.labels[examples], self.special_tokens, seconds)


def classification_loss(model: Transformer, batch: TensorBatch, label_smoothing: float = 0.0) -> Tensor:
    """Classification loss: a class per row, or a tag per token, as the head has it."""
    hidden_states, inputs = forward_hidden(model, batch)
    return cross_entropy(model.head(hidden_states, inputs), batch["targets"], label_smoothing)


class Classification(LabelTask[LabeledText]):
    """Sequence classification."""

    name = "classification"
    example_format = EXAMPLE_FORMATS["classification"]
    augmentable = True

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[LabeledText],
        valid: Sequence[LabeledText],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []
        names = tuple(labels) or label_names(row.label for row in train)
        if len(names) < 2:
            raise BadInput(
                _(
                    "classification needs at least two labels, all rows have {names!r}; is it the right column?",
                    names=names[0],
                )
            )

        def build(split: str, rows: Sequence[LabeledText]) -> tuple[ClassificationDataset, list[LabeledText]]:
            texts = encode_rows(tokenizer, (row.text for row in rows))
            if config.truncate:
                texts = texts.truncate(max_length(config))
            seconds = encode_rows(tokenizer, (row.text_pair for row in rows))
            short = rows_within_max_length(config, texts.lengths + seconds.lengths, split, notes)
            dataset = ClassificationDataset(
                texts.take(short),
                label_ids([rows[i].label for i in short], names),
                special_tokens,
                config.batch_tokens,
                config.seed,
                seconds.take(short) if len(seconds.values) else None,
            )
            return dataset, [rows[i] for i in short]

        train_set, train_rows = build("train", train)
        train_set.augmenter = build_augmenter(config, tokenizer, [row.text for row in train_rows])
        valid_set, valid_rows = build("valid", valid)
        num_tokens = int(train_set.lengths.sum())
        return TaskData(self, tokenizer, train_set, valid_set, valid_rows, names, notes=notes, num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        head = ClassificationHead(num_labels, Pooled(MeanPooling()), dropout=config.dropout)
        return with_token_types(encoder(vocab_size, head, activation="gelu", **stack_sizes(config)), 2)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return classification_loss(model, batch, label_smoothing)

    @torch.no_grad()
    def predict(
        self, model: Transformer, tokenizer: Tokenizer, metadata: TaskMetadata, inputs: Sequence[str | tuple[str, str]]
    ) -> list[dict[str, float]]:
        """For each text its labels with their probabilities, the most probable first.

        Two texts are a tuple, or stand in one text with a tab between them.
        """
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        pairs = [text.partition("\t")[::2] if isinstance(text, str) else text for text in inputs]
        firsts, seconds = zip(*pairs, strict=True)
        rows, more = (encode_rows(tokenizer, side) for side in (firsts, seconds))
        rows = rows.truncate(metadata.get("truncate_to") or int(rows.lengths.max(initial=0)))
        no_labels = np.zeros(len(inputs), np.int64)
        batch = classification_batch(rows, no_labels, special_tokens, more if any(seconds) else None)
        return label_probabilities(forward_logits(model, to_tensors(batch)), metadata["labels"])

    def logits(self, model: Transformer, batch: TensorBatch) -> Tensor:
        return forward_logits(model, batch)

    def encode_input(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """With the special tokens of the tokenizer; a mask token in the text is parsed as one."""
        return tokenizer.encode(text, parse_special=tokenizer.mask_id is not None)

    def format_input(self, example: LabeledText) -> str:
        return example.text
