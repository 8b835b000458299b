"""Masked language modelling, which pretrains an encoder (BERT): alone, or with next sentence prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from headwater.core import ClassificationHead, LMHead, Model
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.data.corruption import mlm_batch, mlm_nsp_batch, next_sentence_pairs
from headwater.data.dataset import Dataset
from headwater.data.examples import DocumentChunk
from headwater.data.ragged import Ragged, encode_rows
from headwater.families.builders import encoder, with_token_types
from headwater.i18n import _
from headwater.tasks.base import TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch, forward_hidden
from headwater.tasks.language_model import CausalLMDataset, LanguageModel, lm_head_loss, num_train
from headwater.tasks.losses import cross_entropy
from headwater.text.tokenizer import Tokenizer
from headwater.variants.multi_task_head import MultiTaskHead


class MLMDataset(CausalLMDataset):
    """Masked language modelling: other tokens of each row are masked in each epoch."""

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        return mlm_batch(self.inner_rows(examples, epoch), self.special_tokens, examples, self.seed, epoch)


class MLMNSPDataset(Dataset):
    """Masked language modelling and next sentence prediction (BERT) on pairs of sentences.

    The length of a row is that of its first sentence and the next, whichever it is paired with.
    """

    def __init__(
        self, sentences: Ragged, document_ids: np.ndarray, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        self.sentences = sentences
        self.document_ids = document_ids
        first = next_sentence_pairs(document_ids, seed, 0).first
        lengths = sentences.lengths[first] + sentences.lengths[first + 1] + 3
        super().__init__(lengths, special_tokens, batch_tokens, seed)
        self._epoch_pairs = -1, next_sentence_pairs(document_ids, seed, 0)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        if self._epoch_pairs[0] != epoch:
            self._epoch_pairs = epoch, next_sentence_pairs(self.document_ids, self.seed, epoch)
        return mlm_nsp_batch(self.sentences, self._epoch_pairs[1], examples, self.special_tokens, self.seed, epoch)


class MaskedLM(LanguageModel):
    """Masked language modelling on one stream of tokens."""

    objective = "mlm"
    stacks = (True, False)
    dataset_type = MLMDataset

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return encoder(vocab_size, activation="gelu", **stack_sizes(config))


class MaskedLMNextSentence(LanguageModel):
    """Masked language modelling and next sentence prediction: every target counts the same.

    The text has a sentence per line and a blank line between documents; half of the context is for each sentence.
    """

    objective = "mlm-nsp"
    stacks = (True, False)

    def build_datasets(
        self, config: TaskConfig, tokenizer: Tokenizer, train: Sequence[DocumentChunk], valid: Sequence[DocumentChunk]
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        max_length = (config.context_length - 3) // 2
        sides = [_split_sentences(chunks) for chunks in (train, valid)]
        if not valid:
            texts, document_ids = sides[0]
            num_documents = int(document_ids[-1]) + 1 if len(document_ids) else 0
            requirement = _("objective mlm-nsp needs four documents, separated by blank lines")
            cut = num_train(num_documents - 1, config.valid_fraction, requirement)
            cut = int(np.searchsorted(document_ids, min(cut, num_documents - 2)))  # two documents at least on each side
            sides = [(texts[:cut], document_ids[:cut]), (texts[cut:], document_ids[cut:])]
        datasets = [
            MLMNSPDataset(
                encode_rows(tokenizer, texts).truncate(max_length),
                document_ids,
                special_tokens,
                config.batch_tokens,
                config.seed,
            )
            for texts, document_ids in sides
        ]
        num_tokens = len(datasets[0].sentences.values)
        return TaskData(self, tokenizer, datasets[0], datasets[1], num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        head = MultiTaskHead((("language", LMHead(vocab_size)), ("next_sentence", ClassificationHead(2))))
        spec = with_token_types(encoder(vocab_size, head, activation="gelu", **stack_sizes(config)), 2)
        return replace(spec, tied=(("head.language.out", "encoder.embed.tokens"),))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, MultiTaskHead)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        hidden_states, inputs = forward_hidden(model, batch)
        heads = model.head
        assert isinstance(heads, nn.ModuleDict)
        mlm_loss = lm_head_loss(heads["language"], hidden_states, inputs, batch["targets"], label_smoothing)
        nsp_logits = heads["next_sentence"](hidden_states, inputs)  # [B, 2]
        return mlm_loss + cross_entropy(nsp_logits, batch["next_sentence_labels"])

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """The loss is of tokens and of sentences, so there is no perplexity."""
        return {"loss": loss}


def _split_sentences(chunks: Iterable[DocumentChunk]) -> tuple[list[str], np.ndarray]:
    """Sentences, and the document index of each."""
    texts: list[str] = []
    document_ids: list[int] = []
    document = 0
    last = None
    for chunk in chunks:
        if last is not None and chunk.document_id != last:
            document += bool(document_ids) and document_ids[-1] == document
        last = chunk.document_id
        for line in chunk.text.splitlines():
            if line.strip():
                texts.append(line.strip())
                document_ids.append(document)
            else:
                document += bool(document_ids) and document_ids[-1] == document
    return texts, np.array(document_ids, np.int64)
