"""Evaluation: loss, metrics and samples of a model, on the validation set during training or on files afterwards.

`metric` names the metric that decides which model is best ("auto": the usual one of the task).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.core.model import Transformer
from headwater.data.dataset import evenly_spaced
from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _
from headwater.tasks import TaskData, get_task
from headwater.tasks.base import EvalBatch, Predictions
from headwater.tasks.batch import to_tensors
from headwater.tasks.image_classification import PixelDataset
from headwater.training.config import TrainConfig, parse_config
from headwater.training.distributed import SingleProcess
from headwater.training.feedback_config import FeedbackConfig
from headwater.training.predict import Predictor, load_run
from headwater.training.run_dir import RunDir
from headwater.training.state import EvalResult
from headwater.training.task_data import build_task_data, read_data
from headwater.vision.processor import ImageProcessor

LOWER_IS_BETTER = ("loss", "perplexity", "wer", "cer")
TEXT_METRICS = ("bleu", "chrf", "rougeL")
MIN_TEXT_SCORE = 1.0  # below this, texts agree by accident and the loss decides


@dataclass
class Evaluator:
    """Evaluates a model in eval mode on at most max_examples examples; num_samples outputs are kept as samples."""

    task_data: TaskData
    metric: str = "auto"
    max_examples: int = 2000
    num_samples: int = 4
    dist: SingleProcess = field(default_factory=SingleProcess)  # the ranks that share the batches

    def __call__(self, model: Transformer, max_examples: int | None = None) -> EvalResult:
        if max_examples is not None:
            return replace(self, max_examples=max_examples)(model)
        scores, predictions = self.scores(model)
        return EvalResult(self._selection_score(scores), scores, tuple(self.samples(predictions)))

    def scores(self, model: Transformer, beam: int = 1) -> tuple[dict[str, float], Predictions]:
        """The metrics of a model, and the predictions they are of. beam: the width of the beam search."""
        task = self.task_data.task
        scores = task.loss_metrics(self.loss(model)) if task.has_valid_loss else {}
        outputs = self.gather(task.predict_rows(model, self.task_data, self.batches(model), beam))
        predictions = task.collect_predictions(outputs, self.task_data)
        scores |= task.metrics(predictions.outputs, predictions.references, self.task_data)
        return scores, predictions

    def loss(self, model: Transformer) -> float:
        """The mean loss per target, without label smoothing."""
        task = self.task_data.task
        local = []
        for _rows, batch in self.batches(model):
            local.append((float(task.loss(model, batch, 0.0)), task.num_targets(batch)))

        # summed in the order of the batches, so that the result is that of one process to the last bit
        total = 0.0
        count = 0
        for batches_of_ranks in zip_longest(*self.dist.all_gather_object(local), fillvalue=(0.0, 0)):
            for batch_loss, batch_targets in batches_of_ranks:
                total += batch_loss
                count += batch_targets
        return total / max(count, 1)

    def batches(self, model: Transformer) -> Iterator[EvalBatch]:
        """The batches of this rank: every world_size-th one."""
        device = next(model.parameters()).device
        dataset = self.task_data.valid
        for rows in islice(dataset.eval_batches(self.max_examples), self.dist.rank, None, self.dist.world_size):
            yield EvalBatch(rows, to_tensors(dataset.collate(rows, 0), device))

    def gather(self, outputs: Mapping[int, Any]) -> dict[int, Any]:
        """The outputs of all ranks, by row."""
        return {row: output for shard in self.dist.all_gather_object(outputs) for row, output in shard.items()}

    def _selection_score(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """(the deciding metric, -loss): larger is better."""
        task = self.task_data.task
        name = task.default_metric if self.metric == "auto" else self.metric
        if name not in metrics:
            raise BadSetting(
                _(
                    "metric: {task} has no {name!r}; {nearest}",
                    task=task.name,
                    name=name,
                    nearest=nearest(name, metrics),
                )
            )
        value = -metrics[name] if name in LOWER_IS_BETTER else metrics[name]
        return 0.0 if name in TEXT_METRICS and value < MIN_TEXT_SCORE else value, -metrics.get("loss", 0.0)

    def samples(self, predictions: Predictions) -> Iterator[Mapping[str, str]]:
        """A few evenly spaced outputs beside their references."""
        task = self.task_data.task
        for at in evenly_spaced(len(predictions.rows), self.num_samples):
            example = self.task_data.valid_examples[predictions.rows[at]]
            yield {
                "input": task.format_input(example),
                "output": task.format_output(example, predictions.outputs[at]),
                "expected": task.format_output(example, predictions.references[at]),
            }


# ------------------------------------------------------------------------------------------------------------- on files


class EvalReport(NamedTuple):
    metrics: dict[str, float]
    samples: Sequence[Mapping[str, str]]
    notes: Sequence[str]  # rows that were left out
    report: Mapping[str, Any] = {}  # rows, and for labels and tags the scores of each (data/metrics.py)


@torch.no_grad()
def evaluate_files(
    folder: str | Path, files: Sequence[str], max_examples: int = 10**9, beam: int = 4, columns: str = ""
) -> EvalReport:
    """Evaluate a trained model on files: its metrics, and some samples. With beam > 1, texts come from beam search.

    columns: source=en,target=de and the like, where the files name them otherwise than those of training did.
    """
    predictor = load_run(folder)
    task_data = eval_task_data(predictor, files, columns)
    evaluator = Evaluator(task_data, max_examples=max_examples, num_samples=5)
    scores, predictions = evaluator.scores(predictor.model, beam)
    report = task_data.task.report(predictions.outputs, predictions.references)
    return EvalReport(scores, tuple(evaluator.samples(predictions)), task_data.notes, report)


RUN_SETTINGS = (  # of a run, that hold for the files it is evaluated on too
    "columns",
    "source",
    "target",
    "header",
    "encoding_errors",
    "max_length",
    "truncate",
    "context_length",
    "language",
    "window_seconds",
    "image_size",
    "patch_size",
    "seed",
    *FeedbackConfig.model_fields,
)


def eval_task_data(predictor: Predictor, files: Sequence[str], columns: str = "") -> TaskData:
    """The datasets of files, with the tokenizer and the labels of the model."""
    # settings: those of the run
    is_run = (predictor.folder / "config.yaml").is_file()
    run_config = RunDir.open(predictor.folder).load_config() if is_run else TrainConfig()
    kept = {name: getattr(run_config, name) for name in RUN_SETTINGS}
    if columns:
        kept |= {"columns": columns, "source": "", "target": ""}
    kept["chat_template"] = "auto" if predictor.tokenizer.chat_template else "none"  # as in training
    task = get_task(predictor.task, predictor.metadata.get("objective", ""))
    config = parse_config({**kept, "paths": list(files), "task": task.name, "batch_tokens": 8192})
    task = task.configured(config)

    # examples: all splits of the files
    _summary, splits = read_data(config)
    examples = [example for split in splits.values() for example in split]
    if not examples:
        raise BadInput(_("{files} holds no row that can be measured; check its layout", files=files[0]))
    known = tuple(predictor.metadata.get("labels", ()))
    if known and (strange := sorted({label for row in examples for label in row.labels} - set(known))):
        raise BadInput(
            _(
                "the label {strange!r} is not one the model knows; it knows {known}",
                strange=strange[0],
                known=", ".join(known[:8]),
            )
        )

    # datasets: as the model was trained
    task_data = build_task_data(config, task, examples, examples, predictor.tokenizer, labels=known)
    metadata = predictor.metadata
    for dataset in (task_data.train, task_data.valid):
        if isinstance(dataset, PixelDataset):  # a tuned model has the processor of the public one
            dataset.processor = ImageProcessor.from_config(metadata["processor"])
    return replace(
        task_data,
        languages=tuple(metadata.get("languages", ())),
        truncate_to=metadata.get("truncate_to", 0),
        null_threshold=metadata.get("null_threshold", task_data.null_threshold),
    )
