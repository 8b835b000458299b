"""Sequence to sequence: translation, summarization, description to code. An encoder-decoder with teacher forcing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core import LMHead, Model
from headwater.core.cache import dynamic_cache
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.data.augment import Augmenter
from headwater.data.collate import SpecialTokens, TrainBatch, seq2seq_batch, without_padding_mask
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, TextPair
from headwater.data.metrics import accuracy, bleu, chrf, rouge
from headwater.data.ragged import Ragged, encode_rows
from headwater.errors import BadSetting
from headwater.families.builders import transformer
from headwater.generation.api import TextModel, generate
from headwater.generation.beam import Beam
from headwater.i18n import _
from headwater.tasks.base import (
    EvalBatch,
    Task,
    TaskConfig,
    TaskData,
    TaskMetadata,
    build_augmenter,
    max_length,
    rows_within_max_length,
    stack_sizes,
)
from headwater.tasks.batch import TensorBatch
from headwater.tasks.language_model import lm_loss
from headwater.text.tokenizer import Tokenizer

BATCH_SIZE = 64  # texts that are generated at once


class Seq2SeqDataset(Dataset):
    """Sequence to sequence: pairs of source and target."""

    augmenter: Augmenter | None = None  # the sources as texts, where they are augmented

    def __init__(
        self, sources: Ragged, targets: Ragged, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        super().__init__(np.stack([sources.lengths + 2, targets.lengths + 1], 1), special_tokens, batch_tokens, seed)
        self.sources = sources
        self.targets = targets

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        sources = self.augmenter.encode(examples, epoch) if self.augmenter else self.sources.take(examples)
        return without_padding_mask(seq2seq_batch(sources, self.targets.take(examples), self.special_tokens))


class Seq2Seq(Task[TextPair]):
    """Sequence to sequence."""

    name = "seq2seq"
    verb = "translate"
    example_format = EXAMPLE_FORMATS["seq2seq"]
    augmentable = True
    generates_text = True
    default_position = "sinusoidal"
    stacks = (True, True)
    default_metric = "bleu"
    output_columns = ("translation",)

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[TextPair],
        valid: Sequence[TextPair],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []

        def build(split: str, rows: Sequence[TextPair]) -> tuple[Seq2SeqDataset, list[TextPair]]:
            sources = encode_rows(tokenizer, (row.source for row in rows))
            targets = encode_rows(tokenizer, (row.target for row in rows))
            if config.truncate:
                sources = sources.truncate(max_length(config))
            short = rows_within_max_length(config, np.maximum(sources.lengths, targets.lengths), split, notes)
            dataset = Seq2SeqDataset(
                sources.take(short), targets.take(short), special_tokens, config.batch_tokens, config.seed
            )
            return dataset, [rows[i] for i in short]

        train_set, train_rows = build("train", train)
        train_set.augmenter = build_augmenter(config, tokenizer, [row.source for row in train_rows])
        valid_set, valid_rows = build("valid", valid)
        num_tokens = int(train_set.lengths.sum())
        return TaskData(self, tokenizer, train_set, valid_set, valid_rows, notes=notes, num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return transformer(vocab_size, **stack_sizes(config))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return lm_loss(model, batch, label_smoothing)

    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str],
        beam: int = 4,
        **options: Any,
    ) -> list[str]:
        """Translate texts by beam search; options: those of headwater.generate."""
        if beam < 1:
            raise BadSetting(_("beam must be at least 1 (which is greedy), got {beam}; 4 is usual", beam=beam))
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        text_model = TextModel(
            model, tokenizer, eos_ids=(special_tokens.eos_id,), decoder_start_id=special_tokens.bos_id
        )
        max_tokens = metadata.get("truncate_to") or None
        source_ids = [tokenizer.encode(text, add_special_tokens=False)[:max_tokens] for text in inputs]
        prompts = [(special_tokens.bos_id, *ids, special_tokens.eos_id) for ids in source_ids]
        outputs: list[str] = []
        for first in range(0, len(prompts), BATCH_SIZE):
            batch = prompts[first : first + BATCH_SIZE]
            generate_kwargs = {"max_tokens": 2 * max(map(len, batch)) + 20, **options}
            answers = generate(text_model, batch, strategy=Beam(beam) if beam > 1 else None, **generate_kwargs)
            outputs += [answer.text for answer in answers]
        return outputs

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, str]:
        """Output texts: by greedy decoding, or by beam search."""
        dataset = data.valid
        assert isinstance(dataset, Seq2SeqDataset)
        outputs: dict[int, str] = {}
        if beam > 1:
            rows = sorted(int(row) for batch in batches for row in batch.rows)
            sources = [data.valid_examples[row].source for row in rows]
            texts = self.predict(model, data.tokenizer, data.metadata, sources, beam)
            outputs = dict(zip(rows, texts, strict=True))
            batches = ()
        for batch_rows, batch in batches:
            ids = greedy_decode(
                model,
                batch["source"],
                batch.get("source_attention_mask"),
                dataset.special_tokens.bos_id,
                dataset.special_tokens.eos_id,
                max_new_tokens=2 * int(dataset.lengths[batch_rows, 1].max()) + 10,
            )
            for row, token_ids in zip(batch_rows, ids, strict=True):
                outputs[int(row)] = data.tokenizer.decode(token_ids)
        return outputs

    def reference(self, example: TextPair) -> str:
        return example.target

    def metrics(self, outputs: list[str], references: list[str], data: TaskData) -> dict[str, float]:
        target_language = data.languages[1] if len(data.languages) == 2 else ""
        return {
            "bleu": bleu(outputs, references, target_language),
            "chrf": chrf(outputs, references),
            "rougeL": rouge(outputs, references)["rougeL"],
            "exact": accuracy(outputs, references),
        }


@torch.no_grad()
def greedy_decode(
    model: Transformer, source: Tensor, source_attention_mask: Tensor | None, bos: int, eos: int, max_new_tokens: int
) -> list[list[int]]:
    """Output ids of each row of source [B, S], without special tokens. Finished rows leave the batch.

    A model without a KV cache (LSH attention, chunks) reads the outputs so far again for each token.
    """
    memory = model.encode(source, attention_mask=source_attention_mask)
    cache = None if "cache" in model.output_stack.unsupported else dynamic_cache(model)
    rows = torch.arange(len(source))
    ids = torch.full((len(source), 1), bos, dtype=torch.long, device=source.device)
    so_far = ids
    outputs: list[list[int]] = [[] for _ in range(len(source))]
    for _step in range(max_new_tokens):
        logits = model.decode(so_far if cache is None else ids, memory=memory, cache=cache)
        ids = logits[:, -1].argmax(-1, keepdim=True)  # [B, 1]
        so_far = torch.cat((so_far, ids), 1)
        for row, token in zip(rows.tolist(), ids[:, 0].tolist(), strict=True):
            if token != eos:
                outputs[row].append(token)
        unfinished = (ids[:, 0] != eos).nonzero()[:, 0]
        if not len(unfinished):
            break
        if len(unfinished) < len(ids):
            ids = ids[unfinished]
            so_far = so_far[unfinished]
            rows = rows[unfinished.cpu()]
            if cache is not None:
                cache.reorder(unfinished)
            memory = _select_rows(memory, unfinished)
    return outputs


def _select_rows(memory: ModelInputs, rows: Tensor) -> ModelInputs:
    tensors = {field.name: getattr(memory, field.name) for field in fields(memory)}
    selected = {name: tensor[rows] for name, tensor in tensors.items() if tensor is not None}
    return replace(memory, **selected)
