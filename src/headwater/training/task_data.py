"""The data of a run: files are read, split and tokenized, and become the datasets of a task (TaskData)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.data.examples import Example, split_hash, validation_mask
from headwater.data.readers.lines import DecodeOptions
from headwater.data.readers.source import hash_files
from headwater.data.recordings import LabeledSound, Transcribed
from headwater.data.summary import DataSummary, read_dataset
from headwater.errors import BadFile, BadInput, BadSetting, NotFound, nearest
from headwater.i18n import _
from headwater.tasks import TASKS, Task, TaskData, get_task
from headwater.tasks.base import max_length
from headwater.text.load import load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.text.train import ALGORITHMS, train_tokenizer
from headwater.training.config import TrainConfig
from headwater.training.pretrained import pretrained_spec, pretrained_tokenizer

DEFAULT_TOKENIZER = "bpe"
SMALL_TRAIN_TOKENS = 1000  # a training set with fewer is noted


def read_data(config: TrainConfig) -> tuple[DataSummary, dict[str, list[Example]]]:
    """Read the files of a config: their summary, and the examples of each split."""
    s = config
    task = None if s.task == "auto" else s.task
    reading = DecodeOptions(None if s.encoding == "auto" else s.encoding, s.encoding_errors)
    return read_dataset(
        s.paths,
        s.valid,
        task,
        s.columns,
        s.source or None,
        s.target or None,
        reading,
        s.valid_fraction,
        s.seed,
        header=s.header,
        instruction_task=_instruction_task(s.init_from),
    )


def _instruction_task(init_from: str) -> str:
    """The task of instructions with outputs: chat for a pretrained decoder, else text to text."""
    spec = pretrained_spec(init_from) if init_from else None
    return "chat" if spec is not None and spec.encoder is None else "seq2seq"


def check_files_unchanged(config: TrainConfig, saved_hashes: Mapping[str, str], checkpoint_name: str) -> None:
    """Check the files of a resumed run by their hashes before they are parsed."""
    paths = [Path(path) for path in (*config.paths, *config.valid, config.synonyms) if path]
    paths += [child for path in paths if path.is_dir() for child in path.iterdir() if child.is_dir()]  # of each split
    names = [path.name for path in paths]
    for path in paths:
        alone = names.count(path.name) == 1 and path.name in saved_hashes and path.exists()
        if alone and hash_files([path]) != {path.name: saved_hashes[path.name]}:
            raise BadSetting(
                _(
                    "the data must be the same as when {where} was saved, it has changed ({name}); restore it, or "
                    "start a new run",
                    where=checkpoint_name,
                    name=path.name,
                )
            )


def load_task_data(
    config: TrainConfig, summary: DataSummary, examples: Mapping[str, list[Example]], tokenizer: Tokenizer | None = None
) -> TaskData:
    """The datasets of the files that were read. A tokenizer that is not given is trained, or loaded from a folder."""
    synonyms = [Path(config.synonyms)] if config.synonyms and Path(config.synonyms).is_file() else []
    hashes = hash_files(dict.fromkeys((*summary.source.paths, *synonyms)))
    _check_unchanged(summary.file_hashes, hashes)  # while the files were read

    train, valid = split_examples(config, summary, examples)
    task = get_task(summary.task, config.objective).configured(config)
    task_data = build_task_data(config, task, train, valid, tokenizer, summary.source.languages)
    task_data.columns = summary.source.roles
    task_data.file_hashes = hashes
    if synonyms:  # that file is read with the datasets
        _check_unchanged(hashes, hash_files(dict.fromkeys((*summary.source.paths, *synonyms))))
    if task_data.num_tokens < SMALL_TRAIN_TOKENS:
        task_data.notes.append(
            _(
                "only {tokens:,} training tokens: a model can only memorize them; give more data",
                tokens=task_data.num_tokens,
            )
        )
    return task_data


def split_examples(
    config: TrainConfig, summary: DataSummary, examples: Mapping[str, list[Example]]
) -> tuple[list[Example], list[Example]]:
    """Training and validation examples: from their own files, or split by a hash of the text.

    Recordings are split by the hash of the speaker; those of one speaker alone, by that of the file.
    """
    train = examples["train"]
    if "valid" in examples or not summary.source.example_format.split_by_row:
        return train, examples.get("valid", [])
    hashes = summary.splits["train"].input_hashes
    recordings = [row for row in train if isinstance(row, LabeledSound | Transcribed)]
    speakers = {row.speaker for row in recordings}
    if len(speakers) == 1 and any(speakers):
        hashes = np.array([split_hash(row._replace(speaker=""), config.seed) for row in recordings], np.uint64)
    is_valid = validation_mask(hashes, config.valid_fraction)
    return [train[i] for i in np.flatnonzero(~is_valid)], [train[i] for i in np.flatnonzero(is_valid)]


def _check_unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise BadFile if a file was changed while it was read."""
    for name, file_hash in before.items():
        if after[name] != file_hash:
            raise BadFile(
                _(
                    "{changed} must not change while it is read, it did; wait until it is written, and try again",
                    changed=name,
                )
            )


def build_task_data(
    config: TrainConfig,
    task: Task[Any],
    train: Sequence[Example],
    valid: Sequence[Example],
    tokenizer: Tokenizer | None = None,
    languages: tuple[str, ...] = (),
    labels: Sequence[str] = (),
) -> TaskData:
    """The datasets of a task from examples. labels: those of a trained model; else of the training examples."""
    if not train:
        raise BadInput(_("there must be at least one row to learn from, there is none; check the data"))
    if not valid and task.example_format.split_by_row:
        inputs = len({row.input_text for row in train})
        raise BadInput(
            _(
                "the validation set is empty, because the rows to learn from (rows: {num_train:,}, "
                "different inputs: {inputs:,}) are too few to split; give --valid FILE, or at least 2 "
                "rows with different inputs",
                num_train=len(train),
                inputs=inputs,
            )
        )
    if config.augment and not task.augmentable:
        raise BadSetting(
            _(
                "augment changes texts of {AUGMENTED}, the task is {task}; leave it out",
                AUGMENTED=" and ".join(each.name for each in TASKS.values() if each.augmentable),
                task=task.name,
            )
        )
    if not task.reads_text:
        tokenizer = tokenizer or train_tokenizer(["0"], "char")  # of a model folder, which always has one
    tokenizer = tokenizer or load_or_train_tokenizer(config, train, task)
    task_data = task.build_data(config, tokenizer, train, valid, labels)
    task_data.languages = languages
    task_data.truncate_to = max_length(config) if config.truncate else 0
    return task_data


def load_or_train_tokenizer(config: TrainConfig, examples: Sequence[Example], task: Task[Any]) -> Tokenizer:
    wanted = config.tokenizer
    if wanted == "auto":
        if config.init_from:
            return pretrained_tokenizer(config.init_from)
        wanted = DEFAULT_TOKENIZER
    if wanted not in ALGORITHMS:
        if not Path(wanted).is_dir():
            raise NotFound(
                _(
                    "tokenizer must be a kind or a folder, {wanted!r} is neither; {nearest}",
                    wanted=wanted,
                    nearest=nearest(wanted, ALGORITHMS),
                )
            )
        return load_tokenizer(wanted)
    texts = (text for example in examples for text in example.texts)
    trained = train_tokenizer(texts, wanted, config.vocab, task.num_sentinels)
    return task.extend_tokenizer(trained, config, examples)
