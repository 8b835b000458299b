"""The base of tasks that choose one label for an example: how labels are read off logits, printed and scored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.data.examples import LabeledImage, LabeledText
from headwater.data.metrics import accuracy, class_f1, classification_report
from headwater.data.recordings import LabeledSound
from headwater.tasks.base import EvalBatch, Task, TaskData
from headwater.tasks.batch import TensorBatch

L = TypeVar("L", LabeledText, LabeledImage, LabeledSound)


class LabelTask(Task[L]):
    """A task whose output is one of the labels of the training data."""

    verb = "classify"
    default_metric = "accuracy"
    output_columns = ("label", "probability")

    @abstractmethod
    def logits(self, model: Transformer, batch: TensorBatch) -> Tensor:
        """[B, labels]"""

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, str]:
        outputs: dict[int, str] = {}
        with torch.no_grad():
            for rows, batch in batches:
                chosen = self.logits(model, batch).argmax(-1).tolist()
                outputs |= {int(row): data.labels[n] for row, n in zip(rows, chosen, strict=True)}
        return outputs

    def reference(self, example: L) -> str:
        return example.label

    def output_cells(self, output: Mapping[str, float]) -> tuple[str, float]:
        """The most probable label, which comes first, and its probability."""
        return next(iter(output.items()))

    def output_line(self, output: Mapping[str, float]) -> str:
        label, probability = self.output_cells(output)
        return f"{label}\t{probability:.3f}"

    def metrics(self, outputs: list[str], references: list[str], data: TaskData) -> dict[str, float]:
        return {"accuracy": accuracy(outputs, references), "macro_f1": class_f1(outputs, references)["macro"]}

    def report(self, outputs: list[str], references: list[str]) -> Mapping[str, Any]:
        return classification_report(outputs, references)

    def format_output(self, example: L, output: str) -> str:
        return output


def label_probabilities(logits: Tensor, names: Sequence[str]) -> list[dict[str, float]]:
    """For each row of logits [B, labels] the labels with their probabilities, the most probable first."""
    probs = logits.softmax(-1)
    orders = probs.argsort(descending=True).tolist()
    return [{names[n]: round(float(row[n]), 4) for n in order} for row, order in zip(probs, orders, strict=True)]
