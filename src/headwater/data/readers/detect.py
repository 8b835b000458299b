"""Detection of a DataSource: splits, format, columns and task, from the names of the files and their first rows.

The user's SourceOptions are never overridden; everything else is detected, with a note where it may surprise.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headwater.data.conversations import conversation_shape, shape_task
from headwater.data.examples import EXAMPLE_FORMATS, Cells, Example, LabeledText, TextPair, resolve_task
from headwater.data.readers.columns import (
    check_columns,
    infer_task,
    instruction_format,
    language_code,
    names_sounds,
    roles_by_content,
    roles_by_name,
)
from headwater.data.readers.files import (
    CLASS_SUFFIXES,
    DataFile,
    FileKind,
    collect_files,
    is_parallel_suffix,
    join_file_names,
    pair_files,
    parse_file_name,
    select_compatible,
)
from headwater.data.readers.formats import detect_format
from headwater.data.readers.lines import DEFAULT_DECODE_OPTIONS, DecodeOptions
from headwater.data.readers.source import DataSource, FileGroup, sample_rows
from headwater.data.readers.tables import has_header, header_names, read_first_rows
from headwater.data.recordings import AUDIO_TASKS
from headwater.errors import BadFile, BadSetting, Fault
from headwater.i18n import _, join

HEADER_ROWS = 200  # rows from which a header is detected
HEADER_MODES = ("auto", "yes", "no")
TABLE_FORMATS = ("tsv", "csv", "jsonl", "json")


@dataclass(frozen=True)
class SourceOptions:
    """The user's options for a dataset; what is left out is detected."""

    task: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    target: str | None = None
    decode_options: DecodeOptions = DEFAULT_DECODE_OPTIONS
    header: str = "auto"  # auto, yes or no: whether the first row of a TSV or CSV is a header
    instruction_task: str = "seq2seq"  # of an instruction format; chat where the model that learns is a decoder

    def __post_init__(self) -> None:
        if self.header not in HEADER_MODES:
            raise BadSetting(_("header must be yes, no or auto, got {header!r}; auto detects it", header=self.header))

    def requests(self, example_type: type[Example]) -> bool:
        """Whether the user named a task with examples of this type."""
        return bool(self.task) and EXAMPLE_FORMATS[self.task].example_type is example_type

    @property
    def chosen_roles(self) -> dict[str, str]:
        """Role -> column, as chosen by the user."""
        sides = {"source": self.source, "target": self.target}
        return {**self.columns, **{role: name for role, name in sides.items() if name}}


DEFAULT_SOURCE_OPTIONS = SourceOptions()


def detect_source(
    paths: Iterable[Path | str], valid: Iterable[Path | str] = (), options: SourceOptions = DEFAULT_SOURCE_OPTIONS
) -> DataSource:
    """Detect how these files are read: splits, format, columns and task."""
    if options.task:
        options = dataclasses.replace(options, task=resolve_task(options.task))

    # files and splits
    collection = collect_files(paths)
    files = [parse_file_name(path) for path in collection.files]
    notes = collection.notes
    if valid := list(valid):
        valid_collection = collect_files(valid)
        files += [parse_file_name(path)._replace(split="valid") for path in valid_collection.files]
        notes += valid_collection.notes

    # parallel corpus
    if parallel := _parallel_files(files, collection.from_folder):
        return _parallel_source(_ensure_train_split(parallel, notes), files, options, notes)

    # files of one format
    if collection.from_folder:
        files = _select_from_folder(files, collection.from_folder, collection.empty, options, notes)
    groups = _file_groups(_ensure_train_split(files, notes), options)
    formats = dict.fromkeys(group.file_format for group in groups)
    if len(formats) > 1 and not set(formats) <= set(TABLE_FORMATS):
        listing = join(
            ", ",
            (_("{name} ({file_format})", name=group.paths[0].name, file_format=group.file_format) for group in groups),
        )
        raise BadFile(
            _(
                "all files must have the same format, these have {num_formats}: {files}; give the files of one task",
                num_formats=len(formats),
                files=listing,
            )
        )
    if groups[0].file_format in _fixed_formats():
        return _fixed_format_source(groups, options, notes)
    return _table_source(groups, options, notes)


