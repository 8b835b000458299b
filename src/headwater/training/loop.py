"""The loop: steps whose data, chance and learning rate are functions of their number alone.

So a run that was killed and resumed is the run that never stopped: only weights, moments and a few counters are kept.
A step's loss is Σ losses / Σ counted tokens over the whole step, however it is cut into pieces and shared out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from headwater.data.batches import Batch, share
from headwater.data.chance import bits
from headwater.data.objectives.lesson import Lesson
from headwater.errors import CheckFailed
from headwater.training.averaging import Average
from headwater.training.culprit import culprit
from headwater.training.events import Evaluated, Event, Kept, Listener, Noted, Stepped, Stopped
from headwater.training.interrupts import Interrupts
from headwater.training.objectives import Objective, how_many, to_tensors
from headwater.training.optimiser import adamw, clip, set_lr
from headwater.training.settings import Settings
from headwater.training.team import Alone

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHEAP = 1 / 50  # a checkpoint is put off until it costs less than this share of the time since the last one


class Source(Protocol):
    """Where batches come from: an order of examples, and what is taught with them."""

    @property
    def size(self) -> int: ...
    def after(self, position: int) -> Iterator[Batch]: ...
    def pieces(self, examples: np.ndarray, tokens: int) -> Sequence[np.ndarray]: ...
    def lesson(self, examples: np.ndarray, epoch: int) -> Lesson: ...


class Scored(NamedTuple):
    """What an evaluation found; `score` decides which model is best: larger is better, later numbers decide a draw."""

    score: tuple[float, ...]
    scores: Mapping[str, float]
    samples: tuple[Mapping[str, Any], ...] = ()


@dataclass
class Progress:
    """All that a resumed run must know beside weights and moments."""

    step: int = 0
    position: int = 0  # examples given so far
    tokens: int = 0
    seconds: float = 0.0
    bad: int = 0  # steps in a row that were not applied
    evaluated: int = 0  # step of the last evaluation
    best: tuple[float, ...] | None = None
    best_step: int = 0
    stale: int = 0  # evaluations since the best


class Outcome(NamedTuple):
    why: str
    progress: Progress


class Trainer:
    """evaluate(model) -> Scored; keep(trainer) writes a checkpoint; keep_best(model) writes the model folder."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        source: Source,
        schedule: Any,
        settings: Settings,
        *,
        evaluate: Callable[[Any], Scored] | None = None,
        keep: Callable[[Trainer], str] | None = None,
        keep_best: Callable[[Any], None] | None = None,
        listeners: Iterable[Listener] = (),
        team: Any = None,
    ) -> None:
        s = settings
        self.model, self.objective, self.source, self.schedule, self.settings = model, objective, source, schedule, s
        self.evaluate_model, self.keep, self.keep_best = evaluate, keep, keep_best
        self.listeners, self.team, self.progress = list(listeners), team or Alone(), Progress()
        self.device = next(model.parameters()).device
        self.optimiser = adamw(
            model, lr=schedule.at(1), betas=(s.beta1, s.beta2), eps=s.eps, weight_decay=s.weight_decay
        )
        self.average = Average(model, s.average)
        self.dtype = DTYPES["fp32" if s.dtype == "auto" else s.dtype]
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.kept_step, self.kept_at, self.keeping_took = 0, 0.0, 0.0
        self.began = self.began_seconds = 0.0
        if s.recompute:
            model.recompute()
        if s.compile:
            for stack in filter(None, (model.encoder, model.decoder)):
                stack.compile(dynamic=True)

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self) -> Outcome:
        """Train until the last step, or until something else ends it. What it is, is said in the outcome."""
        p, s = self.progress, self.settings
        self.began, self.began_seconds = time.monotonic(), p.seconds
        self.kept_step, self.kept_at = p.step, self.began
        why = "finished" if p.step >= s.max_steps else ""
        with Interrupts() as interrupts:
            for batch in self.source.after(p.position) if not why else ():
                asked = self.step(batch, bool(interrupts.asked) or self._late())
                if s.eval_every and p.step % s.eval_every == 0:
                    self.evaluate()
                why = self._reason(asked, interrupts.asked)
                if why in ("finished", "time") and p.evaluated < p.step:
                    self.evaluate()
                if why or self._save_is_due():
                    self.save()
                if why:
                    break
        self.tell(Stopped(p.step, why, self.elapsed()))
        if why == "bad steps":
            raise CheckFailed(f"{p.bad} steps in a row gave NaN or inf and were not applied; lower the learning rate, "
                              "or look at the data named above (the weights before them are saved)")  # fmt: skip
        return Outcome(why, p)

    def _reason(self, asked: bool, signal: str) -> str:
        p, s = self.progress, self.settings
        if p.bad >= s.bad_steps:
            return "bad steps"
        if p.step >= s.max_steps:
            return "finished"
        if s.patience and p.stale >= s.patience:
            return "no better"
        return ("signal" if signal else "time") if asked else ""

    def elapsed(self) -> float:
        """Seconds of training, those before a resumption included."""
        return self.began_seconds + time.monotonic() - self.began

    def _late(self) -> bool:
        return 0 < self.settings.max_time <= self.elapsed()

    # ------------------------------------------------------------------------------------------------------ one step

    def step(self, batch: Batch, wish: bool = False) -> bool:
        """One optimiser step on one global batch. Whether any process wishes to stop is agreed on by the way."""
        p, s, began = self.progress, self.settings, time.perf_counter()
        pieces = list(self._pieces(batch))
        count, asked = self.team.sums([sum(how_many(piece, self.objective) for piece in pieces), float(wish)])
        total = sum(self._backward(n, piece, count) for n, piece in enumerate(pieces))
        self.team.add_gradients(list(self.model.parameters()))
        loss = self.team.sums([total])[0] / max(count, 1)
        lr = self.schedule.at(p.step + 1)
        set_lr(self.optimiser, lr)
        self.scaler.unscale_(self.optimiser)
        norm = clip(self.model.parameters(), s.clip)
        fine = math.isfinite(loss) and math.isfinite(norm)
        if fine:
            self.scaler.step(self.optimiser)
            self.average.update(self.model, p.step)
        elif not (self.scaler.is_enabled() and math.isfinite(loss)):  # fp16 finds its scale by overflowing now and then
            self._name_the_culprit(batch, pieces)
        self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        p.bad = 0 if fine else p.bad + (not self.scaler.is_enabled() or not math.isfinite(loss))
        p.step, p.position, p.tokens, p.seconds = p.step + 1, batch.end, p.tokens + int(count), self.elapsed()
        took, epoch = time.perf_counter() - began, batch.end / self.source.size
        self.tell(Stepped(p.step, s.max_steps, epoch, loss, lr, norm, int(count), took, batch.examples, fine))
        return asked > 0

    def _pieces(self, batch: Batch) -> Iterator[dict[str, Tensor]]:
        """My share of a batch, in pieces that fit into memory."""
        mine = share(batch.examples, self.team.rank, self.team.world)
        for rows in self.source.pieces(mine, self.settings.micro_tokens or self.settings.batch_tokens):
            yield to_tensors(self.source.lesson(rows, batch.epoch), self.device)

    def _backward(self, number: int, piece: dict[str, Tensor], count: float) -> float:
        loss = self._loss(number, piece)
        self.scaler.scale(loss / max(count, 1)).backward()
        return float(loss.detach())

    def _loss(self, number: int, piece: dict[str, Tensor]) -> Tensor:
        """Dropout is drawn from the numbers of the step, the piece and the process: nothing has to be remembered."""
        words = (self.settings.seed, self.progress.step, number, self.team.rank, "dropout")
        torch.manual_seed(int(bits(*words)) % 2**63)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not torch.float32):
            return self.objective(self.model, piece, self.settings.smoothing)

    def _name_the_culprit(self, batch: Batch, pieces: list[dict[str, Tensor]]) -> None:
        found = (culprit(self.model, lambda n=n, p=p: self._loss(n, p)) for n, p in enumerate(pieces))  # type: ignore[misc]
        said = next(filter(None, found), "the sum of the gradients is NaN or inf")
        rows = ", ".join(map(str, batch.examples[:8])) + (" …" if len(batch.examples) > 8 else "")
        self.tell(Noted(self.progress.step + 1, f"step not applied: {said}; examples {rows} of epoch {batch.epoch}"))

    # ------------------------------------------------------------------------------------------- looking and keeping

    def evaluate(self) -> None:
        """Measure the model (its average, if there is one). The training stream does not notice."""
        p, began = self.progress, time.perf_counter()
        p.evaluated = p.step
        if self.evaluate_model is None:
            return
        self.model.eval()
        with torch.no_grad(), self.average.used_by(self.model):
            found = self.evaluate_model(self.model) if self.team.rank == 0 else Scored((), {})
            score = tuple(self.team.told(found.score))
            better = all(map(math.isfinite, score)) and (p.best is None or score > p.best)
            if better and self.keep_best is not None and self.team.rank == 0:
                self._try(lambda: self.keep_best(self.model))  # type: ignore[misc]
        self.model.train()
        p.best, p.best_step, p.stale = (score, p.step, 0) if better else (p.best, p.best_step, p.stale + 1)
        self.tell(Evaluated(p.step, found.scores, found.samples, better, time.perf_counter() - began))

    def _save_is_due(self) -> bool:
        if self.settings.save_steps:
            return self.progress.step % self.settings.save_steps == 0
        wanted = max(self.settings.save_every, self.keeping_took / CHEAP)
        return time.monotonic() - self.kept_at >= wanted

    def save(self) -> None:
        """Write a checkpoint. A full or failing disk is said, and tried again next time; training goes on."""
        p = self.progress
        if self.keep is None or self.team.rank or p.step == self.kept_step:
            return
        began = time.monotonic()
        if path := self._try(lambda: self.keep(self)):  # type: ignore[misc]
            self.kept_step = p.step
            self.tell(Kept(p.step, str(path), time.monotonic() - began))
        self.kept_at = time.monotonic()
        self.keeping_took = self.kept_at - began

    def _try(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except OSError as error:
            self.tell(Noted(self.progress.step, f"nothing was saved: {error.strerror or error}; trying again later"))

    def tell(self, event: Event) -> None:
        for listener in list(self.listeners):
            try:
                listener(event)
            except OSError:  # a full disk must not end a run because of its diary
                self.listeners.remove(listener)
                self.tell(
                    Noted(self.progress.step, f"{getattr(listener, 'name', 'a listener')} failed and is left out")
                )

    def state(self) -> dict[str, Any]:
        scaler = self.scaler.state_dict()
        return {"progress": asdict(self.progress), "scaler": scaler}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.progress = Progress(**state["progress"])
        self.progress.best = None if self.progress.best is None else tuple(self.progress.best)
        if state["scaler"]:
            self.scaler.load_state_dict(dict(state["scaler"]))
