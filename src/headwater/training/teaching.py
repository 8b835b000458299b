"""headwater.train: from files to a trained model in a folder, and on from where a run stopped.

trained = headwater.train("pairs.tsv", max_time="5m")
trained("Guten Morgen")
headwater.resume("runs/text-to-text/pairs")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwater.core import Model
from headwater.data.examples import Example
from headwater.data.look import Look
from headwater.errors import BadSetting
from headwater.text.load import load as load_tokenizer
from headwater.text.tokenizer import Tokenizer
from headwater.training import planning
from headwater.training.checkpoints import Checkpoints, Saved
from headwater.training.events import Listener, Noted
from headwater.training.exam import Exam
from headwater.training.journals import Metrics, Order, Samples
from headwater.training.launch import restarted
from headwater.training.loop import Outcome, Trainer
from headwater.training.material import Material, check_unchanged, gathered, seen, taught
from headwater.training.objectives import objective_of
from headwater.training.plots import Plots
from headwater.training.run import Run, free_name, refuse_taken
from headwater.training.settings import LEAVES, SAME, Settings, changes, read
from headwater.training.snapshot import keeper, restore, spec_of
from headwater.training.starting import begin
from headwater.training.team import Alone, team
from headwater.training.use import Trained, load_run
from headwater.weights.native import save_model


@dataclass
class Lesson:
    """Everything a run is made of, before its first step. `told` lets a caller say it to the user."""

    settings: Settings
    material: Material
    model: Any
    trainer: Trainer
    found: Look | None = None
    step_seconds: float = 0.0


Say = Callable[[Lesson], None]


def silent(lesson: Lesson) -> None: ...


def train(
    *paths: str | Path,
    examples: Mapping[str, list[Example]] | None = None,
    listeners: Iterable[Listener] = (),
    say: Say = silent,
    config: Mapping[str, Any] | None = None,
    **given: Any,
) -> Trained:
    """Learn from files, or from examples ({"train": […], "valid": […]}). Every setting may be given by its name."""
    chosen = {**(config or {}), **given, **({"paths": [str(p) for p in paths]} if paths else {})}
    settings = planning.early(read(chosen))
    if restarted(settings.out):
        return resume(settings.out, listeners=listeners, say=say)
    if settings.out:
        refuse_taken(Path(settings.out))
    together = team(settings.device)
    if not settings.paths and not examples:
        raise BadSetting("train: it needs files or examples to learn from, got none; try: headwater train pairs.tsv")
    lesson = prepare(settings, examples=examples, together=together)
    if together.rank:
        return follow(lesson)
    settings = lesson.settings
    stem = Path(settings.paths[0].removesuffix(".gz")).stem if settings.paths else "examples"
    folder = Path(settings.out) if settings.out else free_name(settings.task, stem)
    say(lesson)
    run = Run.new(folder, settings)
    with run.held():
        lesson.material.tokenizer.save(run.model)
        outcome = _go(run, lesson, listeners)
    together.leave()
    return load_run(run.folder, outcome)


def follow(lesson: Lesson, saved: Saved | None = None) -> Trained:
    """What every process but the first does: its share of the steps. It writes nothing."""
    if saved:
        restore(lesson.trainer, saved, facts_of(lesson))
    outcome = lesson.trainer.run()
    lesson.trainer.team.leave()
    return Trained(Path(), lesson.model, lesson.material.tokenizer, lesson.material.about, outcome)


def resume(folder: str | Path, *, listeners: Iterable[Listener] = (), say: Say = silent, **given: Any) -> Trained:
    """Go on with a run. Settings may change that do not make it another run: a longer time, another rhythm."""
    run = Run.open(Path(folder))
    before = run.settings()
    chosen = {SAME.get(name, name): value for name, value in given.items()}
    for name in chosen:
        if name not in LEAVES:
            read({name: None})
    if "epochs" in chosen:
        chosen = {"max_steps": 0, **chosen}
    settings = before.but(**chosen)
    changed = changes(before, settings)
    if not settings.paths:
        raise BadSetting(
            f"{folder} was trained on examples from Python, not on files; call train with out= to begin anew"
        )
    together = team(settings.device)
    with nullcontext() if together.rank else run.held():
        saved = Checkpoints(run.checkpoints, run.id).newest()
        if saved:
            check_unchanged(settings, saved.state().get("data", {}), saved.path.name)
        lesson = prepare(settings, load_tokenizer(run.model), together=together, known=spec_of(saved))
        if together.rank:
            return follow(lesson, saved)
        say(lesson)
        notes = [f"{c.name} was {c.before!r} and is {c.now!r} now" for c in changed]
        notes += _restored(lesson, saved)
        run.write_settings(lesson.settings)
        run.rewind(saved.step if saved else 0)
        outcome = _go(run, lesson, listeners, notes)
    together.leave()
    return load_run(run.folder, outcome)


def prepare(
    settings: Settings,
    tokenizer: Tokenizer | None = None,
    examples: Mapping[str, list[Example]] | None = None,
    together: Any = None,
    known: Model | None = None,
) -> Lesson:
    """Read the data, choose what was left open, make the model and its trainer. known: of a model that is resumed."""
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
    lesson = Lesson(
        settings, material, model, _trainer(settings.but(max_steps=settings.max_steps or 1), material, model), found
    )
    together = together or Alone()
    lesson.step_seconds = together.told([planning.seconds_a_step(lesson.trainer)])[0]
    lesson.settings = planning.paced(settings, lesson.step_seconds)
    lesson.trainer = _trainer(lesson.settings, material, model, together)
    if not settings.max_steps:  # the time has decided, and may decide again
        lesson.trainer.progress.plan = [(0, lesson.settings.max_steps)]
    return lesson


def _begun(s: Settings, material: Material) -> Any:
    asked = material.objective or material.task
    return begin(planning.spec_of(s, material), s.start, asked, list(material.labels), s.seed)


def _trainer(settings: Settings, material: Material, model: Any, together: Any = None) -> Trainer:
    schedule = planning.schedule_of(settings.but(warmup=max(settings.warmup, 0)))
    exam = Exam(material, settings.metric, settings.eval_rows, settings.samples)
    objective = objective_of(material.task, material.objective)
    return Trainer(model, objective, material.train, schedule, settings, evaluate=exam, team=together)


def facts_of(lesson: Lesson) -> dict[str, Any]:
    """What must be the same when the run is resumed, beside the settings."""
    return {"data": lesson.material.files, "tokenizer": lesson.material.tokenizer.hash}


def _go(run: Run, lesson: Lesson, listeners: Iterable[Listener], notes: Iterable[str] = ()) -> Outcome:
    s, trainer, frame = lesson.settings, lesson.trainer, run.frame()
    trainer.keep = keeper(Checkpoints(run.checkpoints, run.id, keep=s.keep), facts_of(lesson))
    trainer.keep_best = lambda model: save_model(run.model, model, lesson.material.about)  # type: ignore[assignment]
    trainer.mend = lambda: run.mended(frame)
    trainer.listeners = [
        Metrics(run.folder / "metrics.jsonl", s.log_every),
        Samples(run.folder / "samples.jsonl"),
        *([Order(run.folder / "order.jsonl")] if s.log_order else []),
        Plots(run),
        *listeners,
    ]
    for note in (*lesson.material.notes, *notes):
        trainer.tell(Noted(trainer.progress.step, note))
    return trainer.run()


def _restored(lesson: Lesson, saved: Saved | None) -> list[str]:
    """Go to the step of a checkpoint; what is to be said of it."""
    if saved is None:
        return ["the run was stopped before its first checkpoint; it begins again at step 0"]
    refused = [f"{what}; the one before it is used" for what in saved.skipped]
    notes = [*refused, f"resumed at step {saved.step}", *restore(lesson.trainer, saved, facts_of(lesson))]
    if saved.step >= lesson.trainer.steps:
        notes.append(f"all its {saved.step} steps were done; to go on, give more: --max-steps or --epochs")
    return notes
