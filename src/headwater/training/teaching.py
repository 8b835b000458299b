"""headwater.train: from files to a trained model in a folder, and on from where a run stopped.

trained = headwater.train("pairs.tsv", max_time="5m")
trained("Guten Morgen")
headwater.resume("runs/text-to-text/pairs")
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from headwater.core import Model
from headwater.data.examples import Example
from headwater.data.look import Look
from headwater.errors import BadSetting
from headwater.text.load import load as load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.training import planning
from headwater.training.changes import changes, check_written, differences
from headwater.training.checkpoints import Checkpoints, Saved
from headwater.training.evaluation_cost import MOST_ROWS, EvaluationPlan
from headwater.training.events import Listener, Noted
from headwater.training.exam import Exam
from headwater.training.journals import Metrics, Order, Samples
from headwater.training.keywords import TrainSettings, with_settings
from headwater.training.launch import restarted
from headwater.training.loop import Trainer
from headwater.training.material import Material, check_unchanged, gathered, seen, taught
from headwater.training.objectives import objective_of
from headwater.training.plots import Plots
from headwater.training.progress import Show
from headwater.training.records import Outcome, Progress, Scored
from headwater.training.report import announced
from headwater.training.run import ROOT, Run, free_name, refuse_taken, refuse_unwritable
from headwater.training.settings import LEAVES, SAME, Settings, read
from headwater.training.snapshot import Snapshot, keeper, restore, settings_of, spec_of
from headwater.training.starting import begin
from headwater.training.team import Alone, team
from headwater.training.use import Trained, load_run
from headwater.weights.native import save_model


@dataclass
class Lesson:
    """Everything a run is made of, before its first step."""

    settings: Settings
    material: Material
    model: Any
    trainer: Trainer
    evaluation: EvaluationPlan
    found: Look | None = None
    step_seconds: float = 0.0
    notes: Sequence[str] = ()  # of the plan; those of the data are in material.notes


Say = Callable[[Lesson], None]


@with_settings
def train(
    *paths: str | Path,
    examples: Mapping[str, list[Example]] | None = None,
    config: Mapping[str, Any] | None = None,
    quiet: bool = False,
    listeners: Iterable[Listener] = (),
    say: Say | None = None,
    started: float | None = None,
    **given: Unpack[TrainSettings],
) -> Trained:
    """Train a model on files, or on examples, in a folder of its own; what is found and how it goes is shown.

    paths: the files to learn from
    examples: in place of files, {"train": [...], "valid": [...]}
    config: settings as a mapping, such as a config.yaml that was read; keywords win over it
    quiet: show nothing
    listeners: functions that are called with every event of the run (headwater.training.events)
    say: a function that is called with the plan before the first step
    started: time.monotonic() at which max_time begins; the call itself, if not given
    """
    started = time.monotonic() if started is None else started
    chosen = {**(config or {}), **given, **({"paths": [str(p) for p in paths]} if paths else {})}
    settings = planning.early(read(chosen))
    if restarted(settings.out):
        return resume(settings.out, quiet=quiet, listeners=listeners, say=say, started=started)
    if not settings.paths and not examples:
        raise BadSetting("train: it needs files or examples to learn from, got none; try: headwater train pairs.tsv")
    together = team(settings.device)
    if not together.rank:
        refuse_unwritable(Path(settings.out or ROOT))
    if settings.out:
        refuse_taken(Path(settings.out))
    lesson = prepare(settings, examples=examples, together=together, started=started)
    if together.rank:
        return follow(lesson, started)
    stem = Path(lesson.settings.paths[0].removesuffix(".gz")).stem if lesson.settings.paths else "examples"
    folder = Path(settings.out) if settings.out else free_name(lesson.settings.task, stem)
    listeners = _shown(lesson, quiet, listeners, say)
    run = Run.new(folder, lesson.settings)
    with run.held():
        lesson.material.tokenizer.save(run.model)
        outcome = _go(run, lesson, listeners, started)
    together.leave()
    return load_run(run.folder, outcome)


def _shown(lesson: Lesson, quiet: bool, listeners: Iterable[Listener], say: Say | None) -> list[Listener]:
    """Say the plan; all who listen to the run."""
    show = [] if quiet else [Show()]
    for display in show:
        display.report(announced(lesson))
    if say is not None:
        say(lesson)
    return [*show, *listeners]


def follow(lesson: Lesson, started: float, saved: Saved | None = None) -> Trained:
    """What every process but the first does: its share of the steps. It writes nothing."""
    if saved:
        _goes_to(lesson, saved)
    lesson.trainer.progress.preparation += time.monotonic() - started
    outcome = lesson.trainer.run()
    lesson.trainer.team.leave()
    return Trained(Path(), lesson.model, lesson.material.tokenizer, lesson.material.about, outcome)


@with_settings
def resume(
    folder: str | Path,
    *,
    quiet: bool = False,
    listeners: Iterable[Listener] = (),
    say: Say | None = None,
    started: float | None = None,
    **given: Unpack[TrainSettings],
) -> Trained:
    """Go on with a run. Settings may change that do not make it another run, such as max_steps or patience.

    quiet, listeners, say, started: as in train
    """
    started = time.monotonic() if started is None else started
    run = Run.open(Path(folder))
    before = run.settings()
    chosen = {SAME.get(name, name): value for name, value in given.items()}
    for name in chosen:
        if name not in LEAVES:
            read({name: None})
    if "epochs" in chosen:
        chosen = {"max_steps": 0, **chosen}
    settings = before.but(**chosen)
    changes(before, settings)
    if not settings.paths:
        raise BadSetting(
            f"{folder} was trained on examples from Python, not on files; call train with out= to begin anew"
        )
    together = team(settings.device)
    with nullcontext() if together.rank else run.held():
        saved = Checkpoints(run.checkpoints, run.id).newest()
        known = settings_of(saved) or before
        done = planning.NOTHING_DONE
        if saved:
            check_written(before, known, str(run.config), saved.path.name)
            check_unchanged(settings, saved.state().get("data", {}), saved.path.name)
            if chosen.keys() & {"max_time", "max_steps", "epochs"} == {"max_time"}:
                settings, done = _more_time(settings, known, Progress(**saved.state()["progress"]))
        tokenizer = load_tokenizer(run.model)
        lesson = prepare(settings, tokenizer, together=together, known=spec_of(saved), done=done, started=started)
        if together.rank:
            return follow(lesson, started, saved)
        listeners = _shown(lesson, quiet, listeners, say)
        notes = [f"{c.name} was {c.before!r} and is {c.now!r} now" for c in differences(known, lesson.settings)]
        notes += _restored(lesson, saved)
        run.write_settings(lesson.settings)
        run.rewind(saved.step if saved else 0)
        outcome = _go(run, lesson, listeners, started, notes)
    together.leave()
    return load_run(run.folder, outcome)


def _more_time(settings: Settings, known: Settings, progress: Progress) -> tuple[Settings, planning.Done]:
    """Where the time decided how many steps a run has, and it is given another time: the steps are planned anew."""
    if not progress.plan or not settings.max_time or settings.max_time == known.max_time:
        return settings, planning.NOTHING_DONE
    used = progress.seconds + progress.preparation
    if settings.max_time <= used:
        raise BadSetting(
            f"max_time must be more than the {used:.0f} s that this run has taken already, got "
            f"{settings.max_time:.0f} s; give a longer --max-time (it counts from the beginning)"
        )
    return settings.but(max_steps=0), planning.Done(progress.step, used)


def prepare(
    settings: Settings,
    tokenizer: Tokenizer | None = None,
    examples: Mapping[str, list[Example]] | None = None,
    together: Any = None,
    known: Model | None = None,
    done: planning.Done = planning.NOTHING_DONE,
    started: float | None = None,
) -> Lesson:
    """Read the data, choose what was left open, make the model and its trainer. known, done: of a resumed run."""
    found = None
    if examples:
        task = "text-to-text" if settings.task == "auto" else settings.task
        material = taught(settings, task, examples["train"], examples["valid"], tokenizer)
    else:
        found = seen(settings)
        material = gathered(settings, found, tokenizer)
    settings = planning.resolved(settings, material, known)
    made = known.build(seed=settings.seed) if known else _begun(settings, material)
    planning.check_vocabulary(made, material, settings)
    model = made.to(settings.device).train()
    return _planned(settings, material, model, found, together or Alone(), started, done)


def _planned(
    s: Settings,
    material: Material,
    model: Any,
    found: Look | None,
    together: Any,
    started: float | None,
    done: planning.Done,
) -> Lesson:
    """Measure a few steps and evaluations, and choose how many of each there will be."""
    began, cpu = time.monotonic(), time.process_time()
    draft = _trainer(s.but(max_steps=s.max_steps or 1), material, model)
    step = planning.seconds_a_step(draft)
    open_ = not (s.eval_every and s.eval_rows) or s.max_time
    row = planning.seconds_a_row(draft, _exam(s, material)) if open_ else 0.0
    now = time.monotonic()
    spent = now - (began if started is None else started)
    closing = planning.closing_seconds(model, (now - began) / max(1e-9, time.process_time() - cpu))
    measured = planning.Timings(*together.told([step, row, spent, closing]))
    rows = len(material.examples) or material.valid.size
    chosen, evaluation = planning.paced(s, measured, rows, done)
    trainer = _trainer(chosen, material, model, together)
    trainer.evaluation_seconds, trainer.closing_seconds = evaluation.seconds, measured.closing
    if not s.max_steps:  # the time has decided, and may decide again
        trainer.progress.plan = [(0, chosen.max_steps)]
    if not s.eval_every:
        trainer.progress.cadence = (0, chosen.eval_every)
    notes = [note for note in (planning.unusual_lr(chosen), planning.unplannable(s, measured, evaluation)) if note]
    return Lesson(chosen, material, model, trainer, evaluation, found, measured.step, notes)


def _begun(s: Settings, material: Material) -> Any:
    asked = material.objective or material.task
    return begin(planning.spec_of(s, material), s.start, asked, list(material.labels), s.seed)


def _trainer(settings: Settings, material: Material, model: Any, together: Any = None) -> Trainer:
    schedule = planning.schedule_of(settings.but(warmup=max(settings.warmup, 0)))
    objective = objective_of(material.task, material.objective)
    exam = _exam(settings, material)
    return Trainer(model, objective, material.train, schedule, settings, evaluate=exam, team=together)


def _exam(settings: Settings, material: Material) -> Exam:
    return Exam(material, settings.metric, settings.eval_rows or MOST_ROWS, settings.samples)


def facts_of(lesson: Lesson) -> dict[str, Any]:
    """What must be the same when the run is resumed, beside the settings."""
    return {"data": lesson.material.files, "tokenizer": lesson.material.tokenizer.hash}


def _go(run: Run, lesson: Lesson, listeners: Iterable[Listener], started: float, notes: Iterable[str] = ()) -> Outcome:
    s, trainer, frame = lesson.settings, lesson.trainer, run.frame()
    keep = keeper(Checkpoints(run.checkpoints, run.id, keep=s.keep), facts_of(lesson))

    def alone() -> None:
        run.check_held(frame)

    def keep_alone(snap: Snapshot) -> str:
        alone()
        return keep(snap)

    def keep_best(model: Any) -> None:
        alone()
        save_model(run.model, model, lesson.material.about)

    trainer.guard, trainer.keep, trainer.keep_best = alone, keep_alone, keep_best
    trainer.mend = lambda: run.mended(frame)
    if s.final_rows > s.eval_rows:
        trainer.evaluate_best = lambda: _evaluated_best(run, lesson)
    trainer.listeners = [
        Metrics(run.folder / "metrics.jsonl", s.log_every),
        Samples(run.folder / "samples.jsonl"),
        *([Order(run.folder / "order.jsonl")] if s.log_order else []),
        Plots(run),
        *listeners,
    ]
    for note in (*lesson.material.notes, *notes, *lesson.notes):
        trainer.tell(Noted(trainer.progress.step, note))
    trainer.progress.preparation += time.monotonic() - started
    return trainer.run()


@torch.no_grad()
def _evaluated_best(run: Run, lesson: Lesson) -> Scored:
    """The best model, as it is in the folder, on settings.final_rows."""
    exam = _exam(lesson.settings.but(eval_rows=lesson.settings.final_rows), lesson.material)
    return exam(load_run(run.folder).model.to(lesson.settings.device))


def _goes_to(lesson: Lesson, saved: Saved) -> list[str]:
    """Put the trainer where the checkpoint was made; a plan made anew, or no limit of time, replaces the saved one."""
    trainer = lesson.trainer
    made_now = trainer.progress.plan
    notes = restore(trainer, saved, facts_of(lesson))
    if made_now or not lesson.settings.max_time:
        trainer.progress.plan = made_now
    return notes


def _restored(lesson: Lesson, saved: Saved | None) -> list[str]:
    """Go to the step of a checkpoint; what is to be said of it."""
    if saved is None:
        return ["the run was stopped before its first checkpoint; it begins again at step 0"]
    refused = [f"{what}; the one before it is used" for what in saved.skipped]
    notes = [*refused, f"resumed at step {saved.step}", *_goes_to(lesson, saved)]
    s, progress = lesson.settings, lesson.trainer.progress
    used = progress.seconds + progress.preparation
    longer = f"--max-time above {math.ceil(used)}s (it counts from the beginning)"
    if saved.step < lesson.trainer.steps:
        over = 0 < s.max_time <= used
        return [*notes, f"its time of {s.max_time:.0f} s is over; to go on, give {longer}"] if over else notes
    more = f"--max-steps above {saved.step}"
    if s.epochs:
        more = f"--max-steps above {saved.step} or --epochs above {s.epochs:g}"
    return [*notes, f"all its {saved.step} steps were done; to go on, give {longer if progress.plan else more}"]
