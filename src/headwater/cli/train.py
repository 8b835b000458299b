"""The command headwater train FILE …: trains a model on files, or resumes a run (--resume); prints the plan first."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.cli.parser import CommandParser, escape_control
from headwater.errors import BadFile, BadSetting, NotFound
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.training.predict import Predictor
    from headwater.training.setup import TrainSetup

HEADINGS = {
    "data": _("data"),
    "model": _("the model"),
    "tuning": _("tuning of a pretrained model"),
    "feedback": _("preferences and rewards"),
    "optim": _("optimization"),
    "train": _("training loop"),
    "evaluation": _("evaluation"),
    "output": _("output"),
}


def add_arguments(parser: CommandParser) -> None:
    from headwater.training.config import ALIASES, FIELDS

    parser.add_argument("files", nargs="*", help=_("TSV, CSV, JSONL, text, CoNLL, SQuAD, or train.en train.de"))
    parser.add_argument("--resume", metavar="RUN", help=_("resume this run"))
    parser.add_argument("--config", "-c", metavar="YAML", help=_("settings from a YAML file"))
    parser.add_argument("--recipe", metavar="NAME", help=_("settings known to work: see the docs"))
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help=_("number of processes"))
    parser.add_argument("--dry-run", action="store_true", help=_("print the plan, and exit"))
    parser.add_argument("--quiet", action="store_true", help=_("no progress"))

    # One flag per field of the config, under the heading of its section.
    groups = {section: parser.add_argument_group(str(heading)) for section, heading in HEADINGS.items()}
    for name, field in FIELDS.items():
        if name == "paths":
            continue
        group = groups[field.section]
        flag = f"--{name.replace('_', '-')}"
        help_text = str(field.description).replace("%", "%%")
        if isinstance(field.default, bool):
            parser.add_bool_flag(group, flag, name, help_text)
            continue
        if field.default not in ("", [], {}):
            help_text += f" [{field.default}]"
        nargs = "+" if isinstance(field.default, list) else None
        group.add_argument(flag, dest=name, default=None, metavar=field.type.metavar, help=help_text, nargs=nargs)

    # Aliases of these flags, which the help does not list.
    for alias, name in ALIASES.items():
        nargs = "+" if isinstance(FIELDS[name].default, list) else None
        flags = [f"--{alias.replace('_', '-')}"]
        if alias == "output":
            flags.append("-o")
        parser.add_argument(*flags, dest=name, default=None, help=argparse.SUPPRESS, nargs=nargs)


def run(args: argparse.Namespace) -> int:
    """Train, with a progress bar while large files are read."""
    if args.quiet or os.environ.get("RANK", "0") != "0":
        return _run(args)
    from headwater.data.readers.byte_streams import ReadingProgress, progress_callback

    with progress_callback(ReadingProgress()):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from headwater.training.config import FIELDS, parse_config

    start_time = time.monotonic()
    flags = {name: getattr(args, name) for name in FIELDS if name != "paths" and getattr(args, name) is not None}
    if args.nproc != 1 and "RANK" not in os.environ:
        from headwater.training.launch import launch

        parse_config(flags)  # an invalid flag is reported once, before any process is started
        return launch(args.nproc)
    from headwater.training.api import resume, train
    from headwater.training.loggers import ProgressBar

    callbacks = [] if args.quiet or os.environ.get("RANK", "0") != "0" else [ProgressBar()]
    on_setup = _plan_printer(args.dry_run, notes_shown=bool(callbacks))
    try:
        if args.resume:
            if args.files or args.config or args.recipe:
                raise BadSetting(
                    _("--resume needs only the run: its files and settings are in its folder; leave the rest out")
                )
            predictor = resume(
                args.resume, quiet=True, callbacks=callbacks, on_setup=on_setup, start_time=start_time, **flags
            )
        else:
            files = {"paths": args.files} if args.files else {}
            config = {**_recipe(args.recipe), **_config(args.config), **files, **flags}
            predictor = train(quiet=True, callbacks=callbacks, on_setup=on_setup, start_time=start_time, config=config)
    except DryRun:
        return 0
    return 0 if predictor.folder == Path() else print_outcome(predictor)


class DryRun(Exception):
    """Ends --dry-run once the plan is printed."""


def _plan_printer(dry_run: bool, notes_shown: bool) -> Callable[[TrainSetup], None]:
    """A callback that prints the plan; notes_shown: the notes are printed when training starts, so not here."""
    from headwater.training.plan_report import format_notes, format_plan
    from headwater.training.preview import print_preview

    def print_plan(setup: TrainSetup) -> None:
        kernels.warn_missing()  # some steps have run, so it is known whether the kernels were compiled
        lines = [format_plan(setup)]
        if dry_run or not notes_shown:
            lines += format_notes(setup)
        print(
            escape_control("\n".join(map(str, lines))), flush=True
        )  # labels and columns of a file may have any characters
        print_preview(setup.task_data)
        if dry_run:
            raise DryRun

    return print_plan


def _config(path: str | None) -> dict[str, Any]:
    """The settings of a YAML file, without the output folder."""
    if path is None:
        return {}
    import yaml

    if not Path(path).is_file():
        raise NotFound(
            _("--config must be a YAML file, {path} does not exist; the config.yaml of any run is one", path=path)
        )
    try:
        config = yaml.safe_load(Path(path).read_bytes())
    except (yaml.YAMLError, RecursionError) as error:
        raise BadFile(
            _("{path} is not YAML ({reason}); fix it", path=path, reason=" ".join(str(error).split())[:60])
        ) from None
    if not isinstance(config, dict):
        raise BadFile(_("{path} must contain settings (name: value); see the config.yaml of any run", path=path))
    config.get("output", {}).pop("out", None)  # a new run gets a folder of its own
    return config


def _recipe(name: str | None) -> dict[str, Any]:
    from headwater.training.recipes import recipe

    return recipe(name) if name else {}


STOP_MESSAGES = {  # by StopReason
    "finished": _("done"),
    "early_stopping": _("stopped early: no better evaluation"),
    "time_limit": _("time limit reached"),
    "interrupted": _("interrupted; the run can be resumed"),
}


def _relative_path(folder: Path) -> Path:
    """The path relative to the current folder, if it is inside it."""
    with suppress(ValueError, OSError):
        return folder.relative_to(Path.cwd())
    return folder


def print_outcome(predictor: Predictor) -> int:
    """Print why training stopped and the next commands; returns the exit code."""
    from headwater.tasks import get_task
    from headwater.training.state import StopReason

    result = predictor.result
    assert result is not None
    folder = _relative_path(predictor.folder)
    where = _(": step {step}, best at step {best_step}", step=result.state.step, best_step=result.state.best_step)
    print(f"\n{STOP_MESSAGES[result.stop_reason]}{where}")
    task = get_task(predictor.task, predictor.metadata.get("objective", ""))
    lines = {
        _("use"): task.usage(predictor.tokenizer).format(run=folder),
        _("evaluate"): f"headwater eval {folder} FILE",
        _("plots"): f"{folder / 'plots' / 'loss.png'}, {folder / 'metrics.jsonl'}",
    }
    if result.stop_reason in (StopReason.INTERRUPTED, StopReason.TIME_LIMIT):
        longer = " --max-time …" if result.stop_reason is StopReason.TIME_LIMIT else ""
        lines = {_("resume"): f"headwater train --resume {folder}{longer}", **lines}
    for name, text in lines.items():
        print(f"  {name:<10} {text}")
    return 130 if result.stop_reason is StopReason.INTERRUPTED else 0
