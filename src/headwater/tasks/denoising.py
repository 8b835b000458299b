"""Denoising objectives, which pretrain an encoder-decoder: span corruption (T5) and text infilling (BART)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.core import Model
from headwater.data.collate import TrainBatch, without_padding_mask
from headwater.data.corruption import denoising_batch, sentence_end_ids, span_corruption_batch
from headwater.data.examples import DocumentChunk
from headwater.families.builders import transformer
from headwater.tasks.base import TaskConfig, TaskData, stack_sizes
from headwater.tasks.language_model import CausalLMDataset, LanguageModel
from headwater.text.tokenizer import Tokenizer


class SpanCorruptionDataset(CausalLMDataset):
    """Span corruption (T5): predict the spans behind the sentinels."""

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        rows = self.inner_rows(examples, epoch)
        return without_padding_mask(span_corruption_batch(rows, self.special_tokens, examples, self.seed, epoch))


class DenoisingDataset(CausalLMDataset):
    """Denoising (BART): reconstruct the text. sentence_end_ids: tokens that end a sentence."""

    sentence_end_ids: np.ndarray = np.zeros(0, np.int64)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        rows = self.inner_rows(examples, epoch)
        return without_padding_mask(
            denoising_batch(rows, self.special_tokens, self.sentence_end_ids, examples, self.seed, epoch)
        )


class SpanCorruption(LanguageModel):
    """Span corruption on one stream of tokens (T5)."""

    objective = "span-corruption"
    num_sentinels = 100
    stacks = (True, True)
    dataset_type = SpanCorruptionDataset

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return transformer(vocab_size, **stack_sizes(config))


class Denoising(LanguageModel):
    """Denoising on one stream of tokens (BART)."""

    objective = "denoising"
    stacks = (True, True)
    dataset_type = DenoisingDataset

    def build_datasets(
        self, config: TaskConfig, tokenizer: Tokenizer, train: Sequence[DocumentChunk], valid: Sequence[DocumentChunk]
    ) -> TaskData:
        data = super().build_datasets(config, tokenizer, train, valid)
        for dataset in (data.train, data.valid):
            assert isinstance(dataset, DenoisingDataset)
            dataset.sentence_end_ids = sentence_end_ids(tokenizer)
        return data

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return transformer(vocab_size, **stack_sizes(config))
