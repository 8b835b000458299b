"""The loop: steps whose data, chance and learning rate are functions of their number alone.

So a run that was killed and resumed is the run that never stopped: only weights, moments and a few counters are kept.
A step's loss is Σ losses / Σ counted tokens over the whole step, however it is cut into pieces and shared out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.data.batches import Batch, share
from headwater.data.chance import bits
from headwater.errors import BadSetting, CheckFailed
from headwater.machine.memory import give_back
from headwater.training.averaging import Average
from headwater.training.culprit import bad_gradient, culprit
from headwater.training.divergence import diverged, record
from headwater.training.evaluation_cost import choose_interval, evaluation_due
from headwater.training.events import Evaluated, Event, FinalEvaluated, Listener, Noted, Stepped, Stopped
from headwater.training.gradients import Gradients, Norms, Scale, times_the_usual
from headwater.training.interrupts import Interrupts
from headwater.training.mishaps import explained
from headwater.training.objectives import Objective, how_many, real_tokens, to_tensors
from headwater.training.optimiser import optimiser_for, set_lr
from headwater.training.pace import Pace
from headwater.training.records import Mean, Outcome, Progress, Scored, Source, Wishes
from headwater.training.saving import Saver, tried
from headwater.training.settings import Settings
from headwater.training.snapshot import Snapshot, snapshot
from headwater.training.spread import spread
from headwater.training.strides import out_of_time, place, plan_again, replanning_due
from headwater.training.team import Alone

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NONE = Wishes()
REMEMBERED, NOTABLE = 64, 100.0  # norms that are remembered; times their median a gradient is long to be worth a word


class Trainer:
    """evaluate(model) -> Scored; keep(snapshot) writes a checkpoint; keep_best(model) writes the model folder."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        source: Source,
        schedule: Any,
        settings: Settings,
        *,
        evaluate: Callable[[Any], Scored] | None = None,
        keep: Callable[[Snapshot], str] | None = None,
        keep_best: Callable[[Any], None] | None = None,
        listeners: Iterable[Listener] = (),
        team: Any = None,
    ) -> None:
        s = settings
        self.model, self.objective, self.source, self.schedule, self.settings = model, objective, source, schedule, s
        self.evaluate_model, self.keep, self.keep_best = evaluate, keep, keep_best
        self.listeners, self.team, self.progress = list(listeners), team or Alone(), Progress()
        self.device = next(model.parameters()).device
        self._prepare()
        self.spread = spread(model, objective, self.team, s.shard)
        self.optimiser = optimiser_for(model, schedule.at(1), s)
        self.gradients, self.average = Gradients(model), Average(model, s.average)
        self.dtype = DTYPES["fp32" if s.dtype == "auto" else s.dtype]
        self.scale = Scale(Scale.FIRST if self.dtype is torch.float16 else 1.0)
        self.saver = Saver(s.save_every, s.save_steps, self.tell)
        self.mend: Callable[[], bool] | None = None  # whether what was kept had gone; its place is there again
        self.evaluate_best: Callable[[], Scored] | None = None  # on settings.final_rows, once the run has ended
        self.guard: Callable[[], None] = lambda: None  # called before anything is written: a fault where it must not be
        self.began = self.began_seconds = 0.0
        self.evaluation_seconds = 0.0  # of the last evaluation; before the first: as planned
        self.closing_seconds = 0.0  # what is done after the last evaluation: checkpoint, plots
        self.step_seconds = Mean()
        self.pace, self.piece = Pace(), "no rows"

    def _prepare(self) -> None:
        if self.settings.recompute:
            self.model.recompute()
            give_back()
        if self.settings.compile and self.settings.shard and self.team.world > 1:
            raise BadSetting("compile and shard can not be had together: a layer's weights come and go; give one")
        if self.settings.compile:
            for stack in filter(None, (self.model.encoder, self.model.decoder)):
                stack.compile(
                    dynamic=True, options={"fallback_random": True}
                )  # the dropout of a run that is not compiled

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> Outcome:
        """Train until the last step, or until something else ends it. What it is, is said in the outcome."""
        p = self.progress
        self.began, self.began_seconds = time.monotonic(), p.seconds
        try:
            with Interrupts() as interrupts:
                why = self._steps(interrupts)
                self._evaluate_best(why)
        except (RuntimeError, MemoryError) as error:
            if fault := explained(error, p.step + 1, self.piece):
                raise fault from error
            raise
        finally:
            self.saver.collect()
        self.tell(Stopped(p.step, why, self.elapsed()))
        if why == "bad steps":
            raise CheckFailed(f"{p.bad} steps in a row gave NaN or inf and were not applied; lower --lr (now "
                              f"{self.settings.lr:g}), or look at the data named above (the weights before them are "
                              "saved)")  # fmt: skip
        return Outcome(why, p)

    def _steps(self, interrupts: Interrupts) -> str:
        p = self.progress
        why = "finished" if p.step >= self.steps else ""
        for batch in self.source.after(p.position) if not why else ():
            wishes = self.step(
                batch, Wishes(bool(interrupts.asked), self._late(), self.team.rank == 0 and self.saver.due(p.step + 1))
            )
            self.saver.collect(wait=False)
            if evaluation_due(self):
                self.evaluate()
                choose_interval(self)
            if replanning_due(p):
                plan_again(self)
            why = self._reason(wishes)
            if why in ("finished", "time") and p.evaluated < p.step:
                self.evaluate()
            if why or wishes.save:
                self.save()
            if why:
                break
        if p.best is None:  # better this model than none
            self._keep_best()
        return why

    def _reason(self, wishes: Wishes) -> str:
        p, s = self.progress, self.settings
        if p.bad >= s.bad_steps:
            return "bad steps"
        if p.step >= self.steps:
            return "finished"
        if s.patience and p.stale >= s.patience:
            return "no better"
        return "signal" if wishes.signal else "time" if wishes.late else ""

    @property
    def steps(self) -> int:
        """In all: as many as were asked for, or as the last plan has."""
        return self.progress.plan[-1][1] if self.progress.plan else self.settings.max_steps

    def elapsed(self) -> float:
        """Seconds of training, those before a resumption included."""
        return self.began_seconds + time.monotonic() - self.began

    def _late(self) -> bool:
        """Whether the time is over once the next step is done."""
        return self.settings.max_time > 0 and out_of_time(self)

    # ------------------------------------------------------------------------------------------------------ one step

    def step(self, batch: Batch, wishes: Wishes = NONE) -> Wishes:
        """One optimiser step on one global batch. What all processes wish is agreed on by the way."""
        p, s, began = self.progress, self.settings, time.perf_counter()
        pieces, count, tokens, wishes = self._share(batch, wishes)
        total = 0.0
        for number, piece in enumerate(pieces):
            self.spread.expect(last=number == len(pieces) - 1)
            total += self._backward(number, piece, count)
        worked = time.perf_counter() - began
        self.spread.settle()
        total, *times = self.team.sums([total, *self.team.slots(worked)])
        loss, lr = total / max(count, 1), self.schedule.at(place(p.step + 1, p.plan))
        norms = self.gradients.norms(self.spread.norm_sums, self.scale.value)
        fine = self._fine(loss, norms, batch, pieces)
        if fine:
            set_lr(self.optimiser, lr)
            self.gradients.cut(norms.total, s.clip, self.scale.value)
            self.optimiser.step()
            self.average.update(self.model, p.step)
        if self.dtype is torch.float16:
            self.scale.update(math.isfinite(norms.total))
        self.optimiser.zero_grad(set_to_none=True)
        p.step, p.position, p.seconds = p.step + 1, batch.end, self.elapsed()
        p.tokens, p.answers = p.tokens + tokens, p.answers + int(count)
        took, epoch = time.perf_counter() - began, batch.end / self.source.size
        self.step_seconds.add(took)
        if fine:
            record(p, loss, norms.total)
        self.tell(Stepped(p.step, self.steps, epoch, loss, lr, norms.total, tokens, int(count), took,
                          batch.examples, fine, norms.layers))  # fmt: skip
        if warned := diverged(p, s.lr):
            self.tell(Noted(p.step, warned))
        if not self.spread.sharded and (said := self.pace.heard(times)):  # those who share layers wait within them
            self.tell(Noted(p.step, said))
        return wishes

    def _share(self, batch: Batch, wishes: Wishes) -> tuple[list[dict[str, Tensor]], float, int, Wishes]:
        """This process's pieces; how many answers and tokens all processes have; what any of them wishes."""
        pieces = list(self._pieces(batch))
        mine = [float(sum(how_many(piece, self.objective) for piece in pieces)), float(sum(map(real_tokens, pieces)))]
        count, tokens, *heard = self.team.sums([*mine, *map(float, wishes), *self.team.slots(len(pieces))])
        pieces = self.spread.filled(pieces, int(max(heard[3:])), lambda: self._tensors(batch.examples[:1], batch.epoch))
        return pieces, count, int(tokens), Wishes(*heard[:3])

    def _pieces(self, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """My share of a batch, in pieces that fit into memory."""
        mine = share(batch.examples, self.team.rank, self.team.world)
        for rows in self.source.pieces(mine, self.settings.micro_tokens or self.settings.batch_tokens):
            yield self._tensors(rows, batch.epoch)

    def _tensors(self, rows: np.ndarray, epoch: int) -> dict[str, Tensor]:
        return to_tensors(self.source.lesson(rows, epoch), self.device)

    def _backward(self, number: int, piece: dict[str, Tensor], count: float) -> float:
        self.piece = "{} rows of {} tokens".format(*piece["ids"].shape)
        loss = self._loss(number, piece)
        (loss * (self.scale.value / max(count, 1))).backward()
        return float(loss.detach())

    def _loss(self, number: int, piece: dict[str, Tensor]) -> Tensor:
        """Dropout is drawn from the numbers of the step, the piece and the process: nothing has to be remembered."""
        words = (self.settings.seed, self.progress.step, number, self.team.rank, "dropout")
        torch.manual_seed(int(bits(*words)) % 2**63)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            return self.spread.loss(piece, self.settings.smoothing)

    def _fine(self, loss: float, norms: Norms, batch: Batch, pieces: list[dict[str, Tensor]]) -> bool:
        """Whether a step may be applied; if it is odd, why is said. All processes have the same numbers here."""
        p, finite = self.progress, math.isfinite(loss) and math.isfinite(norms.total)
        seeking = math.isfinite(loss) and self.scale.value > 1  # fp16 finds its scale by overflowing now and then
        p.bad = 0 if finite else p.bad + (not seeking)
        if not finite:
            if not seeking:
                self._name_the_culprit(batch, pieces)
            return False
        times = times_the_usual(norms.total, p.norms)
        p.norms = [*p.norms[1 - REMEMBERED :], norms.total]
        skip = 0 < self.settings.spike < times
        if skip or times > NOTABLE:
            done = "left out" if skip else "clipped" if self.settings.clip else "applied"
            self.tell(Noted(p.step + 1, f"the gradient is {times:.0f} times as long as usual and was {done}; "
                                        f"{_named(batch)}"))  # fmt: skip
        return not skip

    def _name_the_culprit(self, batch: Batch, pieces: list[dict[str, Tensor]]) -> None:
        found = [culprit(self.model, lambda n=n, p=p: self._loss(n, p)) for n, p in enumerate(pieces)]  # type: ignore[misc]
        words = self.team.words  # where the loss is a sum over processes, only one of them may know
        said = words(next(filter(None, found), "")) or words(bad_gradient(self.model)) or "the gradient is too long"
        self.tell(Noted(self.progress.step + 1, f"step not applied: {said}; {_named(batch)}"))

    # ------------------------------------------------------------------------------------------- looking and keeping

    def evaluate(self) -> None:
        """Measure the model (its average, if there is one). The training stream does not notice."""
        p, began = self.progress, time.monotonic()
        p.evaluated = p.step
        if self.evaluate_model is None:
            return
        with self.at_rest() as model:
            found = self.evaluate_model(model) if self.team.rank == 0 else Scored((), {})
            score = tuple(self.team.told(found.score))
            better = all(map(math.isfinite, score)) and (p.best is None or score > p.best)
            if better:
                self._write_best(model)
        p.best, p.best_step, p.stale = (score, p.step, 0) if better else (p.best, p.best_step, p.stale + 1)
        (self.evaluation_seconds,) = self.team.told([time.monotonic() - began])
        p.evaluation += self.evaluation_seconds
        self.tell(Evaluated(p.step, found.scores, found.samples, better, self.evaluation_seconds))

    def _evaluate_best(self, why: str) -> None:
        """The best model on more rows than were affordable while training."""
        p, began = self.progress, time.monotonic()
        wanted = why in ("finished", "time", "no better") and self.step_seconds.count and p.best is not None
        if self.evaluate_best is None or not wanted:
            return
        if found := tried(self.evaluate_best, self.tell, p.step):
            took = time.monotonic() - began
            self.tell(FinalEvaluated(p.best_step, self.settings.final_rows, found.scores, took))

    @contextmanager
    def at_rest(self) -> Iterator[Any]:
        """The model as it is used: whole, averaged, without dropout."""
        self.model.eval()
        with torch.no_grad(), self.average.used_by(self.model), self.spread.plain() as model:
            yield model
        self.model.train()

    def _keep_best(self) -> None:
        with self.at_rest() as model:
            self._write_best(model)

    def _write_best(self, model: Any) -> None:
        if self.keep_best is not None and self.team.rank == 0:
            tried(lambda: self.keep_best(model), self.tell, self.progress.step)  # type: ignore[misc]

    def save(self) -> None:
        """Where processes hold parts of the model, all of them help to copy it."""
        if self._has_a_place() and (self.keep is not None or self.spread.sharded):
            self.saver.begin(self.progress.step, lambda: snapshot(self), self.keep)

    def _has_a_place(self) -> bool:
        """Somebody may have removed what was kept: the best model so far is lost then, and this one is kept."""
        p = self.progress
        lost = tried(self.mend, self.tell, p.step) if self.mend else False
        (found,) = self.team.told([-1.0 if lost is None else float(lost)])
        if found > 0:
            self.tell(Noted(p.step, "the folder of the run was gone; it is made again, with the model as it is now"))
            p.best, p.best_step = None, p.step
            self._keep_best()
        return found >= 0

    def tell(self, event: Event) -> None:
        self.guard()
        for listener in list(self.listeners):
            try:
                listener(event)
            except Exception as error:  # a full disk, or a picture that can not be drawn, must not end a run
                self.listeners.remove(listener)
                who = getattr(listener, "name", "a listener")
                self.tell(Noted(self.progress.step, f"{who} failed ({_brief(error)}) and is left out"))

    def state(self) -> dict[str, Any]:
        return {"progress": asdict(self.progress), "scale": asdict(self.scale)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        self.progress.best = None if self.progress.best is None else tuple(self.progress.best)
        self.progress.cadence = (self.progress.cadence[0], self.progress.cadence[1])
        self.scale = Scale(**state["scale"])


def _brief(error: Exception) -> str:
    """
    >>> _brief(KeyError("loss")), _brief(OSError(28, "No space left on device"))
    ("KeyError: 'loss'", 'OSError: [Errno 28] No space left on device')
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"


def _named(batch: Batch) -> str:
    """
    >>> _named(Batch(np.arange(9), 2, 0))
    'examples 0, 1, 2, 3, 4, 5, 6, 7 … of epoch 2'
    """
    shown = ", ".join(map(str, batch.examples[:8])) + (" …" if len(batch.examples) > 8 else "")
    return f"examples {shown} of epoch {batch.epoch}"
