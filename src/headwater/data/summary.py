"""Dataset summary: task, rows, languages or labels, lengths and bad rows of the user's files, as text and as JSON."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headwater.data.examples import (
    CaptionedPicture,
    DocumentChunk,
    Example,
    LabeledImage,
    LabeledText,
    QAExample,
    TextPair,
    split_hash,
    text_hash,
    validation_mask,
)
from headwater.data.readers.detect import SourceOptions, detect_source
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, BadRows, DecodeOptions, file_encoding
from headwater.data.readers.recording_source import folder_source
from headwater.data.readers.source import DataSource, hash_files
from headwater.data.recordings import LabeledSound, SoundFile, Transcribed
from headwater.errors import BadFile
from headwater.i18n import _, join, padded

QUANTILES = (0.0, 0.5, 0.95, 1.0)
MAX_LABELS = 10_000


@dataclass
class SplitStats:
    """Statistics of one split (train, valid or test). Lengths are in characters."""

    rows: int = 0
    characters: int = 0
    duplicates: int = 0  # rows equal to an earlier one
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)  # field -> min, median, p95, max
    labels: dict[str, int] = field(default_factory=dict)  # classes or tags with their counts
    unanswerable: int = 0  # questions without an answer in their text
    bad_rows: BadRows = field(default_factory=BadRows)
    samples: tuple[Example, ...] = ()
    input_hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))  # [rows], for the validation split


@dataclass
class DataSummary:
    """Summary of a dataset: how it is read, statistics of each split, encodings and overlap."""

    source: DataSource
    splits: dict[str, SplitStats]
    encodings: dict[str, str]  # file -> encoding and the evidence for it
    overlap: dict[str, int]  # split -> rows whose input is in train too
    validation_rows: int = 0  # rows of train used for validation, when no valid split is given
    notes: tuple[str, ...] = ()
    file_hashes: dict[str, str] = field(default_factory=dict)  # SHA-256 of each file before it was read

    @property
    def task(self) -> str:
        return self.source.task

    def to_dict(self) -> dict[str, Any]:
        """The summary as dicts, lists and numbers, ready for JSON."""
        files: dict[str, list[str]] = {group.split: [] for group in self.source.file_groups}
        for group in self.source.file_groups:
            files[group.split] += [str(path) for path in group.paths]
        return {
            "task": self.task,
            "roles": dict(self.source.roles),
            "format": self.source.instruction_format,
            "header": {str(group.paths[0]): group.header_rows > 0 for group in self.source.file_groups if group.header},
            "languages": list(self.source.languages),
            "splits": {name: _stats_dict(stats, files[name]) for name, stats in self.splits.items()},
            "encodings": self.encodings,
            "overlap_with_train": self.overlap,
            "validation_rows": self.validation_rows,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return format_summary(self)


def summarize_files(
    paths: Iterable[Path | str] | Path | str, valid: Iterable[Path | str] = (), **options: Any
) -> DataSummary:
    """Read the files and summarize them; options: those of read_dataset()."""
    return read_dataset(paths, valid, **options)[0]


def read_dataset(
    paths: Iterable[Path | str] | Path | str,
    valid: Iterable[Path | str] = (),
    task: str | None = None,
    columns: Mapping[str, str] | None = None,
    source: str | None = None,
    target: str | None = None,
    decode_options: DecodeOptions = DEFAULT_DECODE_OPTIONS,
    valid_fraction: float = 0.05,
    seed: int = 0,
    max_bad_rows: int = 1000,
    header: str = "auto",
    instruction_task: str = "seq2seq",
) -> tuple[DataSummary, dict[str, list[Example]]]:
    """Read the files once: their summary, and the examples of each split.

    More than max_bad_rows bad rows of a split raise BadFile.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    options = SourceOptions(task or "", columns or {}, source, target, decode_options, header, instruction_task)
    data_source = folder_source(files, valid, options.task) or detect_source(files, valid, options)
    encodings = {str(path): _describe_encoding(path, data_source) for path in data_source.paths if path.is_file()}

    # one pass over each split
    file_hashes = hash_files(data_source.paths)
    splits: dict[str, SplitStats] = {}
    examples: dict[str, list[Example]] = {}
    for split in ("train", *(s for s in data_source.splits if s != "train")):
        collector = _StatsCollector(max_bad_rows, seed)
        examples[split] = collector.collect(data_source, split)
        splits[split] = collector.stats
    if not splits["train"].rows:
        raise BadFile(
            _(
                "{given} holds no row that can be used; {first_problem}",
                given=files[0],
                first_problem=_first_bad_row(splits["train"]),
            )
        )

    # validation rows and overlap
    validation_rows = 0
    train_hashes = splits["train"].input_hashes
    if "valid" not in data_source.splits and data_source.example_format.split_by_row:
        validation_rows = int(validation_mask(train_hashes, valid_fraction).sum())
    others = {name: stats for name, stats in splits.items() if name != "train"}
    overlap = {name: int(np.isin(stats.input_hashes, train_hashes).sum()) for name, stats in others.items()}
    _refuse_train_overlap(overlap, splits)
    summary = DataSummary(data_source, splits, encodings, overlap, validation_rows, data_source.notes, file_hashes)
    return summary, examples


