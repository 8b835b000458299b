"""Chat: instruction tuning of a decoder on conversations. The loss is on the answers and their end of turn alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from headwater.core import LMHead, Model
from headwater.core.model import Transformer
from headwater.data.answers import AnswerRow, AnswerRows, ChatEncoder, answer_batch, text_spans
from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.data.conversations import CHAT_FORMAT, ChatTurn, Conversation
from headwater.data.dataset import Dataset
from headwater.data.examples import Example
from headwater.data.metrics import accuracy, chrf, rouge
from headwater.data.ragged import pack_documents
from headwater.errors import BadInput
from headwater.families.builders import decoder
from headwater.generation.api import TextModel, generate
from headwater.generation.request import FinishReason
from headwater.i18n import _
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch
from headwater.tasks.language_model import lm_loss
from headwater.text.chat_templates import choose_template
from headwater.text.tokenizer import Tokenizer
from headwater.tuning.hooks import TOKEN_METHODS

E = TypeVar("E", bound=Example)
DEFAULT_CHAT_LENGTH = 1024  # tokens of a conversation
MAX_NEW_TOKENS = 256  # of an answer in an evaluation
BATCH_SIZE = 32  # prompts that are answered at once


class ChatOutput(NamedTuple):
    """An answer of the model. ended: it ended by itself, not at the limit of tokens."""

    text: str
    ended: bool


class ChatDataset(Dataset):
    """Conversations, packed several to a row with attention within each; or one to a row.

    groups: the conversations of each row.
    """

    def __init__(
        self, rows: AnswerRows, groups: list[np.ndarray], special_tokens: SpecialTokens, batch_tokens: int, seed: int
    ) -> None:
        self.rows = rows
        self.groups = groups
        lengths = np.array([int(rows.ids.lengths[group].sum()) for group in groups])
        super().__init__(lengths, special_tokens, max(batch_tokens, int(lengths.max(initial=1))), seed)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        width = int(self.lengths[examples].max(initial=0))
        groups = [self.groups[i] for i in examples]
        batch = answer_batch(self.rows, groups, width, self.special_tokens.pad_id)
        is_packed = any(len(group) > 1 for group in groups)
        return batch if is_packed else replace(batch, document_ids=None)


def one_to_a_row(rows: AnswerRows) -> list[np.ndarray]:
    """The groups of rows that share a row with no other."""
    return [np.array([i]) for i in range(len(rows.ids))]


class ChatModelTask(Task[E]):
    """A task whose model answers in a conversation: instruction tuning, preferences, rewards."""

    verb = "chat"
    generates_text = True
    stacks = (False, True)
    output_columns = ("answer",)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return decoder(vocab_size, activation="gelu", **stack_sizes(config))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def predict(
        self, model: Transformer, tokenizer: Tokenizer, metadata: TaskMetadata, inputs: Sequence[str], **options: Any
    ) -> list[str]:
        """Answer messages, each in a conversation of its own; options: those of headwater.generate."""
        turns = [(ChatTurn("user", text),) for text in inputs]
        outputs = answer_prompts(model, tokenizer, metadata.get("eos_ids", ()), turns, **options)
        return [output.text for output in outputs]

    @property
    def command(self) -> str:
        return "headwater chat {run}"

    def usage(self, tokenizer: Tokenizer) -> str:
        """Without a chat template there is no conversation: the prompt is a text that the answer continues."""
        return self.command if tokenizer.chat_template else 'headwater generate {run} "…"'


class Chat(ChatModelTask[Conversation]):
    """Instruction tuning."""

    name = "chat"
    example_format = CHAT_FORMAT

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[Conversation],
        valid: Sequence[Conversation],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []
        encoder = chat_encoder(config, tokenizer, notes)
        encoder.check_generation_prompt(train[0].turns)
        width = config.max_length or DEFAULT_CHAT_LENGTH
        train_rows, _train_examples = encode_conversations(encoder, train, config, "train", notes)
        valid_rows, valid_examples = encode_conversations(encoder, valid, config, "valid", notes)
        is_packed = config.tune not in TOKEN_METHODS
        groups = pack_documents(train_rows.ids, width) if is_packed else one_to_a_row(train_rows)
        train_set = ChatDataset(train_rows, groups, special_tokens, config.batch_tokens, config.seed)
        valid_set = ChatDataset(valid_rows, one_to_a_row(valid_rows), special_tokens, config.batch_tokens, config.seed)
        first = AnswerRow(train_rows.ids[0].tolist(), [bool(n) for n in train_rows.learned[0]])
        return TaskData(
            self,
            tokenizer,
            train_set,
            valid_set,
            valid_examples,
            notes=notes,
            num_tokens=len(train_rows.ids.values),
            num_learned=int(train_rows.num_learned.sum()),
            preview=tuple(text_spans(tokenizer, first)),
            eos_ids=tuple(encoder.eos_ids),
        )

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        return lm_loss(model, batch, label_smoothing)

    # --------------------------------------------------------------------------------------------------- predictions

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, ChatOutput]:
        """Greedy answers to the last message of each conversation."""
        outputs: dict[int, ChatOutput] = {}
        for rows, _batch in batches:
            examples = [data.valid_examples[row] for row in rows]
            prompts = [example.prompt for example in examples]
            longest = max(len(data.tokenizer.encode(example.answer)) for example in examples)
            limit = min(MAX_NEW_TOKENS, 2 * longest + 20)
            answers = answer_prompts(model, data.tokenizer, data.eos_ids, prompts, max_tokens=limit)
            outputs |= {int(row): answer for row, answer in zip(rows, answers, strict=True)}
        return outputs

    def reference(self, example: Conversation) -> str:
        return example.answer

    def metrics(self, outputs: list[ChatOutput], references: list[str], data: TaskData) -> dict[str, float]:
        texts = [output.text for output in outputs]
        return {
            "chrf": chrf(texts, references),
            "rougeL": rouge(texts, references)["rougeL"],
            "exact": accuracy(texts, references),
            "ended": 100 * sum(output.ended for output in outputs) / max(1, len(outputs)),
        }

    def loss_metrics(self, loss: float) -> dict[str, float]:
        return {"loss": loss}

    def report(self, outputs: list[Any], references: list[Any]) -> Mapping[str, Any]:
        return {"rows": len(references)}

    def format_input(self, example: Conversation) -> str:
        return example.prompt[-1].content

    def output_line(self, output: Any) -> str:
        text = output.text if isinstance(output, ChatOutput) else str(output)
        return text.replace("\n", "⏎")


# --------------------------------------------------------------------------------------------- shared with preferences


def chat_encoder(config: TaskConfig, tokenizer: Tokenizer, notes: list[str]) -> ChatEncoder:
    """The encoder of conversations, in the chosen chat template, which becomes the tokenizer's own."""
    if config.chat_template == "auto" and not tokenizer.chat_template:
        notes.append(_("the model has no chat template; the template plain is used (--chat-template)"))
    tokenizer.chat_template = choose_template(config.chat_template, tokenizer)
    return ChatEncoder(tokenizer, SpecialTokens.from_tokenizer(tokenizer).eos_id)