def _ensure_train_split(files: list[DataFile], notes: list[str]) -> list[DataFile]:
    """When no file is called train, the first split becomes train."""
    if any(file.split == "train" for file in files):
        return files
    first = files[0].split
    notes.append(_("no file is called train; {first} is used as the training split", first=first))
    return [file._replace(split="train") if file.split == first else file for file in files]


def _parallel_files(files: list[DataFile], from_folder: set[Path]) -> list[DataFile]:
    """The files of a parallel corpus: same stem, same folder, different language.

    A folder may hold model.c and model.h: of files found in a folder only those count whose suffix is a language, a
    side or a class; without any, all of them if each has a counterpart.
    """
    paired = _with_counterpart([file for file in files if file.language])
    certain = _with_counterpart(
        [file for file in paired if file.path not in from_folder or is_parallel_suffix(file.language)]
    )
    if certain or len(paired) < len(files):
        return certain
    return paired


def _with_counterpart(files: list[DataFile]) -> list[DataFile]:
    stems = Counter(file.stem for file in files)
    return [file for file in files if stems[file.stem] > 1]


def _select_from_folder(
    files: list[DataFile], from_folder: set[Path], empty: list[Path], options: SourceOptions, notes: list[str]
) -> list[DataFile]:
    """The compatible files of a folder; files named by the user stay."""
    kinds: list[FileKind] = []
    faults: list[Fault] = []
    for file in files:
        if file.path in from_folder:
            try:
                kinds.append(_file_kind(file, options))
            except Fault as fault:  # an image, a program, a table of something else
                faults.append(fault)
    if not kinds and len(from_folder) == len(files) + len(empty):
        raise faults[0]
    chosen = select_compatible(kinds) if kinds else set[Path]()
    selected = [file for file in files if file.path in chosen or file.path not in from_folder]
    if unused := sorted({*empty, *(file.path for file in files)} - {file.path for file in selected}):
        read = [file.path for file in selected]
        notes.append(
            _(
                "read from the folder: {read}; not read: {unread}",
                read=join_file_names(read),
                unread=join_file_names(unused),
            )
        )
    return selected


def _file_kind(file: DataFile, options: SourceOptions) -> FileKind:
    """The kind of a file, detected from this file alone."""
    group = _file_group(file, options)
    if group.file_format == "text":
        return FileKind(file.path, ("text", Path(file.path.name.removesuffix(".gz")).suffix), False)
    if group.file_format in _fixed_formats():
        return FileKind(file.path, group.file_format, True)
    data_source = _table_source((group,), options, [])
    if group.header_rows > 0 or group.file_format in ("jsonl", "json"):
        return FileKind(file.path, (data_source.task, tuple(data_source.roles.items())), True)
    return FileKind(file.path, ("columns", len(group.header)), True)


def _parallel_source(
    parallel_files: list[DataFile], all_files: list[DataFile], options: SourceOptions, notes: list[str]
) -> DataSource:
    """The source of files with a common stem: a parallel corpus, or one file per class."""
    # one file per class
    languages = {file.language for file in parallel_files}
    if options.requests(LabeledText) or (not options.task and languages <= CLASS_SUFFIXES):
        splits = dict.fromkeys(file.split for file in parallel_files)
        groups = [
            FileGroup(s, "labeled-files", tuple(file.path for file in parallel_files if file.split == s))
            for s in splits
        ]
        task = options.task or "classification"
        return DataSource(task, tuple(groups), {}, (), options.decode_options, tuple(notes))

    # one file per language
    if options.task and not options.requests(TextPair):
        raise BadSetting(
            _("parallel files are for seq2seq, got task {task!r}; give one file, or no task", task=options.task)
        )
    pairs, (left, right) = pair_files(parallel_files, options.source, options.target)
    split = {file.stem: file.split for file in parallel_files}
    read = {path for files in pairs.values() for path in files}
    if unused := [file.path for file in all_files if file.path not in read]:
        notes.append(
            _(
                "not read, without a counterpart in {left} and {right}: {files}",
                left=left,
                right=right,
                files=join_file_names(unused),
            )
        )
    groups = [FileGroup(split[stem], "parallel", files) for stem, files in pairs.items()]
    codes = tuple(filter(None, map(language_code, (left, right))))
    both = codes if len(codes) == 2 else ()
    roles = {"source": left, "target": right}
    return DataSource(options.task or "seq2seq", tuple(groups), roles, both, options.decode_options, tuple(notes))