class _StatsCollector:
    """Collects the examples and the statistics of a split in one pass."""

    def __init__(self, max_bad_rows: int, seed: int) -> None:
        self.seed = seed
        self.document_id: int | None = None  # the document being counted
        self.stats = SplitStats(bad_rows=BadRows(max_count=max_bad_rows))
        self.input_hashes = array("Q")  # hash of each input: decides the split, and finds overlap with other splits
        self.row_hashes = array("q")  # the hash of each row
        self.lengths: dict[str, array[int]] = {}
        self.labels: Counter[str] = Counter()

    def collect(self, data_source: DataSource, split: str) -> list[Example]:
        """The examples of a split; its statistics are in `stats` afterwards."""
        examples = []
        for example in data_source.examples(split, self.stats.bad_rows):
            examples.append(example)
            if isinstance(example, DocumentChunk) and example.document_id == self.document_id:
                self._extend_document(example.text)
            else:
                self._add(example)
        hashes = np.array(self.row_hashes)
        self.stats.rows = len(hashes)
        self.stats.input_hashes = np.array(self.input_hashes, dtype=np.uint64)
        self.stats.duplicates = len(hashes) - len(np.unique(hashes))
        self.stats.labels = dict(self.labels.most_common(MAX_LABELS))
        self.stats.characters = sum(map(sum, self.lengths.values()))
        self.stats.lengths = {name: _quantiles(values) for name, values in self.lengths.items()}
        self.stats.samples = tuple(examples[:3])
        return examples

    def _extend_document(self, text: str) -> None:
        """Add a chunk to the document just counted: its length grows, its hashes change."""
        self.lengths["text"][-1] += len(text)
        self.row_hashes[-1] = hash((self.row_hashes[-1], text))
        self.input_hashes[-1] = text_hash(f"{self.input_hashes[-1]}:{text}")

    def _add(self, example: Example) -> None:
        """Count one example."""
        self.document_id = example.document_id if isinstance(example, DocumentChunk) else None
        self.row_hashes.append(hash(example))
        self.input_hashes.append(split_hash(example, self.seed))
        for name, text in _text_fields(example):
            self.lengths.setdefault(name, array("q")).append(len(text))
        self.labels.update(example.labels)
        if isinstance(example, QAExample):
            self.stats.unanswerable += not example.answers


def _text_fields(example: Example) -> tuple[tuple[str, str], ...]:
    if isinstance(example, TextPair):
        return ("source", example.source), ("target", example.target)
    if isinstance(example, (LabeledImage, LabeledSound, SoundFile)):
        return ()
    if isinstance(example, QAExample):
        return ("question", example.question), ("context", example.context)
    text = example.text if isinstance(example, (Transcribed, CaptionedPicture)) else ""
    return (("text", text or example.input_text),)


