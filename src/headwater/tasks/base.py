"""Task: everything that is particular to one kind of task, in one object; and the registry TASKS.

A task says how its examples become a dataset, which model it needs, its loss, its predictions and its metrics. Readers,
trainer, evaluation and command line ask the task and know none by name. A new task is one file: a subclass of Task, and
register() of an instance of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

import numpy as np
from torch import Tensor

from headwater.core import LMHead, Model
from headwater.core.model import Transformer
from headwater.data.augment import Augmenter, parse_augmentations
from headwater.data.collate import SpecialTokens
from headwater.data.dataset import Dataset
from headwater.data.examples import EXAMPLE_FORMATS, Example, ExampleFormat, resolve_task
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.tasks.batch import PrepareStep, TensorBatch, no_preparation, num_targets
from headwater.tasks.task_config import TaskConfig
from headwater.text.tokenizer import Tokenizer
from headwater.vision.processor import ImageProcessor
from headwater.weights.native import save_native

DEFAULT_MAX_LENGTH = 512
E = TypeVar("E", bound=Example)


class TaskMetadata(TypedDict, total=False):
    """What a model folder says of its task."""

    task: str
    columns: dict[str, str]  # role -> column of the table it was trained on
    objective: str
    labels: list[str]
    languages: list[str]
    truncate_to: int
    null_threshold: float | None
    language: str  # of speech
    window_seconds: float  # of sounds: what the model hears at once
    eos_ids: list[int]  # the tokens that end an answer, where they are not the tokenizer's own
    processor: dict[str, Any]  # of images, as in preprocessor_config.json


@dataclass
class TaskData:
    """The datasets of a task. valid_examples: the validation examples, in the order of the validation dataset."""

    task: Task[Any]
    tokenizer: Tokenizer
    train: Dataset
    valid: Dataset
    valid_examples: Sequence[Any] = ()  # of the task's own type
    labels: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)  # role -> column of the table that was read
    languages: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    num_tokens: int = 0  # of the training set
    truncate_to: int = 0  # tokens to which longer texts are truncated; 0: not
    null_threshold: float | None = None  # of "no answer" over the best span; None: every question has one
    file_hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 by file name
    processor: ImageProcessor | None = None  # of images
    settings: Mapping[str, int | float] = field(default_factory=dict)  # that the data decided
    language: str = ""  # of speech; "": several, or not known
    window_seconds: float = 0.0  # of sounds: what the model hears at once
    num_learned: int = 0  # of num_tokens, those of answers, where only they are learned
    preview: tuple[tuple[str, bool], ...] = ()  # an example as it is learned: spans of text, and whether they are
    eos_ids: tuple[int, ...] = ()  # the tokens that end an answer; (): the tokenizer's own

    @property
    def metadata(self) -> TaskMetadata:
        """The metadata of a model folder."""
        metadata: TaskMetadata = {
            "task": self.task.name,
            "columns": dict(self.columns),
            "objective": self.task.objective,
            "labels": list(self.labels),
            "languages": list(self.languages),
            "truncate_to": self.truncate_to,
            "null_threshold": self.null_threshold,
        }
        if self.processor is not None:
            metadata["processor"] = self.processor.to_config()
        if self.window_seconds:
            metadata |= {"language": self.language, "window_seconds": self.window_seconds}
        return {**metadata, "eos_ids": list(self.eos_ids)} if self.eos_ids else metadata


class EvalBatch(NamedTuple):
    """A batch of the validation dataset: its row indices, and its tensors."""

    rows: np.ndarray
    batch: TensorBatch


class Predictions(NamedTuple):
    """Predictions of validation examples, sorted by row; their types are the task's."""

    rows: list[int]
    outputs: list[Any]
    references: list[Any]


