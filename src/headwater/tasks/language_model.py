"""Language modelling of running text: causal, on one token stream, or on packed documents.

Without a validation file the end of the text is the validation set. Objectives that pretrain an encoder are in
masked_lm.py, those of an encoder-decoder in denoising.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from headwater.core import LMHead, Model
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens, TrainBatch, causal_batch, packed_causal_batch
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, DocumentChunk, validation_start
from headwater.data.metrics import perplexity
from headwater.data.ragged import Ragged, build_packed_rows, encode_rows, pack_documents, stream_rows, stream_starts
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder
from headwater.generation.api import TextModel, generate
from headwater.i18n import _
from headwater.tasks.base import Task, TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch, forward_hidden
from headwater.tasks.losses import chunked_cross_entropy, cross_entropy, recomputed_cross_entropy
from headwater.text.tokenizer import Tokenizer
from headwater.tuning.paths import LINEAR_TYPES

MIN_TRAIN_TOKENS = 16  # a text with fewer is refused
DEFAULT_VALID_FRACTION = 0.05


# ----------------------------------------------------------------------------------------------------------------- loss


def lm_loss(model: Transformer, batch: TensorBatch, label_smoothing: float = 0.0) -> Tensor:
    """Language modelling loss: the next token (causal, seq2seq) or a masked one (mlm) at each target position."""
    hidden_states, inputs = forward_hidden(model, batch)
    return lm_head_loss(model.head, hidden_states, inputs, batch["targets"], label_smoothing)


def lm_head_loss(
    head: Any, hidden_states: Tensor, inputs: ModelInputs, targets: Tensor, label_smoothing: float
) -> Tensor:
    """Cross-entropy of the logits of a language model head, without holding all logits where it is one matrix."""
    out = getattr(head, "out", None)
    if not isinstance(out, LINEAR_TYPES):  # a head that is more than a matrix computes its own logits
        return cross_entropy(head(hidden_states, inputs), targets, label_smoothing)
    hidden_states = head.transform(hidden_states)
    hidden_states = hidden_states if head.scale == 1.0 else hidden_states * head.scale
    if type(out) is not nn.Linear:
        return recomputed_cross_entropy(hidden_states, out, targets, label_smoothing)
    return chunked_cross_entropy(hidden_states, head.out.weight, head.out.bias, targets, label_smoothing)


# ------------------------------------------------------------------------------------------------------------- datasets


class CausalLMDataset(Dataset):
    """Causal language modelling: rows of one token stream, cut at other offsets in each epoch."""

    def __init__(
        self, stream: np.ndarray, context_length: int, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        rows = len(stream_starts(len(stream), context_length, seed, 0))
        super().__init__(np.full((rows, 1), context_length), special_tokens, max(batch_tokens, context_length), seed)
        self.stream = stream
        self.context_length = context_length

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        return causal_batch(self.rows(examples, epoch))

    def rows(self, examples: np.ndarray, epoch: int) -> np.ndarray:
        """[B, C + 1] token ids."""
        starts = stream_starts(len(self.stream), self.context_length, self.seed, epoch)
        return stream_rows(self.stream, starts[examples], self.context_length)

    def inner_rows(self, examples: np.ndarray, epoch: int) -> Ragged:
        """The rows, shortened by the room for two special tokens around each."""
        rows = self.rows(examples, epoch)
        inner = rows[:, : rows.shape[1] - 3]
        return Ragged(inner.ravel(), np.arange(len(inner) + 1) * inner.shape[1])


class PackedDataset(Dataset):
    """Packed documents: several in a row, with attention within each; little padding."""

    def __init__(
        self, documents: Ragged, context_length: int, special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        self.documents = documents
        self.rows = pack_documents(documents, context_length)
        self.context_length = context_length
        lengths = np.array([int(documents.lengths[row].sum()) for row in self.rows])
        super().__init__(lengths, special_tokens, max(batch_tokens, context_length), seed)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        width = int(self.lengths[examples].max(initial=0))
        rows = [self.rows[i] for i in examples]
        return packed_causal_batch(build_packed_rows(self.documents, rows, width, self.special_tokens.pad_id))


# ---------------------------------------------------------------------------------------------------------------- tasks


class LanguageModel(Task[DocumentChunk]):
    """A language model. Subclasses are its objectives: they say how a stream becomes a dataset, and which model it is.

    The datasets are of one stream: all documents, with <eos> between them.
    """

    name = "language-model"
    example_format = EXAMPLE_FORMATS["language-model"]
    generates_text = True
    default_metric = "loss"
    dataset_type: type[CausalLMDataset] = CausalLMDataset

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[DocumentChunk],
        valid: Sequence[DocumentChunk],
        labels: Sequence[str] = (),
    ) -> TaskData:
        data = self.build_datasets(config, tokenizer, train, valid)
        if not valid and data.num_tokens < MIN_TRAIN_TOKENS:
            raise BadInput(
                _(
                    "the text must have at least {FEWEST_TOKENS} tokens to learn from once its end is held "
                    "out, it has {tokens}; give more text",
                    FEWEST_TOKENS=MIN_TRAIN_TOKENS,
                    tokens=data.num_tokens,
                )
            )
        return data

    def build_datasets(
        self, config: TaskConfig, tokenizer: Tokenizer, train: Sequence[DocumentChunk], valid: Sequence[DocumentChunk]
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        ids = _concatenate_documents(tokenizer, train, special_tokens)
        valid_ids = _concatenate_documents(tokenizer, valid, special_tokens)
        if not valid:
            cut = validation_start(len(ids), config.valid_fraction or DEFAULT_VALID_FRACTION, min_length=2)
            ids, valid_ids = ids[:cut], ids[cut:]
        context = min(config.context_length, len(ids) - 1, len(valid_ids) - 1)
        notes: list[str] = []
        if context < config.context_length:
            notes.append(_("the text is short: the context is {context} tokens", context=context))
        train_set, valid_set = (
            self.dataset_type(stream, context, special_tokens, config.batch_tokens, config.seed)
            for stream in (ids, valid_ids)
        )
        return TaskData(self, tokenizer, train_set, valid_set, notes=notes, num_tokens=len(ids))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return lm_loss(model, batch, label_smoothing)

    def predict(
        self, model: Transformer, tokenizer: Tokenizer, metadata: TaskMetadata, inputs: Sequence[str], **options: Any
    ) -> list[str]:
        """Continue texts; options: those of headwater.generate."""
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        text_model = TextModel(
            model, tokenizer, eos_ids=(special_tokens.eos_id,), decoder_start_id=special_tokens.bos_id
        )
        prompts = [tuple(self.encode_input(tokenizer, text)) or (special_tokens.bos_id,) for text in inputs]
        answers = generate(text_model, prompts, **options)
        return [text + answer.text for text, answer in zip(inputs, answers, strict=True)]

    def encode_input(self, tokenizer: Tokenizer, text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    def loss_metrics(self, loss: float) -> dict[str, float]:
        return {"loss": loss, "perplexity": perplexity(loss, 1)}

    def report(self, outputs: list[Any], references: list[Any]) -> Mapping[str, Any]:
        return {}

    @property
    def command(self) -> str:
        """Objectives without a verb pretrain a model for another task."""
        return super().command if self.verb else "headwater train FILE --init-from {run}"


class CausalLM(LanguageModel):
    """Next-token prediction on one stream of tokens (GPT)."""

    objective = "causal"
    verb = "generate"
    stacks = (False, True)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return decoder(vocab_size, activation="gelu", **stack_sizes(config))


class PackedCausalLM(CausalLM):
    """Next-token prediction on packed documents, each from <bos> to <eos>; longer ones than the context are split."""

    objective = "packed"

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        spec = super().model_spec(config, vocab_size, num_labels)
        spec.on_meta().output_stack.require("packing", BadSetting)
        return spec

    def build_datasets(
        self, config: TaskConfig, tokenizer: Tokenizer, train: Sequence[DocumentChunk], valid: Sequence[DocumentChunk]
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        documents = _tokenize_documents(tokenizer, train, special_tokens, config.context_length)
        valid_documents = _tokenize_documents(tokenizer, valid, special_tokens, config.context_length)
        if not valid:
            requirement = _("objective packed needs two documents (files, or rows of JSONL)")
            cut = num_train(len(documents), config.valid_fraction, requirement)
            valid_documents = documents.take(np.arange(cut, len(documents)))
            documents = documents.take(np.arange(cut))
        train_set, valid_set = (
            PackedDataset(each, config.context_length, special_tokens, config.batch_tokens, config.seed)
            for each in (documents, valid_documents)
        )
        return TaskData(self, tokenizer, train_set, valid_set, num_tokens=len(documents.values))


def _concatenate_documents(
    tokenizer: Tokenizer, chunks: Iterable[DocumentChunk], special_tokens: SpecialTokens
) -> np.ndarray:
    """The token ids of all chunks, with <eos> between documents."""
    ids: list[np.ndarray] = []
    last = None
    for chunk in chunks:
        if last is not None and chunk.document_id != last:
            ids.append(np.array([special_tokens.eos_id]))
        last = chunk.document_id
        ids.append(encode_rows(tokenizer, [chunk.text]).values)
    return np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32)


def _tokenize_documents(
    tokenizer: Tokenizer, chunks: Iterable[DocumentChunk], special_tokens: SpecialTokens, context_length: int
) -> Ragged:
    """The token ids of each document, split where it is longer than the context."""
    texts: dict[int, list[str]] = {}
    for chunk in chunks:
        texts.setdefault(chunk.document_id, []).append(chunk.text)
    rows = encode_rows(tokenizer, map("".join, texts.values()))
    rows = rows.with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    starts = [np.arange(a, b, context_length) for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)]
    return Ragged(rows.values, np.append(np.concatenate([np.zeros(0, np.int64), *starts]), rows.offsets[-1]))


def num_train(size: int, valid_fraction: float, requirement: str) -> int:
    """The number of training items of `size`: all but valid_fraction, at least one on each side."""
    if size < 2:
        raise BadInput(_("{law}, there are too few; give more text, or --objective causal or mlm", law=requirement))
    return min(size - 1, max(1, int(size * (1 - (valid_fraction or DEFAULT_VALID_FRACTION)))))