def _quantiles(values: array[int]) -> tuple[int, ...]:
    return tuple(int(v) for v in np.quantile(np.array(values), QUANTILES, method="nearest"))


def _describe_encoding(path: Path, data_source: DataSource) -> str:
    encoding = file_encoding(path, data_source.decode_options)
    return _("{name} ({how})", name=encoding.name, how=encoding.evidence)


def _refuse_train_overlap(overlap: dict[str, int], splits: dict[str, SplitStats]) -> None:
    for name, count in overlap.items():
        if splits[name].rows >= 10 and count > 0.5 * splits[name].rows:
            raise BadFile(
                _(
                    "{count:,} of {rows:,} rows of {name} are in train too, so it would measure memory; give "
                    "other rows, or leave it out to have some held out",
                    count=count,
                    rows=splits[name].rows,
                    name=name,
                )
            )


def _first_bad_row(stats: SplitStats) -> str:
    lines = stats.bad_rows.summary_lines()
    return lines[0] if lines else _("it has only blank lines")


def _stats_dict(stats: SplitStats, files: list[str]) -> dict[str, Any]:
    names = ("min", "median", "p95", "max")
    return {
        "files": files,
        "rows": stats.rows,
        "characters": stats.characters,
        "duplicates": stats.duplicates,
        "lengths": {name: dict(zip(names, values, strict=True)) for name, values in stats.lengths.items()},
        "labels": stats.labels,
        "unanswerable": stats.unanswerable,
        "bad_rows": stats.bad_rows.to_dict(),
    }


# ---------------------------------------------------------------------------------------------------- summary as text

SPLIT_NAMES = {"train": _("train"), "valid": _("valid"), "test": _("test")}
IMBALANCE_RATIO = 10  # most frequent class / least frequent class, from which a warning is shown
LABEL_WIDTH = 11  # terminal columns of the names of the lines


def summary_line(name: str, text: str) -> str:
    """A line of the summary: a name, padded to its column, and a text.

    >>> summary_line("task", "seq2seq"), summary_line("任务", "seq2seq")
    ('task       seq2seq', '任务       seq2seq')
    """
    return padded(str(name), LABEL_WIDTH) + str(text)


def format_summary(summary: DataSummary) -> str:
    """The summary as text, in the language in effect."""
    return "\n".join(_summary_lines(summary))


def _summary_lines(summary: DataSummary) -> Iterator[str]:
    """The lines of the summary, in order."""
    yield summary_line(_("task"), summary.task + _describe_columns(summary.source))
    if summary.source.instruction_format:
        roles = summary.source.roles
        name = summary.source.instruction_format
        columns = ", ".join(roles[role] for role in ("source", "input", "target") if role in roles)
        text = _("{name} ({columns})", name=name, columns=columns) if columns else name
        yield summary_line(_("format"), text)
    yield from _header_lines(summary.source)
    for name, stats in summary.splits.items():
        yield from _split_lines(summary, name, stats)
    if summary.validation_rows:
        yield summary_line(
            _("valid"),
            _("{held_out:,} rows, held out of train by a hash of their input", held_out=summary.validation_rows),
        )
    elif not summary.source.example_format.split_by_row and "valid" not in summary.splits:
        yield summary_line(_("valid"), _("the end of the text, held out in one stretch"))
    train = summary.splits["train"]
    if train.rows > 1:
        yield from _length_lines(train)
    if train.labels:
        yield summary_line(_("labels"), _format_label_counts(train.labels))
    if summary.source.example_format.example_type is LabeledText:
        yield from _imbalance_warning(train.labels)
    for description in dict.fromkeys(summary.encodings.values()):
        yield summary_line(_("encoding"), str(description))
    for note in summary.notes:
        yield summary_line(_("note"), str(note))


def _length_lines(stats: SplitStats) -> Iterator[str]:
    for field_name, (minimum, median, p95, maximum) in stats.lengths.items():
        text = _(
            "{field}: {median:,} characters usual, 95 % up to {p95:,}, all {min:,} to {max:,}",
            field=field_name,
            median=median,
            p95=p95,
            min=minimum,
            max=maximum,
        )
        yield summary_line(_("length"), text)


