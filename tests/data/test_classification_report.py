"""Classification and entity reports: against values computed by hand, and against the confusion matrix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.data.metrics import accuracy, class_f1, classification_report, entity_report


def test_the_report_of_classes_by_hand():
    """a: 3 of 4 predicted, and one false positive; c is predicted but never right; d is never predicted."""
    references = ["a", "a", "a", "a", "b", "b", "d"]
    outputs = ["a", "a", "a", "b", "b", "a", "c"]
    report = classification_report(outputs, references)
    assert report["rows"] == 7 and report["majority_baseline"] == {"label": "a", "accuracy": pytest.approx(400 / 7)}
    assert report["classes"] == {
        "a": {"precision": 75.0, "recall": 75.0, "f1": 75.0, "support": 4},
        "b": {"precision": 50.0, "recall": 50.0, "f1": 50.0, "support": 2},
        "d": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 1},
        "c": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
    }
    assert report["macro_avg"]["f1"] == pytest.approx(125 / 3) == class_f1(outputs, references)["macro"]
    assert report["weighted_avg"]["f1"] == pytest.approx((4 * 75 + 2 * 50) / 7)
    assert report["weighted_avg"]["recall"] == pytest.approx(accuracy(outputs, references)), "by definition"
    assert report["confusion"] == {"a": {"a": 3, "b": 1}, "b": {"b": 1, "a": 1}, "d": {"c": 1}}


def test_the_report_of_entities_by_hand():
    references = [["B-PER", "I-PER", "O", "B-LOC"], ["B-PER", "O"]]
    outputs = [["B-PER", "O", "O", "B-LOC"], ["B-PER", "B-ORG"]]
    report = entity_report(outputs, references)
    assert report["rows"] == 2 and report["entities"] == {
        "PER": {"precision": 50.0, "recall": 50.0, "f1": 50.0, "support": 2},
        "LOC": {"precision": 100.0, "recall": 100.0, "f1": 100.0, "support": 1},
        "ORG": {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0},
    }
    assert report["macro_avg"]["f1"] == 75.0 and report["weighted_avg"]["f1"] == pytest.approx(200 / 3)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=1, max_size=40))
def test_sums_of_the_confusion_matrix(pairs):
    outputs, references = zip(*pairs, strict=True)
    report = classification_report(outputs, references)
    for name, scores in report["classes"].items():
        row = report["confusion"].get(name, {})
        column = sum(other.get(name, 0) for other in report["confusion"].values())
        assert sum(row.values()) == scores["support"] == references.count(name)
        assert scores["recall"] == pytest.approx(100 * row.get(name, 0) / (scores["support"] or 1))
        assert scores["precision"] == pytest.approx(100 * row.get(name, 0) / (column or 1))
