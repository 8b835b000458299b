"""Measuring a trained model on files of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headwater.data.metrics.report import class_report, entity_report
from headwater.data.objectives.labels import label_names
from headwater.data.reading.problems import Problems
from headwater.errors import BadInput
from headwater.training import exam as exams
from headwater.training.exam import Exam
from headwater.training.material import NULL_THRESHOLD, Material, seen, taught
from headwater.training.run import Run
from headwater.training.settings import Settings, read
from headwater.training.use import Trained, load_run, write


class Measured(NamedTuple):
    scores: dict[str, float]
    samples: Sequence[Mapping[str, Any]]
    notes: Sequence[str]  # what was left out
    report: Mapping[str, Any] = {}  # rows, and for labels and tags the scores of each (data/metrics/report.py)


def measured(folder: str | Path, files: Sequence[str], rows: int = 10**9, beam: int = 4, columns: str = "") -> Measured:
    """The scores on all rows of the files, and some samples. With a beam above 1, texts are found by beam search.

    columns: source=en,target=de and the like, where the files name them otherwise than those of training did.
    """
    trained = load_run(folder)
    material = material_of(trained, files, columns)
    exam = Exam(material, rows=rows, samples=5)
    with torch.no_grad():
        if trained.task == "language-model":
            found = exam(trained.model)
            return Measured(dict(found.scores), found.samples, material.notes)
        chosen, outputs, wanted = _answers(trained, exam, beam)
        scores = {"loss": exam.loss(trained.model), **exams.MEASURES[trained.task](outputs, wanted, material)}
    report = REPORTS.get(trained.task, _count)(outputs, wanted)
    return Measured(scores, tuple(exam.shown(chosen, outputs, wanted)), material.notes, report)


def _answers(trained: Trained, exam: Exam, beam: int) -> exams.Said:
    """The rows that are measured, what the model says of them, and the references."""
    if trained.task != "text-to-text" or beam <= 1:
        return exams.ANSWERS[trained.task](exam, trained.model)
    chosen = exam.material.valid.spread(exam.rows).tolist()
    examples: Any = [exam.material.examples[row] for row in chosen]
    return chosen, write(trained, [row[0] for row in examples], beam), [row[1] for row in examples]


def _count(outputs: Sequence[Any], references: Sequence[Any]) -> Mapping[str, Any]:
    return {"rows": len(references)}


REPORTS: dict[str, Callable[[Sequence[Any], Sequence[Any]], Mapping[str, Any]]] = {
    "classification": class_report,
    "tagging": entity_report,
}


def material_of(trained: Trained, files: Sequence[str], columns: str = "") -> Material:
    """The files as material with the model's own tokenizer and labels."""
    own = Run.open(trained.folder).settings() if (trained.folder / "config.yaml").is_file() else Settings()
    keep = {
        name: getattr(own, name)
        for name in ("columns", "source", "target", "header", "invalid", "longest", "cut", "context", "seed")
    }
    if columns:
        keep |= {"columns": columns, "source": "", "target": ""}
    settings = read({**keep, "paths": list(files), "task": trained.task, "batch_tokens": 8192,
                     "objective": trained.about.get("objective") or "auto"})  # fmt: skip
    found = seen(settings)
    examples = [row for split in found.recipe.splits for row in found.recipe.examples(split, Problems())]
    if not examples:
        raise BadInput(f"{files[0]} holds no row that can be measured; check its layout")
    if trained.task == "language-model":
        return taught(settings, trained.task, examples, examples, trained.tokenizer)
    known = tuple(trained.about.get("labels", ()))
    if known and (strange := sorted(_labels(examples) - set(known))):
        raise BadInput(f"the label {strange[0]!r} is not one the model knows; it knows {', '.join(known[:8])}")
    made = taught(settings, trained.task, [*examples, *_one_of_each(known, examples)], examples, trained.tokenizer)
    null_threshold = trained.about.get("null_threshold", NULL_THRESHOLD)
    return replace(made, languages=tuple(trained.about.get("languages", ())), null_threshold=null_threshold)


def _labels(examples: Sequence[Any]) -> set[str]:
    return {name for row in examples for name in ((row.label,) if hasattr(row, "label") else getattr(row, "tags", ()))}


def _one_of_each(known: Sequence[str], examples: Sequence[Any]) -> list[Any]:
    """Rows that carry the labels the files lack, so that every label has the number it had in training."""
    missing = label_names(set(known) - _labels(examples))
    first = examples[0]
    if hasattr(first, "label"):
        return [first._replace(label=name) for name in missing]
    return [first._replace(words=("x",), tags=(name,)) for name in missing] if hasattr(first, "tags") else []
