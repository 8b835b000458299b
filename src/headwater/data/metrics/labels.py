"""Accuracy, F1 of classes, F1 of entities in BIO tags, and perplexity."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from headwater.data.metrics.units import same_count
from headwater.errors import BadInput


def accuracy(outputs: Sequence[object], references: Sequence[object]) -> float:
    """The percentage that is equal."""
    same_count(outputs, references)
    return 100 * sum(a == b for a, b in zip(outputs, references, strict=True)) / len(outputs)


def class_f1(outputs: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """macro: the mean over the classes of the references; micro: over all rows (for one label a row, the accuracy)."""
    same_count(outputs, references)
    right = Counter(b for a, b in zip(outputs, references, strict=True) if a == b)
    said, wanted = Counter(outputs), Counter(references)
    each = [2 * right[name] / (said[name] + wanted[name]) for name in wanted]
    return {"macro": 100 * sum(each) / len(each), "micro": 100 * right.total() / len(outputs)}


def entity_f1(outputs: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """An entity counts when its kind, first and last word are all right, as in the CoNLL evaluation."""
    same_count(outputs, references)
    right = said = wanted = 0
    for output, reference in zip(outputs, references, strict=True):
        if len(output) != len(reference):
            raise BadInput(f"each word must have one tag, got {len(output)} tags for {len(reference)} words")
        found, real = entities(output), entities(reference)
        right, said, wanted = right + len(found & real), said + len(found), wanted + len(real)
    return {"precision": 100 * right / said if said else 0.0, "recall": 100 * right / wanted if wanted else 0.0,
            "f1": 200 * right / (said + wanted) if said + wanted else 100.0}  # fmt: skip


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(kind, first word, word after the last). An I- that continues nothing of its kind begins an entity.

    >>> sorted(entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC", "I-PER"]))
    [('LOC', 3, 4), ('LOC', 4, 5), ('PER', 0, 2), ('PER', 5, 6)]
    """
    found, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, this = tag.partition("-")
        if kind and (mark != "I" or this != kind):
            found.add((kind, start, place))
            kind = ""
        if mark in ("B", "I") and not kind:
            start, kind = place, this or "entity"
    return found


def perplexity(summed_loss: float, tokens: int) -> float:
    """e to the mean loss (natural logarithm) of a token; infinite when that is beyond all numbers."""
    if tokens < 1:
        raise BadInput(f"perplexity needs at least one token, got {tokens}")
    try:
        return math.exp(summed_loss / tokens)
    except OverflowError:
        return math.inf