def encode_conversations(
    encoder: ChatEncoder, examples: Sequence[Conversation], config: TaskConfig, split: str, notes: list[str]
) -> tuple[AnswerRows, list[Conversation]]:
    """The rows of conversations that are short enough and have something to learn, and the example of each row."""
    rows: list[AnswerRow] = []
    kept: list[Conversation] = []
    problems: dict[str, int] = {}
    for example in examples:
        try:
            encoded = encoder.conversation_rows(example.turns)
        except BadInput as error:
            problems[str(error)] = problems.get(str(error), 0) + 1
            continue
        rows += encoded
        kept += [example] * len(encoded)
    answers, left = keep_short(AnswerRows.from_rows(rows), config, split, notes)
    notes += [_("{n} {name} rows left out: {reason}", n=n, name=split, reason=reason) for reason, n in problems.items()]
    if not len(left):
        reason = next(iter(problems), _("every answer is beyond the limit of tokens; raise --max-length"))
        raise BadInput(_("{name}: there is no answer token to learn from: {reason}", name=split, reason=reason))
    return answers, [kept[i] for i in left]


def keep_short(rows: AnswerRows, config: TaskConfig, split: str, notes: list[str]) -> tuple[AnswerRows, np.ndarray]:
    """The rows within the maximum length that have a learned token, and their indices; a note counts the others."""
    limit = config.max_length or DEFAULT_CHAT_LENGTH
    total = len(rows.ids)
    if config.truncate:
        rows = rows.truncate(limit)
    left = np.flatnonzero((rows.ids.lengths <= limit) & (rows.num_learned > 0))
    if len(left) < total:
        notes.append(
            _(
                "{n:,} of {total:,} {name} rows have no answer within {limit} tokens and are left out",
                n=total - len(left),
                total=total,
                name=split,
                limit=limit,
            )
        )
    return rows.take(left), left


def answer_prompts(
    model: Transformer,
    tokenizer: Tokenizer,
    eos_ids: Sequence[int],
    prompts: Sequence[Sequence[ChatTurn]],
    **options: Any,
) -> list[ChatOutput]:
    """The model's answers to conversations that end with a message to it."""
    special_tokens = SpecialTokens.from_tokenizer(tokenizer)
    encoder = ChatEncoder(tokenizer, special_tokens.eos_id)
    text_model = TextModel(model, tokenizer, eos_ids=tuple(eos_ids) or (special_tokens.eos_id,))
    outputs: list[ChatOutput] = []
    for first in range(0, len(prompts), BATCH_SIZE):
        ids = [tuple(encoder.prompt_ids(turns)) for turns in prompts[first : first + BATCH_SIZE]]
        for answer in generate(text_model, ids, **options):
            outputs.append(ChatOutput(answer.text, answer.finish_reason is FinishReason.EOS))
    return outputs
