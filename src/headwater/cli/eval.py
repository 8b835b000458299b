"""The command headwater eval RUN FILE …: evaluates a trained model on other data, with the metrics of its task."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from headwater.cli import kernels
from headwater.cli.parser import CommandParser, escape_control
from headwater.i18n import _, display_width, padded


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("run", help=_("the folder of a run"))
    parser.add_argument("files", nargs="+", help=_("data files, in any layout that train reads"))
    parser.add_argument(
        "--columns",
        metavar="A=B",
        default="",
        help=_("columns whose names differ from those in training: source=en,target=de"),
    )
    parser.add_argument(
        "--beam", type=int, default=4, help=_("beam width of a sequence-to-sequence model [4]; 1: greedy")
    )
    parser.add_argument("--rows", type=int, default=10**9, help=_("maximum number of rows"))
    parser.add_argument("--json", action="store_true", help=_("as JSON"))


def run(args: argparse.Namespace) -> None:
    from headwater.i18n import padded
    from headwater.training.evaluate import evaluate_files
    from headwater.training.loggers import shorten_line

    kernels.warn_missing()
    result = evaluate_files(args.run, args.files, args.rows, args.beam, args.columns)
    for note in result.notes:
        print(_("note: ") + str(note), file=sys.stderr)
    if args.json:
        print(json.dumps({**result.metrics, **result.report}, ensure_ascii=False))
        return
    if rows := result.report.get("rows"):
        print(padded(str(_("rows")), 12), f"{rows:,}")
    for name, value in result.metrics.items():
        print(f"{name:<12} {value:.4g}")
    for line in report_lines(result.report, shutil.get_terminal_size().columns):
        print(line)
    print()
    for sample in result.samples:
        source = shorten_line(sample["input"])
        output = shorten_line(sample["output"])
        target = shorten_line(sample["expected"])
        expected = "" if output == target else f"  ({_('expected')} {target})"
        print(f"  {source}  →  {output}{expected}")


# --------------------------------------------------------------------------------------------------
# Evaluation report as terminal tables: precision, recall and F1 by class, and the confusion matrix.


MAX_CLASSES = 30  # rows of the table of classes
MAX_CONFUSED_PAIRS = 10  # pairs that are listed if the matrix is too wide
MAX_LABEL_WIDTH = 24  # terminal columns of the name of a class
MAX_HEADING_WIDTH = 10

ConfusionMatrix = Mapping[str, Mapping[str, int]]  # reference -> output -> rows


def report_lines(report: Mapping[str, Any], width: int = 80) -> Iterator[str]:
    """The report of data/metrics.py as lines of text; width: columns of the terminal."""
    if baseline := report.get("majority_baseline"):
        baseline_label = escape_control(baseline["label"])
        accuracy = f"{baseline['accuracy']:.4g}"
        yield _("baseline     {accuracy} (always {label})", accuracy=accuracy, label=baseline_label)
    if classes := report.get("classes") or report.get("entities"):
        yield ""
        yield from class_lines(classes, report)
    if confusion := report.get("confusion"):
        yield ""
        yield from confusion_lines(list(report["classes"]), confusion, width)


def class_lines(classes: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str]:
    """Precision, recall, F1 and support of each class, the most frequent first, and their means."""
    displayed = [(short_label(name), scores) for name, scores in list(classes.items())[:MAX_CLASSES]]
    averages = [(_("macro avg"), report["macro_avg"]), (_("weighted avg"), report["weighted_avg"])]
    size = max(display_width(name) for name, _ in [*displayed, *averages])
    headings = _("precision recall f1 support").split()
    yield padded("", size) + "".join(" " * (11 - display_width(str(heading))) + str(heading) for heading in headings)
    for name, scores in displayed:
        yield padded(name, size) + _score_columns(scores)
    if num_hidden := len(classes) - len(displayed):
        yield _("… and {more:,} more; --json has them all", more=num_hidden)
    for name, scores in averages:
        yield padded(name, size) + _score_columns(scores)


def _score_columns(scores: Mapping[str, Any]) -> str:
    return "".join(f"{scores[name]:11.2f}" for name in ("precision", "recall", "f1")) + f"{scores['support']:11,}"


def confusion_lines(names: Sequence[str], confusion: ConfusionMatrix, width: int) -> Iterator[str]:
    """The confusion matrix with named columns, or with numbered ones; if both are too wide, the worst pairs."""
    labels = [short_label(name) for name in names]
    numbers = [str(number) for number in range(1, len(names) + 1)]
    numbered = [f"{number} {label}" for number, label in zip(numbers, labels, strict=True)]
    displayed = names[:width]  # a matrix of more does not fit
    counts = [[confusion.get(row, {}).get(column, 0) for column in displayed] for row in displayed]
    if max(map(display_width, labels)) <= MAX_HEADING_WIDTH and _matrix_width(labels, labels, counts) <= width:
        yield from _matrix_lines(labels, labels, counts)
    elif _matrix_width(numbered, numbers, counts) <= width:
        yield from _matrix_lines(numbered, numbers, counts)
    else:
        yield from _confused_pair_lines(confusion)


def _cell_width(heads: Sequence[str], counts: Sequence[Sequence[int]]) -> int:
    """Terminal columns of a number with the space before it."""
    return 2 + max(*map(display_width, heads), *(len(str(count)) for row in counts for count in row))


def _matrix_width(rows: Sequence[str], heads: Sequence[str], counts: Sequence[Sequence[int]]) -> int:
    return max(map(display_width, rows)) + len(heads) * _cell_width(heads, counts)


def _matrix_lines(rows: Sequence[str], heads: Sequence[str], counts: Sequence[Sequence[int]]) -> Iterator[str]:
    """One row per label, one column per prediction."""
    size = max(map(display_width, rows))
    cell = _cell_width(heads, counts)
    yield _("confusion matrix: a row is the label, a column the prediction")
    yield padded("", size) + "".join(" " * (cell - display_width(str(head))) + str(head) for head in heads)
    for name, row in zip(rows, counts, strict=True):
        yield padded(name, size) + "".join(f"{count:{cell}}" for count in row)


def _confused_pair_lines(confusion: ConfusionMatrix) -> Iterator[str]:
    pairs = [(count, label, output) for label, row in confusion.items() for output, count in row.items()]
    mistakes = sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: -pair[0])
    yield _("most frequent confusions: label → prediction, rows")
    for count, label, output in mistakes[:MAX_CONFUSED_PAIRS]:
        yield f"  {short_label(label)} → {short_label(output)}  {count:,}"


def short_label(label: str) -> str:
    """A label on one line, truncated to MAX_LABEL_WIDTH."""
    name = escape_control(" ".join(label.split()))
    while display_width(name) > MAX_LABEL_WIDTH:
        name = name.removesuffix("…")[:-1] + "…"
    return name