def _header_lines(data_source: DataSource) -> Iterator[str]:
    """Whether the first row of a TSV or CSV is a header; where the files differ, a line for each."""
    tables = [group for group in data_source.file_groups if group.header]
    by_header = {group.header if group.header_rows else (): group for group in tables}
    for group in by_header.values():
        file = f"{group.paths[0].name}: " if len(by_header) > 1 else ""
        names = ", ".join(group.header)
        if group.header_rows:
            text = _("{file}{names} (the first row; --header no takes it for data)", file=file, names=names)
        else:
            text = _(
                "{file}none, the first row is data (--header yes takes it for the names of the columns)", file=file
            )
        yield summary_line(_("header"), text)


def _split_lines(summary: DataSummary, name: str, stats: SplitStats) -> Iterator[str]:
    """The lines about one split."""
    is_single = stats.rows == 1
    if summary.source.example_format.example_type is DocumentChunk:
        unit = _("document") if is_single else _("documents")
    else:
        unit = _("row") if is_single else _("rows")
    size = _("{rows:,} {unit}, {characters:,} characters", rows=stats.rows, unit=unit, characters=stats.characters)
    if summary.source.example_format.example_type is LabeledImage:
        size = _("{rows:,} images", rows=stats.rows)
    elif summary.source.example_format.example_type in (LabeledSound, SoundFile):
        size = _("{rows:,} recordings", rows=stats.rows)
    yield summary_line(SPLIT_NAMES.get(name, name), size)
    if summary.source.example_format.example_type is QAExample:
        yield summary_line(
            "",
            _(
                "questions without an answer: {unanswerable:,} of {rows:,}",
                unanswerable=stats.unanswerable,
                rows=stats.rows,
            ),
        )
    for problem in stats.bad_rows.summary_lines():
        yield summary_line("", _("bad: ") + str(problem))
    if stats.duplicates:
        yield summary_line("", _("{duplicates:,} duplicate rows", duplicates=stats.duplicates))
    if count := summary.overlap.get(name):
        yield summary_line("", _("inputs that are in train too: {count:,}", count=count))


def _describe_columns(data_source: DataSource) -> str:
    """The column, suffix or language of each role; columns without a name have numbers."""
    roles = {
        role: _("column {name}", name=name) if name.isdigit() else name for role, name in data_source.roles.items()
    }
    if data_source.example_format.example_type is TextPair:
        source = join(" + ", (roles[role] for role in ("source", "input") if role in roles))
        first, second = data_source.languages or (source, roles["target"])
        return _(", from {first} to {second}", first=first, second=second)
    columns = join(", ", (_("{role} = {name}", role=role, name=name) for role, name in roles.items()))
    return _(" ({named})", named=columns) if columns else ""


def _format_label_counts(labels: dict[str, int]) -> str:
    counts = ", ".join(f"{name} {count:,}" for name, count in list(labels.items())[:8])
    ellipsis = " …" if len(labels) > 8 else ""
    return f"{len(labels):,}: {counts}{ellipsis}"


def _imbalance_warning(labels: dict[str, int]) -> Iterator[str]:
    """A warning where the most frequent class has many times the rows of the least frequent one."""
    frequent_label, max_count = max(labels.items(), key=lambda item: item[1])
    rare_label, min_count = min(labels.items(), key=lambda item: item[1])
    if max_count >= IMBALANCE_RATIO * min_count:
        percentage = f"{100 * max_count / sum(labels.values()):.1f} %"
        yield summary_line(
            _("warning"),
            _(
                "imbalanced classes: {many:,} rows of {most}, {few:,} of {least}; always answering "
                "{most} has an accuracy of {share}, so look at macro_f1 (--metric macro_f1)",
                many=max_count,
                most=frequent_label,
                few=min_count,
                least=rare_label,
                share=percentage,
            ),
        )
