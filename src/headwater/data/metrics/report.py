"""Scores of each class and the confusion matrix of a classifier; scores of each entity type of a tagger.

Precision, recall and F1 are percentages, as every score here; a quotient with the denominator 0 is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

from headwater.data.metrics.labels import entities
from headwater.data.metrics.units import same_count


class Scores(TypedDict):
    precision: float
    recall: float
    f1: float
    support: int  # how often it is in the references


class Baseline(TypedDict):
    """Always answering with the most frequent class of the references."""

    label: str
    accuracy: float


class ClassReport(TypedDict):
    rows: int
    majority_baseline: Baseline
    classes: dict[str, Scores]  # every class of the references or outputs, the most frequent reference first
    macro_avg: Scores  # the mean over the classes of the references
    weighted_avg: Scores  # the mean weighted by support
    confusion: dict[str, dict[str, int]]  # reference -> output -> rows, without those that are 0


class EntityReport(TypedDict):
    rows: int
    entities: dict[str, Scores]
    macro_avg: Scores
    weighted_avg: Scores


def class_report(outputs: Sequence[str], references: Sequence[str]) -> ClassReport:
    """
    >>> report = class_report(["a", "b", "b"], ["a", "a", "b"])
    >>> report["classes"]["b"]
    {'precision': 50.0, 'recall': 100.0, 'f1': 66.66666666666667, 'support': 1}
    """
    same_count(outputs, references)
    support = Counter(references)
    predicted = Counter(outputs)
    pairs = Counter(zip(references, outputs, strict=True))
    names = sorted(set(support) | set(predicted), key=lambda name: (-support[name], name))
    classes = {name: _scores(pairs[name, name], predicted[name], support[name]) for name in names}
    return {
        "rows": len(references),
        "majority_baseline": {"label": names[0], "accuracy": 100 * support[names[0]] / len(references)},
        "classes": classes,
        "macro_avg": _average(classes, weighted=False),
        "weighted_avg": _average(classes, weighted=True),
        "confusion": _confusion(pairs),
    }


def entity_report(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> EntityReport:
    """Whole entities of BIO tags, by type: kind, first and last word must all be right."""
    same_count(outputs, references)
    right, predicted, support = Counter[str](), Counter[str](), Counter[str]()
    for output, reference in zip(outputs, references, strict=True):
        found, real = entities(output), entities(reference)
        right.update(kind for kind, _, _ in found & real)
        predicted.update(kind for kind, _, _ in found)
        support.update(kind for kind, _, _ in real)
    names = sorted(set(support) | set(predicted), key=lambda name: (-support[name], name))
    types = {name: _scores(right[name], predicted[name], support[name]) for name in names}
    return {
        "rows": len(references),
        "entities": types,
        "macro_avg": _average(types, weighted=False),
        "weighted_avg": _average(types, weighted=True),
    }


def _confusion(pairs: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (reference, output), count in pairs.most_common():
        found.setdefault(reference, {})[output] = count
    return found


def _scores(right: int, predicted: int, support: int) -> Scores:
    return {
        "precision": _percent(right, predicted),
        "recall": _percent(right, support),
        "f1": _percent(2 * right, predicted + support),
        "support": support,
    }


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _average(classes: dict[str, Scores], weighted: bool) -> Scores:
    """Over the classes that are in the references."""
    some = [scores for scores in classes.values() if scores["support"]]
    weights = [scores["support"] if weighted else 1 for scores in some]
    total = sum(weights)

    def mean(values: Sequence[float]) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True)) / total if total else 0.0

    return {
        "precision": mean([scores["precision"] for scores in some]),
        "recall": mean([scores["recall"] for scores in some]),
        "f1": mean([scores["f1"] for scores in some]),
        "support": sum(scores["support"] for scores in some),
    }
