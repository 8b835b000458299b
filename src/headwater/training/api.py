"""The public training API: train() from files to a run folder, resume() from a checkpoint.

trained = headwater.train("pairs.tsv", max_time="5m")
trained("Guten Morgen")
headwater.resume("runs/seq2seq/pairs")
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar, Unpack, get_type_hints

from headwater.data.examples import Example
from headwater.data.readers.sound_files import has_only_tokens
from headwater.errors import BadSetting, Unavailable
from headwater.i18n import _, translated
from headwater.text.load import load_tokenizer
from headwater.training.checkpoint import (
    check_config_matches,
    check_resume_changes,
    checkpoint_config,
    checkpoint_spec,
    config_differences,
    restore_checkpoint,
)
from headwater.training.config import ALIASES, FIELDS, SECTIONS, ResumeKwargs, TrainConfig, TrainKwargs, parse_config
from headwater.training.distributed import init_distributed
from headwater.training.launch import is_elastic_restart
from headwater.training.loggers import ProgressBar
from headwater.training.plan_report import format_plan
from headwater.training.predict import Predictor, load_run
from headwater.training.preview import print_preview
from headwater.training.recipes import resolve_early
from headwater.training.run_dir import RUNS_ROOT, RunDir, require_empty, require_writable, unused_path
from headwater.training.run_output import run_fingerprint
from headwater.training.setup import FRESH_START, ResumePoint, TrainSetup, build_train_setup
from headwater.training.state import Callback, StopReason, TrainResult, TrainState
from headwater.training.storage import Checkpoint, CheckpointManager
from headwater.training.task_data import check_files_unchanged

SetupCallback = Callable[[TrainSetup], None]
Function = TypeVar("Function", bound=Callable[..., Any])


def document_settings(kwargs: type) -> Callable[[Function], Function]:
    """Decorator: a signature and a docstring with every setting of a TypedDict, for help() and completion."""
    types = get_type_hints(kwargs)

    def decorate(function: Function) -> Function:
        lines = ["Every setting is a keyword; 0 or 'auto' means: chosen when the data has been seen."]
        keywords = []
        for section in SECTIONS:
            names = [name for name in FIELDS if name in types and FIELDS[name].section == section]
            lines += ["", f"{section}:"] if names else []
            for name in names:
                default = FIELDS[name].default
                type_name = inspect.formatannotation(types[name]).replace("pathlib.", "")
                meaning = translated(FIELDS[name].description, "en")
                lines.append(f"    {name} ({type_name}, default {default!r}): {meaning}")
                keywords.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=types[name]))
        signature = inspect.signature(function)
        positional = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*positional, *keywords])  # type: ignore[attr-defined]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
        return function

    return decorate


@document_settings(TrainKwargs)
def train(
    *paths: str | Path,
    examples: Mapping[str, list[Example]] | None = None,
    config: TrainConfig | Mapping[str, Any] | None = None,
    quiet: bool = False,
    callbacks: Iterable[Callback] = (),
    on_setup: SetupCallback | None = None,
    start_time: float | None = None,
    **settings: Unpack[TrainKwargs],
) -> Predictor:
    """Train a model on files or examples, in a run directory of its own, and show the plan and the progress.

    paths: the training files
    examples: in place of files, {"train": [...], "valid": [...]}
    config: settings as a TrainConfig or a mapping, such as a parsed config.yaml; keywords override it
    quiet: show nothing
    callbacks: functions that are called with every event of the run (headwater.training.state)
    on_setup: a function that is called with the plan before the first step
    start_time: time.monotonic() at which max_time begins; the call itself, if not given
    """
    # settings
    start_time = time.monotonic() if start_time is None else start_time
    base = config.model_dump() if isinstance(config, TrainConfig) else config or {}
    values: dict[str, Any] = {**base, **settings}
    if paths:
        values["paths"] = [str(path) for path in paths]
    config = resolve_early(parse_config(values))
    if is_elastic_restart(config.out):
        return resume(config.out, quiet=quiet, callbacks=callbacks, on_setup=on_setup, start_time=start_time)
    if not config.paths and not examples:
        raise BadSetting(_("train: it needs files or examples to learn from, got none; try: headwater train pairs.tsv"))

    if needs_codec(config):
        config = train_codec(config, quiet, callbacks, on_setup, start_time)

    # set-up; a run directory that cannot be written is refused before the data is read
    dist = init_distributed(config.device)
    if not dist.rank:
        require_writable(Path(config.out or RUNS_ROOT))
    if config.out:
        require_empty(Path(config.out))
    bars = [] if quiet or dist.rank else [ProgressBar()]
    setup = build_train_setup(
        config, examples=examples, callbacks=[*bars, *callbacks], dist=dist, start_time=start_time
    )
    if setup.run is None:
        return _train_without_output(setup, start_time)
    _announce(setup, bars, on_setup)

    # training
    with setup.run.create(setup.config).locked():
        setup.task_data.tokenizer.save(setup.run.model_dir)
        if setup.task_data.processor is not None:
            setup.task_data.processor.save(setup.run.model_dir)
        result = _train(setup, start_time)
    dist.shutdown()
    return load_run(setup.run.folder, result)


CODEC_TIME_FRACTION = 0.4  # of a time limit, for the codec
CODEC_TASKS = {"text-to-image": "picture-codec", "audio-language-model": "sound-codec"}
CODEC_SETTINGS = ("paths", "valid", "columns", "header", "encoding", "encoding_errors", "image_size", "seed", "device")


def needs_codec(config: TrainConfig) -> bool:
    """Whether a codec is trained before the model: none is named, and the data is no token files."""
    if config.task not in CODEC_TASKS or config.codec or not config.paths:
        return False
    return not all(has_only_tokens(Path(path)) for path in config.paths)


def train_codec(
    config: TrainConfig, quiet: bool, callbacks: Iterable[Callback], on_setup: SetupCallback | None, start_time: float
) -> TrainConfig:
    """Train the codec of pictures or sounds of a run, in a run of its own beside it; one that is there is resumed."""
    task = CODEC_TASKS[config.task]
    if init_distributed(config.device).world_size > 1:
        raise BadSetting(
            _(
                "{task} on several processes needs a codec; train one with --task {codec_task} first",
                task=config.task,
                codec_task=task,
            )
        )
    stem = Path(config.paths[0]).stem
    folder = Path(f"{config.out}-codec") if config.out else unused_path(task, stem)
    if (folder / "config.yaml").is_file():
        codec = resume(folder, quiet=quiet, callbacks=callbacks, on_setup=on_setup, start_time=start_time)
    else:
        settings = {name: getattr(config, name) for name in CODEC_SETTINGS}
        settings |= {"task": task, "out": str(folder), "max_time": CODEC_TIME_FRACTION * config.max_time}
        codec = train(config=settings, quiet=quiet, callbacks=callbacks, on_setup=on_setup, start_time=start_time)
    if codec.result is not None and codec.result.stop_reason is StopReason.INTERRUPTED:
        raise Unavailable(
            _("the codec was not finished; the same command with --out resumes it in {folder}", folder=folder)
        )
    return config.replace(codec=str(folder))


@document_settings(ResumeKwargs)
def resume(
    folder: str | Path,
    *,
    quiet: bool = False,
    callbacks: Iterable[Callback] = (),
    on_setup: SetupCallback | None = None,
    start_time: float | None = None,
    **settings: Unpack[ResumeKwargs],
) -> Predictor:
    """Resume a run from its latest checkpoint. Some settings may change, such as max_steps or patience.

    folder: the run directory
    quiet, callbacks, on_setup, start_time: as in train
    """
    # settings
    start_time = time.monotonic() if start_time is None else start_time
    run = RunDir.open(Path(folder))
    old_config = run.load_config()
    changes = {ALIASES.get(name, name): value for name, value in settings.items()}
    config = _changed_config(old_config, changes, folder)

    dist = init_distributed(config.device)
    with nullcontext() if dist.rank else run.locked():
        # the latest checkpoint
        checkpoint = CheckpointManager(run.checkpoints_dir, run.id).latest_valid()
        saved_config = checkpoint_config(checkpoint) or old_config
        resume_point = FRESH_START
        if checkpoint:
            check_config_matches(old_config, saved_config, str(run.config_path), checkpoint.path.name)
            check_files_unchanged(config, checkpoint.state().get("data", {}), checkpoint.path.name)
            if changes.keys() & {"max_time", "max_steps", "epochs"} == {"max_time"}:
                state = TrainState(**checkpoint.state()["train_state"])
                config, resume_point = _extend_time_limit(config, saved_config, state)

        # set-up
        bars = [] if quiet or dist.rank else [ProgressBar()]
        setup = build_train_setup(
            config,
            tokenizer=load_tokenizer(run.model_dir),
            run=None if dist.rank else run,
            callbacks=[*bars, *callbacks],
            dist=dist,
            start_time=start_time,
            saved_spec=checkpoint_spec(checkpoint),
            resume_point=resume_point,
        )
        if dist.rank:
            return _train_without_output(setup, start_time, checkpoint)
        _announce(setup, bars, on_setup)
        notes = _change_notes(saved_config, setup.config) + _restore(setup, checkpoint)
        run.write_config(setup.config)
        run.truncate_logs(checkpoint.step if checkpoint else 0)

        # training
        result = _train(setup, start_time, notes)
    dist.shutdown()
    return load_run(run.folder, result)


def _announce(setup: TrainSetup, bars: list[ProgressBar], on_setup: SetupCallback | None) -> None:
    """Show the plan before training."""
    for bar in bars:
        bar.report(format_plan(setup))
        print_preview(setup.task_data, bar.console)
    if on_setup is not None:
        on_setup(setup)


def _train(setup: TrainSetup, start_time: float, notes: Iterable[str] = ()) -> TrainResult:
    trainer = setup.trainer
    for note in (*setup.task_data.notes, *notes, *setup.notes):
        trainer.note(trainer.state.step, note)
    return trainer.train(start_time)


def _train_without_output(setup: TrainSetup, start_time: float, checkpoint: Checkpoint | None = None) -> Predictor:
    """Train on a rank other than 0, which writes nothing."""
    if checkpoint:
        _restore_trainer(setup, checkpoint)
    result = setup.trainer.train(start_time)
    setup.trainer.dist.shutdown()
    return Predictor(Path(), setup.model, setup.task_data.tokenizer, setup.task_data.metadata, result)


# ------------------------------------------------------------------------------------------------------------ resuming


def _changed_config(old_config: TrainConfig, changes: Mapping[str, Any], folder: str | Path) -> TrainConfig:
    """The config of a resumed run; a setting that must not change is refused."""
    if "epochs" in changes:  # they replace the number of steps
        changes = {"max_steps": 0, **changes}
    config = old_config.replace(**changes)
    check_resume_changes(old_config, config)
    if not config.paths:
        raise BadSetting(
            _(
                "{folder} was trained on examples from Python, not on files; call train with out= to start a new run",
                folder=folder,
            )
        )
    return config


def _extend_time_limit(
    config: TrainConfig, saved_config: TrainConfig, state: TrainState
) -> tuple[TrainConfig, ResumePoint]:
    """Plan the steps again where a time limit decided their number and another one is given."""
    if not state.step_plan or not config.max_time or config.max_time == saved_config.max_time:
        return config, FRESH_START
    used = state.seconds + state.setup_seconds
    if config.max_time <= used:
        raise BadSetting(
            _(
                "max_time must be more than the {used:.0f} s that this run has taken already, got "
                "{max_time:.0f} s; give a longer --max-time (it counts from the beginning)",
                used=used,
                max_time=config.max_time,
            )
        )
    return config.replace(max_steps=0), ResumePoint(state.step, used)


def _change_notes(saved_config: TrainConfig, config: TrainConfig) -> list[str]:
    return [
        _("{name} was {before!r} and is {now!r} now", name=change.name, before=change.old, now=change.new)
        for change in config_differences(saved_config, config)
    ]


def _restore_trainer(setup: TrainSetup, checkpoint: Checkpoint) -> list[str]:
    """Restore the trainer from a checkpoint; a new plan, or no time limit, replaces the saved plan."""
    trainer = setup.trainer
    new_plan = trainer.state.step_plan
    notes = restore_checkpoint(trainer, checkpoint, run_fingerprint(setup.task_data, setup.model))
    if new_plan or not setup.config.max_time:
        trainer.state.step_plan = new_plan
    return notes


def _restore(setup: TrainSetup, checkpoint: Checkpoint | None) -> list[str]:
    """Restore a checkpoint; returns the notes about it."""
    if checkpoint is None:
        return [_("the run was stopped before its first checkpoint; it starts again at step 0")]
    refused = [_("{what}; the one before it is used", what=what) for what in checkpoint.skipped]
    notes = [*refused, _("resumed at step {step}", step=checkpoint.step), *_restore_trainer(setup, checkpoint)]
    config = setup.config
    state = setup.trainer.state
    used = state.seconds + state.setup_seconds
    longer = _("--max-time above {ceil}s (it counts from the beginning)", ceil=math.ceil(used))
    if checkpoint.step < setup.trainer.total_steps:
        if 0 < config.max_time <= used:
            limit = config.max_time
            notes.append(
                _("its time of {max_time:.0f} s is over; to continue, give {longer}", max_time=limit, longer=longer)
            )
        return notes
    more = _("--max-steps above {step}", step=checkpoint.step)
    if config.epochs:
        more = _("--max-steps above {step} or --epochs above {epochs:g}", step=checkpoint.step, epochs=config.epochs)
    longer = longer if state.step_plan else more
    text = _("all its {step} steps were done; to continue, give {longer}", step=checkpoint.step, longer=longer)
    return [*notes, text]
