"""The report of headwater eval as aligned tables that fit the terminal: scores of each class, the confusion matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headwater.cli.language import say
from headwater.cli.terminal import harmless
from headwater.data.telling import filled

MOST_CLASSES = 30  # rows of the table of classes
MOST_CONFUSED = 10  # pairs that are listed where the matrix is too wide
LONGEST_NAME = 24  # columns of the terminal that the name of a class takes
LONGEST_HEADING = 10

Confusion = Mapping[str, Mapping[str, int]]  # reference -> output -> rows


def report_lines(report: Mapping[str, Any], width: int = 80) -> Iterator[str]:
    """report: as of data/metrics/report.py; width: columns of the terminal."""
    if baseline := report.get("majority_baseline"):
        always, accuracy = harmless(baseline["label"]), f"{baseline['accuracy']:.4g}"
        yield say(f"baseline     {accuracy} (always {always})", f"多数类基线   {accuracy}（总是答 {always}）")
    if classes := report.get("classes") or report.get("entities"):
        yield ""
        yield from class_lines(classes, report)
    if confusion := report.get("confusion"):
        yield ""
        yield from confusion_lines(list(report["classes"]), confusion, width)


def class_lines(classes: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Precision, recall, F1 and support of each class, the most frequent first, and their means."""
    shown = [(name_of(name), scores) for name, scores in list(classes.items())[:MOST_CLASSES]]
    averages = [
        (say("macro avg", "宏平均"), report["macro_avg"]),
        (say("weighted avg", "加权平均"), report["weighted_avg"]),
    ]
    size = max(columns_of(name) for name, _ in [*shown, *averages])
    headings = say("precision recall f1 support", "精确率 召回率 F1 样本数").split()
    yield filled("", size) + "".join(" " * (11 - columns_of(heading)) + heading for heading in headings)
    for name, scores in shown:
        yield filled(name, size) + _numbers(scores)
    if more := len(classes) - len(shown):
        yield say(f"… and {more:,} more; --json has them all", f"……另有 {more:,} 类；用 --json 查看全部")
    for name, scores in averages:
        yield filled(name, size) + _numbers(scores)


def _numbers(scores: Mapping[str, Any]) -> str:
    return "".join(f"{scores[name]:11.2f}" for name in ("precision", "recall", "f1")) + f"{scores['support']:11,}"


def confusion_lines(names: Sequence[str], confusion: Confusion, width: int) -> Iterator[str]:
    """The matrix under the names of its columns, or under their numbers; where both are too wide, the worst pairs."""
    labels = [name_of(name) for name in names]
    numbers = [str(number) for number in range(1, len(names) + 1)]
    numbered = [f"{number} {label}" for number, label in zip(numbers, labels, strict=True)]
    few = names[:width]  # a matrix of more does not fit
    counts = [[confusion.get(row, {}).get(column, 0) for column in few] for row in few]
    if max(map(columns_of, labels)) <= LONGEST_HEADING and _width(labels, labels, counts) <= width:
        yield from _matrix(labels, labels, counts)
    elif _width(numbered, numbers, counts) <= width:
        yield from _matrix(numbered, numbers, counts)
    else:
        yield from _most_confused(confusion)


def _cell(heads: Sequence[str], counts: Sequence[Sequence[int]]) -> int:
    """Columns of the terminal that a number takes, with the space before it."""
    return 2 + max(*map(columns_of, heads), *(len(str(count)) for row in counts for count in row))


def _width(rows: Sequence[str], heads: Sequence[str], counts: Sequence[Sequence[int]]) -> int:
    return max(map(columns_of, rows)) + len(heads) * _cell(heads, counts)


def _matrix(rows: Sequence[str], heads: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    """A row for each label, a column for each prediction."""
    size, cell = max(map(columns_of, rows)), _cell(heads, counts)
    yield say("confusion matrix: a row is the label, a column the prediction", "混淆矩阵：行为真实标签，列为预测标签")
    yield filled("", size) + "".join(" " * (cell - columns_of(head)) + head for head in heads)
    for name, row in zip(rows, counts, strict=True):
        yield filled(name, size) + "".join(f"{count:{cell}}" for count in row)


def _most_confused(confusion: Confusion) -> Iterator[str]:
    pairs = [(count, label, output) for label, row in confusion.items() for output, count in row.items()]
    wrong = sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: -pair[0])
    yield say("most frequent confusions: label → prediction, rows", "最常见的混淆：真实标签 → 预测标签，行数")
    for count, label, output in wrong[:MOST_CONFUSED]:
        yield f"  {name_of(label)} → {name_of(output)}  {count:,}"


def name_of(label: str) -> str:
    """A label in one short line."""
    name = harmless(" ".join(label.split()))
    while columns_of(name) > LONGEST_NAME:
        name = name.removesuffix("…")[:-1] + "…"
    return name


def columns_of(text: str) -> int:
    """Columns of a terminal: a Chinese character takes two."""
    return sum(2 if ord(c) > 0x2E7F else 1 for c in text)