def _fixed_formats() -> dict[str, str]:
    """File format -> task, for the formats that are of one task only."""
    return {each.file_format: each.task for each in EXAMPLE_FORMATS.values() if each.file_format}


def _fixed_format_source(file_groups: tuple[FileGroup, ...], options: SourceOptions, notes: list[str]) -> DataSource:
    """The source of files whose format determines the task (see _fixed_formats)."""
    file_format = file_groups[0].file_format
    task = _fixed_formats()[file_format]
    if options.task not in ("", task):
        raise BadSetting(
            _(
                "{name} is {file_format}, which is for {task}, not {requested}; give a file for that task",
                name=file_groups[0].paths[0].name,
                file_format=file_format,
                task=task,
                requested=options.task,
            )
        )
    if file_format == "text":
        splits = dict.fromkeys(group.split for group in file_groups)
        file_groups = tuple(
            FileGroup(s, file_format, tuple(p.paths[0] for p in file_groups if p.split == s)) for s in splits
        )
    return DataSource(task, file_groups, {}, (), options.decode_options, tuple(notes))


def _file_groups(files: Sequence[DataFile], options: SourceOptions) -> tuple[FileGroup, ...]:
    """Every file with its format. A first row that is the header of an earlier file is a header too."""
    groups: list[FileGroup] = []
    for file in files:
        headers = {group.header for group in groups if group.header_rows}
        groups.append(_file_group(file, options, headers))
    return tuple(groups)


def _file_group(file: DataFile, options: SourceOptions, headers: Collection[tuple[str, ...]] = ()) -> FileGroup:
    """One file with its format; for a TSV or CSV also its column names, from its header or as '1', '2', '3'."""
    decode_options = options.decode_options
    file_format = detect_format(file.path, decode_options)
    if file_format not in ("tsv", "csv"):
        return FileGroup(file.split, file_format, (file.path,))
    delimiter = "\t" if file_format == "tsv" else _detect_delimiter(file.path, decode_options)
    rows = read_first_rows(file.path, decode_options, delimiter, HEADER_ROWS)
    if not rows:
        raise BadFile(_("{path} has no rows; give a file with at least one", path=file.path))
    names = header_names(rows[0])
    if options.header == "yes" or (options.header == "auto" and _is_header_row(rows, names, options, headers)):
        if duplicates := [name for name in names if names.count(name) > 1]:
            raise BadFile(
                _(
                    "{path}: column names must differ, {duplicate!r} occurs twice; rename one",
                    path=file.path,
                    duplicate=duplicates[0],
                )
            )
        return FileGroup(file.split, file_format, (file.path,), names, 1, delimiter)
    widths = [len(row) for row in rows]
    width = max(set(widths), key=widths.count)
    names = tuple(map(str, range(1, width + 1)))
    return FileGroup(file.split, file_format, (file.path,), names, 0, delimiter)


def _is_header_row(
    rows: list[list[str]], names: tuple[str, ...], options: SourceOptions, headers: Collection[tuple[str, ...]]
) -> bool:
    """Whether the first row is a header: the user chose its cells, an earlier file has it, or it looks like one."""
    chosen = set(options.chosen_roles.values())
    is_chosen = bool(chosen) and chosen <= set(names) and not all(name.isdigit() for name in chosen)
    return is_chosen or names in headers or has_header(rows)


def _detect_delimiter(path: Path, decode_options: DecodeOptions) -> str:
    """The delimiter of a CSV file: the one that splits most of its rows into as many cells as the first."""

    def num_equal_rows(delimiter: str) -> int:
        rows = read_first_rows(path, decode_options, delimiter, 20)
        return sum(len(row) == len(rows[0]) > 1 for row in rows)

    return max(",;\t", key=num_equal_rows)


