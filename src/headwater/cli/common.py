"""Shared code of the prediction commands: flags, loading a run, running predictions; and a pause of the GC."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import inputs, kernels
from headwater.cli.outputs import OutputFormat, ResumableFile, build_writer, print_predictions
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadInput
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.families.hf_folder import LoadedModel
    from headwater.training.predict import Predictor

FILE_CLASSIFIERS = {"image-classification": ".jpg, .png, …", "audio-classification": ".wav, .flac, …"}
JOB_FLAGS = ("run", "texts", "as_text", "column", "format", "json")  # a resumed command must repeat these


def add_predict_arguments(parser: CommandParser) -> None:
    """Add the arguments of a command that predicts with a trained model."""
    parser.add_argument("run", help=_("the folder of a run or of a model"))
    help_text = _("texts, files with one text per line, tables (CSV, TSV, JSONL), or - for the standard input")
    parser.add_argument("texts", nargs="*", help=help_text)
    inputs.add_input_arguments(parser)
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))
    help_text = _("write to this new file; if interrupted, the same command resumes")
    parser.add_argument("--out", "-o", metavar="FILE", help=help_text)


def load_for_task(args: argparse.Namespace, task: str) -> Predictor:
    """Load the model of a run; raises BadInput if it was trained for another task."""
    from headwater.tasks import get_task
    from headwater.training.predict import load_run

    predictor = load_run(args.run)
    if task == "classification" and predictor.task in FILE_CLASSIFIERS:
        raise BadInput(
            _(
                "{run} was trained for {run_task}: all inputs must be such files, or folders of them; give files "
                "whose names end in {suffixes}",
                run=args.run,
                run_task=predictor.task,
                suffixes=FILE_CLASSIFIERS[predictor.task],
            )
        )
    if predictor.task != task:
        raise BadInput(
            _(
                "{run} was trained for {run_task}, this verb is for {task}; use headwater {verb}",
                run=args.run,
                run_task=predictor.task,
                task=task,
                verb=get_task(predictor.task).verb,
            )
        )
    return predictor


def predict_inputs(args: argparse.Namespace, task_name: str, columns: tuple[str, ...] = (), **options: Any) -> None:
    """Predict every input: one line each, or the input table with added columns. columns: names of the added ones."""
    from headwater.tasks import get_task

    predictor = load_for_task(args, task_name)
    task = get_task(task_name)
    entries = inputs.open_inputs(args.texts, inputs.InputOptions.from_args(args), task_name, predictor.columns)
    output_format = OutputFormat(columns or task.output_columns, task.output_cells, task.output_line)
    writer = build_writer(entries, output_format, args.json)
    file = None
    if args.out is not None:
        job = {name: getattr(args, name) for name in JOB_FLAGS}
        file = ResumableFile(Path(args.out), {**job, **options})
    kernels.warn_missing()

    def predict(texts: Sequence[Any]) -> Sequence[Any]:
        return predictor(texts, **options)

    if file is None:
        print_predictions(entries, writer, predict, escape_for_terminal)
        return
    count = file.write(entries.entries(), writer, predict)
    print(_("{count:,} rows in {out}", count=count, out=args.out), file=sys.stderr)


def add_adapter_argument(parser: argparse.ArgumentParser) -> None:
    """Add --adapter of a command that loads a MODEL."""
    help_text = _("an adapter for the model: a tuned run, a peft folder or a .gguf file with a LoRA")
    parser.add_argument("--adapter", metavar="FOLDER", help=help_text)


def load_model(args: argparse.Namespace) -> LoadedModel:
    """The MODEL of a command, with its --adapter merged into the weights where that is possible."""
    from headwater.families.adapters import load_adapter, merge_if_possible
    from headwater.families.load import load

    loaded = load(args.model)
    return merge_if_possible(load_adapter(loaded, args.adapter)) if args.adapter else loaded


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the garbage collector during imports and model loading (saves an eighth of the start-up time).

    The objects that are created meanwhile (half a million) live until the command ends, so they are frozen afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
