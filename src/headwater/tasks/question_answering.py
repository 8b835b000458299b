"""Extractive question answering: the span of a context that answers a question, or no answer (SQuAD 2.0).

An encoder with a start and an end logit per token. A long context is read in overlapping windows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.core import Model, TokenClassificationHead
from headwater.core.model import Transformer
from headwater.data.collate import QAWindow, SpecialTokens, TrainBatch, qa_batch, qa_windows, span_text
from headwater.data.dataset import Dataset, evenly_spaced
from headwater.data.examples import EXAMPLE_FORMATS, QAExample
from headwater.data.metrics import squad_scores
from headwater.families.builders import encoder, with_token_types
from headwater.tasks.base import EvalBatch, Predictions, Task, TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch, forward_hidden, forward_logits, to_tensors
from headwater.tasks.losses import count_targets, span_loss
from headwater.text.tokenizer import Tokenizer

QA_WINDOW = 256  # tokens of a window of the context
QA_STRIDE = 96  # tokens between the starts of two windows
MAX_ANSWER_TOKENS = 30  # of an answer span
NULL_THRESHOLD = 0.0  # the default of SQuAD 2.0
NO_ANSWER = "(no answer)"  # how samples show an empty answer


class QADataset(Dataset):
    """Question answering: windows of contexts. question_of_window [N]: the question of each window."""

    def __init__(
        self,
        windows_by_question: Sequence[Sequence[QAWindow]],
        special_tokens: SpecialTokens,
        batch_tokens: int,
        seed: int,
    ) -> None:
        self.windows = [window for some in windows_by_question for window in some]
        windows_per_question = [len(some) for some in windows_by_question]
        self.question_of_window = np.repeat(np.arange(len(windows_by_question)), windows_per_question)
        super().__init__(np.array([len(w.ids) for w in self.windows]), special_tokens, batch_tokens, seed)

    def sample_rows(self, max_examples: int) -> np.ndarray:
        """All windows of at most max_examples questions."""
        questions = evenly_spaced(int(self.question_of_window[-1]) + 1, max_examples)
        return np.flatnonzero(np.isin(self.question_of_window, questions))

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        return qa_batch([self.windows[i] for i in examples], self.special_tokens)


class QuestionAnswering(Task[QAExample]):
    """Extractive question answering."""

    name = "question-answering"
    verb = "answer"
    example_format = EXAMPLE_FORMATS["question-answering"]
    default_metric = "f1"

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[QAExample],
        valid: Sequence[QAExample],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        width = config.max_length or QA_WINDOW
        stride = min(QA_STRIDE, width // 3)

        def build(rows: Sequence[QAExample]) -> QADataset:
            windows = [qa_windows(row, tokenizer, special_tokens, width, stride) for row in rows]
            return QADataset(windows, special_tokens, config.batch_tokens, config.seed)

        train_set = build(train)
        null_threshold = None if all(row.answers for row in train) else NULL_THRESHOLD
        num_tokens = int(train_set.lengths.sum())
        return TaskData(
            self, tokenizer, train_set, build(valid), valid, num_tokens=num_tokens, null_threshold=null_threshold
        )

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        head = TokenClassificationHead(2)  # start and end
        return with_token_types(encoder(vocab_size, head, activation="gelu", **stack_sizes(config)), 3)

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """The loss of the start and end token of the answer. targets [B, 2]."""
        hidden_states, inputs = forward_hidden(model, batch)
        starts, ends = batch["targets"].unbind(1)
        return span_loss(model.head(hidden_states, inputs), starts, ends, batch.get("attention_mask"))

    def num_targets(self, batch: TensorBatch) -> int:
        """The number of spans."""
        return int(count_targets(batch["targets"][:, 0]))

    @torch.no_grad()
    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[QAExample],
        null_threshold: float | None = None,
    ) -> list[str]:
        """The answer span, or '' where "no answer" scores higher by the threshold.

        The threshold is the run's own (0, as in SQuAD 2.0) unless it is given. A run whose training questions all had
        an answer has none: its model was never taught to say that there is no answer.
        """
        if null_threshold is None:
            null_threshold = metadata.get("null_threshold", NULL_THRESHOLD)
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        outputs: list[str] = []
        for question in inputs:
            prediction = SpanPrediction()
            for window in qa_windows(question, tokenizer, special_tokens, QA_WINDOW, QA_STRIDE):
                batch = to_tensors(qa_batch([window], special_tokens))
                start_logits, end_logits = forward_logits(model, batch)[0].float().unbind(-1)  # [L]
                prediction.add(question.context, window, start_logits, end_logits)
            outputs.append(prediction.answer(null_threshold))
        return outputs

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, SpanPrediction]:
        """The best span of each window."""
        dataset = data.valid
        assert isinstance(dataset, QADataset)
        outputs: dict[int, SpanPrediction] = {}
        for rows, batch in batches:
            starts, ends = forward_logits(model, batch).float().unbind(-1)  # [B, L]
            for row, start, end in zip(rows, starts, ends, strict=True):
                context = data.valid_examples[dataset.question_of_window[row]].context
                outputs[int(row)] = SpanPrediction()
                outputs[int(row)].add(context, dataset.windows[row], start, end)
        return outputs

    def collect_predictions(self, outputs: Mapping[int, SpanPrediction], data: TaskData) -> Predictions:
        """The predicted answer of each question, from the best spans of all its windows."""
        dataset = data.valid
        assert isinstance(dataset, QADataset)
        questions: dict[int, SpanPrediction] = defaultdict(SpanPrediction)
        for row in sorted(outputs):
            questions[int(dataset.question_of_window[row])].merge(outputs[row])
        answers = {question: best.answer(data.null_threshold) for question, best in questions.items()}
        return super().collect_predictions(answers, data)

    def reference(self, example: QAExample) -> tuple[str, ...]:
        return example.answers

    @property
    def command(self) -> str:
        return 'headwater answer {run} "question" --text FILE'

    def metrics(self, outputs: list[str], references: list[tuple[str, ...]], data: TaskData) -> dict[str, float]:
        return squad_scores(outputs, references)

    def format_input(self, example: QAExample) -> str:
        return example.question

    def format_output(self, example: QAExample, output: str | Sequence[str]) -> str:
        """Of several references the first."""
        if not output:
            return NO_ANSWER
        return output if isinstance(output, str) else output[0]


@dataclass
class SpanPrediction:
    """The best span of one question over its windows, beside the score of no answer (SQuAD 2.0, Rajpurkar et al. 2018).

    A window scores no answer by its position 0: start_logits[0] + end_logits[0]. The null score is the minimum over the
    windows, because a window without the answer says only that the answer is elsewhere.
    """

    text: str = ""
    score: float = -math.inf
    null_score: float = math.inf

    def add(self, context: str, window: QAWindow, start_logits: Tensor, end_logits: Tensor) -> None:
        """Take the logits [L] of one more window into account."""
        self.null_score = min(self.null_score, float(start_logits[0] + end_logits[0]))
        if not window.offsets:
            return
        score, first, last = best_span(
            start_logits, end_logits, window.context_start, window.context_start + len(window.offsets)
        )
        if score > self.score:
            self.score = score
            self.text = span_text(context, window, first, last)

    def merge(self, other: SpanPrediction) -> None:
        """Take the prediction from another window into account."""
        self.null_score = min(self.null_score, other.null_score)
        if other.score > self.score:
            self.score = other.score
            self.text = other.text

    def answer(self, null_threshold: float | None) -> str:
        """The best span, or '' where the null score exceeds its score by more than the threshold (None: never)."""
        if null_threshold is not None and self.null_score - self.score > null_threshold:
            return ""
        return self.text


def best_span(start_logits: Tensor, end_logits: Tensor, low: int, high: int) -> tuple[float, int, int]:
    """(score, start, end) of the best span within [low, high) of at most MAX_ANSWER_TOKENS tokens."""
    scores = start_logits[low:high, None] + end_logits[None, low:high]  # [starts, ends]
    width = high - low
    positions = torch.arange(width, device=start_logits.device)
    invalid = (positions[None] < positions[:, None]) | (positions[None] - positions[:, None] >= MAX_ANSWER_TOKENS)
    scores = scores.masked_fill(invalid, -torch.inf)
    at = int(scores.argmax())
    return float(scores.flatten()[at]), low + at // width, low + at % width