def _table_source(file_groups: tuple[FileGroup, ...], options: SourceOptions, notes: list[str]) -> DataSource:
    """The source of tables: columns and task from the user's options, else from names and contents."""
    chosen = options.chosen_roles
    sample = sample_rows(file_groups[0], options.decode_options)
    names = list(file_groups[0].header) or list(dict.fromkeys(name for row in sample for name in row))
    check_columns(chosen, names)
    named_columns = file_groups[0].header_rows > 0 or file_groups[0].file_format in ("jsonl", "json")
    if task := _conversation_task(sample, names, options, file_groups[0].paths[0]):
        shapes = join(", ", dict.fromkeys(conversation_shape(row) or instruction_format([*row])[0] for row in sample))
        return DataSource(task, file_groups, chosen, (), options.decode_options, tuple(notes), shapes)

    # roles of the columns: as chosen, of an instruction format, by name, by content
    format_name = ""
    detected: dict[str, str] = {}
    if not chosen and named_columns and (not options.task or options.requests(TextPair)):
        format_name, detected = instruction_format(names)
    if not format_name:
        detected = roles_by_name(names, sample) if named_columns else {}
        if not infer_task({**detected, **chosen}):
            detected = {**roles_by_content(sample), **detected}
    roles = {role: name for role, name in detected.items() if name not in chosen.values()}
    roles.update(chosen)
    wanted = options.task or AUDIO_TASKS.get(infer_task(roles), "") * names_sounds(roles.get("path", ""), sample)
    roles, task = _fit_roles(roles, wanted, names)
    if unused := [name for name in names if name not in roles.values()]:
        notes.append(_("columns not used: {columns}", columns=", ".join(unused)))
    codes = tuple(filter(None, (language_code(roles.get(role, "")) for role in ("source", "target"))))
    languages = codes if len(codes) == 2 else ()
    return DataSource(task, file_groups, roles, languages, options.decode_options, tuple(notes), format_name)


def _conversation_task(sample: Sequence[Cells], names: list[str], options: SourceOptions, path: Path) -> str:
    """The task of rows that are recognised by their keys; '' for rows whose columns have roles."""
    if options.task and EXAMPLE_FORMATS[options.task].by_keys:
        return options.task
    shape = next(filter(None, map(conversation_shape, sample)), "")
    if options.chosen_roles or not (shape or options.instruction_task == "chat"):
        return ""
    if shape and options.task:
        raise BadSetting(
            _(
                "{path} holds {shape} rows, which are for {task}, not {requested}; leave --task out",
                path=path,
                shape=shape,
                task=shape_task(shape),
                requested=options.task,
            )
        )
    if shape:
        return shape_task(shape)
    return "" if options.task else "chat" * bool(instruction_format(names)[0])


def _fit_roles(roles: dict[str, str], requested_task: str, names: list[str]) -> tuple[dict[str, str], str]:
    """Only the roles that the task needs. A task named by the user may use source as text, or target as label."""
    other = {"source": "text", "text": "source", "target": "label", "label": "target"}
    task = requested_task or infer_task(roles)
    needs = EXAMPLE_FORMATS[task].roles if task else ()
    for role in needs:
        if role not in roles and (substitute := roles.get(other.get(role, ""))):
            roles[role] = substitute
    if missing := [role for role in needs if role not in roles] or ([] if task else ["text"]):
        raise BadSetting(
            _(
                "{task} needs columns {needed}; it is not clear which of {names} is {missing}; name them, "
                "for example --columns {example}",
                task=task or _("any task"),
                needed=", ".join(needs or missing),
                names=", ".join(names[:10]),
                missing=missing[0],
                example=",".join((f"{role}={name}" for role, name in zip(needs or missing, names, strict=False))),
            )
        )
    keep = (*needs, *EXAMPLE_FORMATS[task].optional_roles)
    return {role: roles[role] for role in keep if role in roles}, task