class Task(ABC, Generic[E]):
    """A task: its examples, datasets, model, loss, predictions and metrics. Subclasses say what differs."""

    # what it is called
    name: str
    objective: str = ""  # the training objective, where the task has several
    verb: str = ""  # the command that uses a trained model, if there is one

    # its examples and datasets
    example_format: ExampleFormat
    augmentable: bool = False  # whether the inputs can be augmented
    num_sentinels: int = 0  # <extra_id_0> … that a trained tokenizer must have
    reads_text: bool = True  # whether its data is encoded by a tokenizer

    # its model
    default_steps: int = 0  # of a run that names no steps, epochs or time; 0: a number of epochs
    generates_text: bool = False  # or other tokens, one after the other: from scratch it learns with Muon
    needs_pretrained: bool = False  # whether it can only tune a model
    has_valid_loss: bool = True  # False: it is evaluated by its metrics alone
    uses_dropout: bool = True  # False: probabilities are compared with those of another model, which dropout would blur
    lr_factor: float = 1.0  # of the usual learning rate of fine-tuning
    default_position: str = "rotary"
    stacks: tuple[bool, bool] | None = None  # (encoder, decoder) that a pretrained model must have; None: any

    # its metrics and outputs
    default_metric: str = "loss"
    output_columns: tuple[str, ...] = ("output",)  # that prediction adds to a table

    # ------------------------------------------------------------------------------------------------ data and model

    def configured(self, config: Any) -> Task[E]:
        """The task with the settings of one run; itself where it has none of its own."""
        return self

    def extend_tokenizer(self, tokenizer: Tokenizer, config: TaskConfig, examples: Sequence[E]) -> Tokenizer:
        """A tokenizer that was trained on the texts, with the special tokens of the task."""
        return tokenizer

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        """The pretrained model as it is trained, with a head beside its own, for example."""
        return model

    def new_head(self, spec: Model) -> str:
        """The paths of the head that learn whole beside an adapter: they are new, or its labels are this task's."""
        return "" if isinstance(spec.head, LMHead) else "head.*"

    def prepare(self, model: Transformer, data: TaskData, config: Any, resumed: bool) -> None:
        """Called once before the first step: what is computed of the initial model, which a resumed run has stored."""

    @abstractmethod
    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[E],
        valid: Sequence[E],
        labels: Sequence[str] = (),
    ) -> TaskData:
        """The datasets of examples. labels: those of a trained model; else of the training examples."""

    @abstractmethod
    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        """The model that is trained from scratch; of a pretrained one only its head and token types are used."""

    def adapt_spec(self, spec: Model, data: TaskData) -> Model:
        """What the spec of a model from scratch takes from the data, such as the ids of special tokens."""
        return spec

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        """Whether the head of a pretrained model fits this task."""
        return metadata.get("task") == self.name and list(metadata.get("labels", [])) == list(labels)

    def describe_model(self, model: Any) -> str:
        """What the plan of a run says of a model that is no stack of layers; '' for one that is."""
        return ""

    def saved_model(self, model: Any) -> Any:
        """The model that is saved: without a head that only training needs."""
        return model

    def save_model(self, folder: Path, model: Any, data: TaskData) -> None:
        """Write the model of a run into its model folder."""
        save_native(folder, model, data.metadata)

    def write_pictures(self, folder: Path, model: Any, data: TaskData) -> None:
        """Draw what a model makes of the validation set into the plots folder of a run, each time it is saved."""

    # ---------------------------------------------------------------------------------------------------------- loss

    @abstractmethod
    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """The loss of a batch, summed over its targets."""

    # of the whole step before its backward passes, where the loss of a micro-batch depends on the others
    prepare_step: PrepareStep = staticmethod(no_preparation)

    def num_targets(self, batch: TensorBatch) -> int:
        """What the loss is divided by."""
        return num_targets(batch)

    # --------------------------------------------------------------------------------------------------- predictions

    @abstractmethod
    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[Any],
        *args: Any,
        **options: Any,
    ) -> list[Any]:
        """The outputs of a trained model for new inputs. Options are the task's own."""

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, Any]:
        """Outputs by row of the validation dataset. beam: the width of the beam search, of tasks that generate text."""
        return {}

    def collect_predictions(self, outputs: Mapping[int, Any], data: TaskData) -> Predictions:
        """The predictions of examples from the outputs of all rows, whichever process made them."""
        rows = sorted(outputs)
        references = [self.reference(data.valid_examples[row]) for row in rows]
        return Predictions(rows, [outputs[row] for row in rows], references)

    def reference(self, example: E) -> Any:
        """What the prediction of an example is compared with."""
        raise NotImplementedError(f"{self.name} predicts validation rows and must say what they are compared with")

    def encode_input(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """The token ids of one input text, as the model was trained to read it."""
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        return [special_tokens.bos_id, *tokenizer.encode(text, add_special_tokens=False), special_tokens.eos_id]

    def output_cells(self, output: Any) -> tuple[Any, ...]:
        """An output as cells of output_columns."""
        return (output,)

    def output_line(self, output: Any) -> str:
        """An output as one line."""
        return str(output)

    @property
    def command(self) -> str:
        """How a trained model is used, with {run} for its folder."""
        if not self.verb:
            return 'headwater.training.predict.load_run("{run}")("…")'
        return f'headwater {self.verb} {{run}} "…"'

    def usage(self, tokenizer: Tokenizer) -> str:
        """The same, of a model with this tokenizer."""
        return self.command

    # ------------------------------------------------------------------------------------------------------- metrics

    def loss_metrics(self, loss: float) -> dict[str, float]:
        """Metrics that follow from the mean loss."""
        return {"loss": loss}

    def metrics(self, outputs: list[Any], references: list[Any], data: TaskData) -> dict[str, float]:
        """Metrics of predictions."""
        return {}

    def report(self, outputs: list[Any], references: list[Any]) -> Mapping[str, Any]:
        """More than the metrics say, for `headwater eval`."""
        return {"rows": len(references)}

    def format_input(self, example: E) -> str:
        """The input of an example, for a sample."""
        return example.input_text

    def format_output(self, example: E, output: Any) -> str:
        """An output or a reference, for a sample."""
        return self.output_line(output)


# ------------------------------------------------------------------------------------------------------------- registry

TASKS: dict[str, Task[Any]] = {}  # by name; of a task with several objectives its default
OBJECTIVES: dict[str, Task[Any]] = {}  # by objective


def register(*tasks: Task[Any]) -> None:
    """Add tasks. The first of several with one name, which differ in their objective, is the default."""
    for task in tasks:
        EXAMPLE_FORMATS.setdefault(task.name, task.example_format)
        TASKS.setdefault(task.name, task)
        if task.objective:
            OBJECTIVES[task.objective] = task


def get_task(name: str, objective: str = "auto") -> Task[Any]:
    """A task by its name or an alias, with one of its objectives."""
    task = TASKS[resolve_task(name)]
    if not task.objective or objective in ("", "auto"):
        return task
    if objective not in OBJECTIVES:
        raise BadSetting(
            _("no objective is called {name!r}; {nearest}", name=objective, nearest=nearest(objective, OBJECTIVES))
        )
    return OBJECTIVES[objective]


# -------------------------------------------------------------------------------------------------- shared by the tasks


class StackKwargs(TypedDict):
    """Arguments of the builders in headwater.families.builders."""

    d_model: int
    heads: int
    layers: int
    d_ff: int
    dropout: float
    position: str
    attention: str
    encoder_attention: str
    decoder_attention: str
    norm_position: str
    max_positions: int


def stack_sizes(config: TaskConfig) -> StackKwargs:
    """The sizes of a config, for transformer(), encoder() and decoder() (headwater.families.builders)."""
    return {
        "d_model": config.d_model,
        "heads": config.heads,
        "layers": config.layers,
        "d_ff": config.d_ff,
        "dropout": config.dropout,
        "position": config.position,
        "attention": config.attention,
        "encoder_attention": config.encoder_attention,
        "decoder_attention": config.decoder_attention,
        "norm_position": "pre",
        "max_positions": max(config.context_length + 2, config.max_length + 2, 514),
    }


def max_length(config: TaskConfig) -> int:
    """Tokens that a text may have."""
    return config.max_length or DEFAULT_MAX_LENGTH


def build_augmenter(config: TaskConfig, tokenizer: Tokenizer, texts: list[str]) -> Augmenter | None:
    """Data augmentation of the inputs, if configured."""
    changes = parse_augmentations(config.augment, config.synonyms)
    return Augmenter(texts, changes, tokenizer, config.seed, max_length(config)) if changes else None


def rows_within_max_length(config: TaskConfig, lengths: np.ndarray, split: str, notes: list[str]) -> np.ndarray:
    """Indices of the rows that are short enough; a note says how many are left out."""
    longest = max_length(config)
    short = np.flatnonzero(lengths <= longest)
    if len(short) < len(lengths):
        notes.append(
            _(
                "{num_lengths:,} of {num_lengths2:,} {name} rows are longer than {most} tokens and left out",
                num_lengths=len(lengths) - len(short),
                num_lengths2=len(lengths),
                name=split,
                most=longest,
            )
        )
    if not len(short):
        raise BadInput(
            _(
                "{name}: no row has at most {most} tokens, the shortest has {min}; raise --max-length",
                name=split,
                most=longest,
                min=int(lengths.min(initial=0)),
            )
        )
    return short
