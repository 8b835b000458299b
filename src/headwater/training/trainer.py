"""Trainer: the training loop, with gradient accumulation, evaluation, early stopping and checkpoints.

Data order, dropout and learning rate are functions of the step number alone, so that resuming is exact: a checkpoint
holds weights, optimizer moments and a few counters (TrainState), and a resumed run is the run that never stopped.
The loss of a step is Σ losses / Σ targets over the global batch, however it is split into micro-batches and ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.data.dataset import IndexBatch, shard_for_rank
from headwater.i18n import _
from headwater.parts import must
from headwater.rng import dropout_seed
from headwater.tasks.batch import LossFn, PrepareStep, TensorBatch, no_preparation, num_targets, num_tokens, to_tensors
from headwater.tasks.rewards import RewardError
from headwater.training import diagnostics, schedules
from headwater.training.checkpoint import AsyncCheckpointer, TrainOutput, or_warn, take_snapshot
from headwater.training.config import TrainConfig
from headwater.training.distributed import SingleProcess, broadcast_model, has_targets, pad_micro_batches, parallelize
from headwater.training.gradients import GradScaler, ModelGradients, autocast
from headwater.training.launch import SignalHandler
from headwater.training.optim import EMA, build_optimizer, set_lr
from headwater.training.schedules import Schedule
from headwater.training.state import (
    NOTHING_RESERVED,
    Callback,
    EvalEvent,
    EvaluateFn,
    Event,
    FinalEvalEvent,
    NoteEvent,
    ReservedSeconds,
    RunningMean,
    StepEvent,
    StepFlags,
    StopEvent,
    StopReason,
    TrainDataset,
    TrainResult,
    TrainState,
)

NO_FLAGS = StepFlags()


class Trainer:
    """Trains a model on a dataset, one optimizer step per global batch.

    count_targets: the number of targets of a batch, which loss_fn sums over
    evaluate_fn: metrics of the model in eval mode
    output: where checkpoints and the best model are written
    callbacks: called with every event (state.py)
    state: to begin with; that of a checkpoint replaces it
    reserved: seconds of a time limit that are needed after the last step
    """

    def __init__(
        self,
        model: Transformer,
        loss_fn: LossFn,
        dataset: TrainDataset,
        schedule: Schedule,
        config: TrainConfig,
        *,
        count_targets: Callable[[TensorBatch], int] = num_targets,
        evaluate_fn: EvaluateFn | None = None,
        output: TrainOutput | None = None,
        callbacks: Iterable[Callback] = (),
        state: TrainState | None = None,
        reserved: ReservedSeconds = NOTHING_RESERVED,
        dist: SingleProcess | None = None,
    ) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.count_targets = count_targets
        self.dataset = dataset
        self.schedule = schedule
        self.config = config
        self.prepare_step: PrepareStep = no_preparation  # set where the loss of a micro-batch depends on the others
        self.evaluate_fn = evaluate_fn
        self.output = output or TrainOutput()
        self.callbacks = list(callbacks)
        self.state = state or TrainState()
        self.dist = dist or SingleProcess()
        self.micro_batch_shape = "no rows"
        must(
            self.dist.world_size == 1 or not dataset.one_process,
            "Trainer",
            _("rows that continue need one process, for each has its memory"),
            self.dist.world_size,
            _("leave out --nproc"),
        )

        # optimizer and precision
        self.device = next(model.parameters()).device
        with diagnostics.errors_as_faults(self):
            self.parallel = parallelize(model, loss_fn, self.dist, config.fsdp)
        self.optimizer = build_optimizer(model, schedule.at(1), config)
        self.gradients = ModelGradients(model)
        self.ema = EMA(model, config.ema)
        self.grad_scaler = GradScaler(GradScaler.INIT_SCALE if config.dtype == "fp16" else 1.0)

        # checkpoints and timing
        self.checkpointer = AsyncCheckpointer(config.checkpoint_every, config.checkpoint_steps, self.emit)
        self.start_time = 0.0
        self.seconds_at_start = 0.0
        self.eval_seconds = reserved.evaluation  # of the last evaluation; before the first: as planned
        self.shutdown_seconds = reserved.shutdown
        self.step_seconds = RunningMean()
        self.straggler_detector = diagnostics.StragglerDetector()

    # ------------------------------------------------------------------------------------------- the training loop

    def train(self, command_start: float | None = None) -> TrainResult:
        """Train until the last step, or until early stopping, the time limit, a signal or divergence ends the run.

        command_start: time.monotonic() when the command began; what has passed since then was set-up.
        """
        state = self.state
        self.start_time = time.monotonic()
        self.seconds_at_start = state.seconds
        if command_start is not None:
            state.setup_seconds += self.start_time - command_start
        self.output.before_write()
        try:
            with diagnostics.errors_as_faults(self), SignalHandler() as signals:
                reason = self._train_steps(signals)
                self._evaluate_best(reason)
        except RewardError:  # a function of the user failed: the steps before it are saved
            self.save()
            raise
        finally:
            self.checkpointer.join()
        self.emit(StopEvent(state.step, reason, self.elapsed()))
        diagnostics.refuse_divergence(reason, state, self.config.lr)
        return TrainResult(reason, state)

    def _train_steps(self, signals: SignalHandler) -> StopReason:
        state = self.state
        reason = StopReason.FINISHED if state.step >= self.total_steps else None
        batches = self.dataset.batches_from(state.examples_seen)
        while reason is None:
            # one optimizer step
            batch = next(batches)
            checkpoint_due = self.dist.rank == 0 and self.checkpointer.due(state.step + 1)
            flags = self.step(batch, StepFlags(bool(signals.requested), self._time_is_up(), checkpoint_due))
            self.checkpointer.join(wait=False)

            # evaluation, re-planning of the number of steps
            if schedules.evaluation_due(self):
                self.evaluate()
                schedules.update_interval(self)
            if schedules.replanning_due(state):
                schedules.replan(self)

            # the end of the run, checkpoint
            reason = self._stop_reason(flags)
            complete = reason in (StopReason.FINISHED, StopReason.TIME_LIMIT)
            if complete and state.last_eval_step < state.step:
                self.evaluate()
            if reason or flags.checkpoint_due:
                self.save()
        if state.best_score is None:  # no evaluation found a best model: this one is better than none
            self._save_current_as_best()
        return reason

    def _stop_reason(self, flags: StepFlags) -> StopReason | None:
        """None while training goes on."""
        state = self.state
        if state.nonfinite_steps >= self.config.max_nan_steps:
            return StopReason.DIVERGED
        if state.step >= self.total_steps:
            return StopReason.FINISHED
        if self.config.patience and state.evals_since_best >= self.config.patience:
            return StopReason.EARLY_STOPPING
        if flags.stop_requested:
            return StopReason.INTERRUPTED
        return StopReason.TIME_LIMIT if flags.time_is_up else None

    @property
    def total_steps(self) -> int:
        """The number of steps of the run: max_steps, or that of the last plan under a time limit."""
        return self.state.step_plan[-1][1] if self.state.step_plan else self.config.max_steps

    def elapsed(self) -> float:
        """Seconds of training, including those before a resumption."""
        return self.seconds_at_start + time.monotonic() - self.start_time

    def _time_is_up(self) -> bool:
        """Whether the time limit is reached once the next step is done."""
        return self.config.max_time > 0 and schedules.out_of_time(self)

    # ------------------------------------------------------------------------------------------------------ one step

    def step(self, batch: IndexBatch, flags: StepFlags = NO_FLAGS) -> StepFlags:
        """One optimizer step on one global batch. Returns the flags, summed over all ranks."""
        state = self.state
        start = time.perf_counter()

        # forward and backward over the local micro-batches (gradient accumulation), all-reduce in the last of them
        micro_batches, count, tokens, flags = self._local_micro_batches(batch, flags)
        self.prepare_step(self.model, micro_batches, self.forward_context, self.dist)
        total_loss = 0.0
        for index, micro_batch in enumerate(micro_batches):
            self.parallel.set_sync(last=index == len(micro_batches) - 1)
            total_loss += self._backward(index, micro_batch, count)
        compute_seconds = self.parallel.grads_ready_time() - start
        losses, rank_seconds = zip(*self.dist.all_gather([total_loss, compute_seconds]), strict=True)
        loss = sum(losses) / max(count, 1)

        # gradient clipping and optimizer step, unless the gradient is NaN or a spike
        lr = self.schedule.at(schedules.effective_step(state.step + 1, state.step_plan))
        norms = self.gradients.norms(self.parallel.sum_over_shards, self.grad_scaler.scale)
        applied = diagnostics.should_apply(self, loss, norms, batch, micro_batches)
        if applied:
            set_lr(self.optimizer, lr)
            self.gradients.clip_(norms.total, self.config.max_grad_norm, self.grad_scaler.scale)
            self.optimizer.step()
            self.ema.update(self.model, state.step)
            diagnostics.record_loss(state, loss, norms.total)
        if self.config.dtype == "fp16":
            self.grad_scaler.update(math.isfinite(norms.total))
        self.optimizer.zero_grad(set_to_none=True)

        # counters and events
        state.advance(batch.end, tokens, int(count))
        state.seconds = self.elapsed()
        seconds = time.perf_counter() - start
        self.step_seconds.add(seconds)
        epoch = batch.end / self.dataset.size
        event = StepEvent(state.step, self.total_steps, epoch, loss, lr, norms.total, tokens, int(count), seconds,
                          batch.indices, applied, norms.per_layer, self.dataset.take_metrics())  # fmt: skip
        self.emit(event)
        diagnostics.emit_warnings(self, rank_seconds)
        return flags

    def _local_micro_batches(
        self, batch: IndexBatch, flags: StepFlags
    ) -> tuple[list[dict[str, Tensor]], float, int, StepFlags]:
        """The micro-batches of this rank; the targets and tokens of all ranks; the flags of all ranks."""
        micro_batches = list(self._micro_batches(batch))
        local_targets = float(sum(map(self.count_targets, micro_batches)))
        local_tokens = float(sum(map(num_tokens, micro_batches)))
        per_rank = self.dist.all_gather([local_targets, local_tokens, *map(float, flags), len(micro_batches)])
        sums = [sum(column) for column in zip(*per_rank, strict=True)]
        num_micro_batches = int(max(row[-1] for row in per_rank))
        micro_batches = pad_micro_batches(
            micro_batches, num_micro_batches, lambda: self._collate(batch.indices[:1], batch.epoch)
        )
        return micro_batches, sums[0], int(sums[1]), StepFlags(*sums[2:-1])

    def _micro_batches(self, batch: IndexBatch) -> Iterator[dict[str, Tensor]]:
        """The examples of this rank, in micro-batches that fit into memory."""
        local = shard_for_rank(batch.indices, self.dist.rank, self.dist.world_size)
        max_tokens = self.config.micro_batch_tokens or self.config.batch_tokens
        for indices in self.dataset.micro_batches(local, max_tokens):
            yield self._collate(indices, batch.epoch)

    def _collate(self, indices: np.ndarray, epoch: int) -> dict[str, Tensor]:
        return to_tensors(self.dataset.collate(indices, epoch), self.device)

    def _backward(self, index: int, micro_batch: dict[str, Tensor], num_targets: float) -> float:
        """Accumulate the gradients of one micro-batch; returns its summed loss."""
        self.micro_batch_shape = "{} rows of {} tokens".format(*micro_batch["ids"].shape)
        loss = self.loss(index, micro_batch) * has_targets(micro_batch)
        (loss * (self.grad_scaler.scale / max(num_targets, 1))).backward()
        return float(loss.detach())

    def loss(self, index: int, micro_batch: dict[str, Tensor]) -> Tensor:
        """The summed loss of a micro-batch."""
        with self.forward_context(index):
            return self.parallel.loss(micro_batch, self.config.label_smoothing)

    def forward_context(self, index: int) -> torch.autocast:
        """Seed the dropout of a micro-batch, a function of step, micro-batch and rank; and its mixed precision."""
        torch.manual_seed(dropout_seed(self.config.seed, self.state.step, index, self.dist.rank))
        return autocast(self.device, self.config.dtype)

    # --------------------------------------------------------------------------------- evaluation and checkpoints

    def evaluate(self) -> None:
        """Evaluate the model (its EMA, if there is one), and save it if it is the best so far."""
        state = self.state
        start = time.monotonic()
        state.last_eval_step = state.step
        if self.evaluate_fn is None:
            return
        with self.eval_mode() as model:
            result = self.evaluate_fn(model)
            score = self.dist.broadcast(result.selection_score)
            is_best = all(map(math.isfinite, score)) and (state.best_score is None or score > state.best_score)
            if is_best:
                self._save_best(model)
        if is_best:
            state.best_score = score
            state.best_step = state.step
            state.evals_since_best = 0
        else:
            state.evals_since_best += 1
        self.eval_seconds = self.dist.broadcast(time.monotonic() - start)
        state.eval_seconds += self.eval_seconds
        self.emit(EvalEvent(state.step, result.metrics, result.samples, is_best, self.eval_seconds))

    def _evaluate_best(self, reason: StopReason) -> None:
        """Evaluate the best model after the run, on more examples than were affordable during it."""
        state = self.state
        start = time.monotonic()
        complete = reason not in (StopReason.INTERRUPTED, StopReason.DIVERGED)
        num_examples = self.config.final_eval_examples
        if not complete or not self.step_seconds.count or state.best_score is None or self.evaluate_fn is None:
            return
        if num_examples <= self.config.eval_examples:
            return
        best = or_warn(partial(self.output.load_best, self.model), self.emit, state.step)
        best = broadcast_model(best, self.model, self.dist)
        if best is not None:
            with eval_mode(best):
                result = self.evaluate_fn(best, num_examples)
            self.emit(FinalEvalEvent(state.best_step, num_examples, result.metrics, time.monotonic() - start))

    @contextmanager
    def eval_mode(self) -> Iterator[Transformer]:
        """The model for evaluation and saving: gathered from all ranks, with the EMA weights, without dropout."""
        with eval_mode(self.model), self.ema.swapped_in(self.model), self.parallel.full_model() as model:
            yield model

    def _save_current_as_best(self) -> None:
        with self.eval_mode() as model:
            self._save_best(model)

    def _save_best(self, model: Transformer) -> None:
        if self.dist.rank == 0:
            or_warn(partial(self.output.write_best, model), self.emit, self.state.step)

    def save(self) -> None:
        """Start writing a checkpoint. Where ranks hold shards of the model, all of them take part."""
        if not self._ensure_run_dir():
            return
        write = self.output.write_checkpoint if self.output.writes_checkpoints else None
        if write or self.parallel.sharded:
            self.checkpointer.start(self.state.step, partial(take_snapshot, self), write)

    def _ensure_run_dir(self) -> bool:
        """Recreate a run directory that was deleted, with the current model as the best; False where that failed."""
        state = self.state
        recreated = or_warn(self.output.recreate_missing, self.emit, state.step)
        recreated = self.dist.broadcast(recreated)
        if recreated:
            self.note(state.step, _("the run directory was deleted; it was recreated with the current model"))
            state.best_score = None
            state.best_step = state.step
            self._save_current_as_best()
        return recreated is not None

    def emit(self, event: Event) -> None:
        """Call every callback. One that fails is removed: a full disk must not end a run."""
        self.output.before_write()
        for callback in list(self.callbacks):
            try:
                callback(event)
            except Exception as error:
                self.callbacks.remove(callback)
                name = getattr(callback, "name", getattr(callback, "__name__", type(callback).__name__))
                brief = diagnostics.short_error(error)
                self.note(
                    self.state.step, _("the callback {who} failed ({brief}) and was removed", who=name, brief=brief)
                )

    def note(self, step: int, text: str) -> None:
        self.emit(NoteEvent(step, text))

    def state_dict(self) -> dict[str, Any]:
        return {"train_state": asdict(self.state), "grad_scaler": asdict(self.grad_scaler)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state = TrainState(**state["train_state"])
        if self.state.best_score is not None:
            self.state.best_score = tuple(self.state.best_score)
        self.state.eval_cadence = (self.state.eval_cadence[0], self.state.eval_cadence[1])
        self.grad_scaler = GradScaler(**state["grad_scaler"])
