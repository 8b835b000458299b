"""Token classification (tagging): a tag per word, as in named entity recognition. An encoder with a head per token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core import Model, TokenClassificationHead
from headwater.core.model import Transformer
from headwater.data.collate import (
    SpecialTokens,
    TrainBatch,
    encode_tagged,
    label_names,
    predicted_tags,
    tagging_batch,
    word_token_ids,
)
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, TaggedTokens
from headwater.data.metrics import entity_f1, entity_report
from headwater.data.ragged import Ragged
from headwater.families.builders import encoder, with_token_types
from headwater.tasks.base import (
    EvalBatch,
    Task,
    TaskConfig,
    TaskData,
    TaskMetadata,
    rows_within_max_length,
    stack_sizes,
)
from headwater.tasks.batch import TensorBatch, forward_logits
from headwater.tasks.classification import classification_loss
from headwater.text.tokenizer import Tokenizer


class TokenClassificationDataset(Dataset):
    """Token classification (tagging): a label per word, at its first token."""

    def __init__(
        self, ids: Ragged, labels: Ragged, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        super().__init__(ids.lengths + 2, special_tokens, batch_tokens, seed)
        self.ids = ids
        self.labels = labels

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        return tagging_batch(self.ids.take(examples), self.labels.take(examples), self.special_tokens)


class TokenClassification(Task[TaggedTokens]):
    """Token classification."""

    name = "token-classification"
    verb = "tag"
    example_format = EXAMPLE_FORMATS["token-classification"]
    default_metric = "f1"
    output_columns = ("tags",)

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[TaggedTokens],
        valid: Sequence[TaggedTokens],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []
        names = tuple(labels) or label_names(tag for rows in (train, valid) for row in rows for tag in row.tags)

        def build(split: str, rows: Sequence[TaggedTokens]) -> tuple[TokenClassificationDataset, list[TaggedTokens]]:
            columns = encode_tagged(rows, names, tokenizer)
            short = rows_within_max_length(config, columns["ids"].lengths, split, notes)
            dataset = TokenClassificationDataset(
                columns["ids"].take(short),
                columns["labels"].take(short),
                special_tokens,
                config.batch_tokens,
                config.seed,
            )
            return dataset, [rows[i] for i in short]

        train_set, _rows = build("train", train)
        valid_set, valid_rows = build("valid", valid)
        num_tokens = int(train_set.lengths.sum())
        return TaskData(self, tokenizer, train_set, valid_set, valid_rows, names, notes=notes, num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        head = TokenClassificationHead(num_labels, dropout=config.dropout)
        return with_token_types(encoder(vocab_size, head, activation="gelu", **stack_sizes(config)), 2)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return classification_loss(model, batch, label_smoothing)

    @torch.no_grad()
    def predict(
        self, model: Transformer, tokenizer: Tokenizer, metadata: TaskMetadata, inputs: Sequence[str | Sequence[str]]
    ) -> list[list[tuple[str, str]]]:
        """(word, tag) pairs. A text is split at spaces; a list of words is taken as it is."""
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        names = metadata["labels"]
        outputs: list[list[tuple[str, str]]] = []
        for text in inputs:
            words = text.split() if isinstance(text, str) else list(text)
            pieces = word_token_ids(words, tokenizer)
            ids = torch.tensor([[special_tokens.bos_id, *(n for word in pieces for n in word), special_tokens.eos_id]])
            chosen = model(ids)[0].argmax(-1).tolist()
            firsts = [1 + sum(map(len, pieces[:n])) for n in range(len(words))]  # the first token of each word
            outputs.append([(word, names[chosen[at]]) for word, at in zip(words, firsts, strict=True)])
        return outputs

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, tuple[str, ...]]:
        outputs: dict[int, tuple[str, ...]] = {}
        for rows, batch in batches:
            chosen = forward_logits(model, batch).argmax(-1).cpu().numpy()
            row_tags = predicted_tags(chosen, batch["targets"].cpu().numpy(), data.labels)
            outputs |= {int(row): tags for row, tags in zip(rows, row_tags, strict=True)}
        return outputs

    def reference(self, example: TaggedTokens) -> Sequence[str]:
        return example.tags

    def output_cells(self, output: Sequence[tuple[str, str]]) -> tuple[list[str]]:
        """The tags of a text's words, in order."""
        return ([tag for _word, tag in output],)

    def output_line(self, output: Sequence[tuple[str, str]]) -> str:
        return format_tags(output)

    def metrics(
        self, outputs: list[Sequence[str]], references: list[Sequence[str]], data: TaskData
    ) -> dict[str, float]:
        return entity_f1(outputs, references)

    def report(self, outputs: list[Sequence[str]], references: list[Sequence[str]]) -> Mapping[str, Any]:
        return entity_report(outputs, references)

    def format_output(self, example: TaggedTokens, output: Sequence[str]) -> str:
        """Only the entities."""
        return format_tags(zip(example.words, output, strict=True), entities_only=True)


def format_tags(words: Iterable[tuple[str, str]], entities_only: bool = False) -> str:
    """Words, followed by their tag where it is not O."""
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in words if tag != "O" or not entities_only)
