"""Diagnostics of a training run: NaN or inf and its source, gradient spikes, divergence, lack of memory, stragglers.

Divergence is a median loss or gradient norm of the last steps far above the first one, so that one odd batch is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import OutOfMemoryError, Tensor, nn
from torch import distributed as dist

from headwater.data.dataset import IndexBatch
from headwater.errors import CheckFailed, Fault, Unavailable, is_out_of_memory
from headwater.i18n import _
from headwater.training.distributed import SingleProcess, to_local
from headwater.training.gradients import GradNorms, spike_ratio
from headwater.training.nonfinite import first_nonfinite_module, is_nonfinite
from headwater.training.state import StopReason, TrainState

if TYPE_CHECKING:
    from headwater.training.trainer import Trainer

# ----------------------------------------------------------------------------------------------------- checks of a step

GRAD_NORM_HISTORY = 64  # gradient norms that are remembered
NOTED_SPIKE_RATIO = 100.0  # a gradient norm of so many times their median is worth a note


def should_apply(
    trainer: Trainer, loss: float, norms: GradNorms, batch: IndexBatch, micro_batches: list[dict[str, Tensor]]
) -> bool:
    """Whether the optimizer step is applied: not for NaN, inf or a gradient spike. All ranks decide alike."""
    state = trainer.state

    # NaN or inf
    finite = math.isfinite(loss) and math.isfinite(norms.total)
    overflow = math.isfinite(loss) and trainer.grad_scaler.scale > 1  # fp16: the scaler finds its scale by overflows
    if finite:
        state.nonfinite_steps = 0
    elif not overflow:
        state.nonfinite_steps += 1
        _report_nan_source(trainer, batch, micro_batches)
    if not finite:
        return False

    # gradient spikes
    ratio = spike_ratio(norms.total, state.recent_grad_norms)
    state.recent_grad_norms = [*state.recent_grad_norms[1 - GRAD_NORM_HISTORY :], norms.total]
    skip = 0 < trainer.config.skip_grad_spikes < ratio
    if skip or ratio > NOTED_SPIKE_RATIO:
        applied = _("clipped") if trainer.config.max_grad_norm else _("applied")
        text = _(
            "the gradient norm is {times:.0f} times the usual one, and the gradient was {done}; {named}",
            times=ratio,
            done=_("left out") if skip else applied,
            named=describe_batch(batch),
        )
        trainer.note(state.step + 1, text)
    return not skip


def _report_nan_source(trainer: Trainer, batch: IndexBatch, micro_batches: list[dict[str, Tensor]]) -> None:
    """Repeat the forward passes to find the module; where the loss is a sum over ranks, only one of them may know."""
    sources = []
    for index, micro_batch in enumerate(micro_batches):
        sources.append(find_nan_source(trainer.model, partial(trainer.loss, index, micro_batch)))
    forward_source = next(filter(None, sources), "")
    per_rank = trainer.dist.all_gather_object((forward_source, first_nonfinite_grad(trainer.model)))
    forward_sources, grad_sources = zip(*per_rank, strict=True)
    source = next(filter(None, (*forward_sources, *grad_sources)), _("the gradient norm is not finite"))
    text = _("step not applied: {said}; {named}", said=source, named=describe_batch(batch))
    trainer.note(trainer.state.step + 1, text)


def emit_warnings(trainer: Trainer, rank_seconds: Sequence[float]) -> None:
    """Notes after a step: of the dataset, divergence, and a rank that is slower than the others."""
    step = trainer.state.step
    for note in trainer.dataset.take_notes():
        trainer.note(step, note)
    if warning := divergence_warning(trainer.state, trainer.config.lr):
        trainer.note(step, warning)
    if trainer.parallel.sharded:  # ranks that share layers wait for each other within a pass: no straggler can be seen
        return
    if warning := trainer.straggler_detector.update(rank_seconds):
        trainer.note(step, warning)


# ---------------------------------------------------------------------------------------------------------- NaN and inf


def find_nan_source(model: nn.Module, rerun_forward: Callable[[], Tensor]) -> str:
    """The source of NaN or infinity as a message; "" if all is finite.

    rerun_forward repeats the forward pass with the same random numbers and returns its loss. It always runs: with
    sharded parameters every rank must take part in it.
    """
    losses: list[Tensor] = []
    with torch.no_grad():
        source = first_nonfinite_module(model, lambda: losses.append(rerun_forward()))
    for path, parameter in model.named_parameters():
        if is_nonfinite(to_local(parameter)):
            return _("the weights {path} hold NaN or inf", path=path)
    if source:
        return _("{found} gave NaN or inf from finite input", found=source.path or type(model).__name__)
    if is_nonfinite(to_local(losses[0])):
        return _("the loss is NaN or inf, though every module's output is finite")
    return ""


def first_nonfinite_grad(model: nn.Module) -> str:
    """The first gradient that is not finite, as a message; for when every output of the forward pass was finite."""
    for path, parameter in model.named_parameters():
        if parameter.grad is not None and is_nonfinite(to_local(parameter.grad)):
            return _("the gradient of {path} is NaN or inf", path=path)
    return ""


# ----------------------------------------------------------------------------------------------------------- divergence

MEDIAN_WINDOW = 9  # steps whose median is compared
# diverged: above factor · first loss + margin (in nats)
LOSS_FACTOR = 1.5
LOSS_MARGIN = 1.0
NORM_FACTOR = 100.0  # diverged: above factor · max(first norm, 1)
MAX_USUAL_LR = 0.1  # above this, AdamW and Muon move every weight by more than it is large


def record_loss(state: TrainState, loss: float, norm: float) -> None:
    """Remember the first and the recent losses of applied steps."""
    state.first_loss = loss if state.first_loss is None else state.first_loss
    state.first_grad_norm = norm if state.first_grad_norm is None else state.first_grad_norm
    state.recent_losses = [*state.recent_losses[1 - MEDIAN_WINDOW :], loss]


def divergence_warning(state: TrainState, lr: float) -> str:
    """A warning of divergence, at most once for the loss and once for the gradient norm. lr: the setting."""
    if state.first_loss is None or state.first_grad_norm is None or len(state.recent_losses) < MEDIAN_WINDOW:
        return ""
    step = state.step
    loss = median(state.recent_losses)
    norm = median(state.recent_grad_norms[-MEDIAN_WINDOW:])
    if "loss" not in state.divergence_warnings and loss > LOSS_FACTOR * state.first_loss + LOSS_MARGIN:
        # the norm explodes with the loss: one warning is enough
        state.divergence_warnings = [*state.divergence_warnings, "loss", "norm"]
        return _(
            "loss rose from {first_loss:.3g} to {loss:.3g} at step {step}: lower --lr (now {lr:g})",
            first_loss=state.first_loss,
            loss=loss,
            step=step,
            lr=lr,
        )
    if "norm" not in state.divergence_warnings and norm > NORM_FACTOR * max(state.first_grad_norm, 1.0):
        state.divergence_warnings = [*state.divergence_warnings, "norm"]
        return _(
            "gradient norm rose from {first_norm:.3g} to {norm:.3g} at step {step}: lower --lr (now {lr:g})",
            first_norm=state.first_grad_norm,
            norm=norm,
            step=step,
            lr=lr,
        )
    return ""


def refuse_divergence(reason: StopReason, state: TrainState, lr: float) -> None:
    """Raise CheckFailed where a run has ended because its steps gave NaN or inf. lr: the setting."""
    if reason is StopReason.DIVERGED:
        raise CheckFailed(
            _(
                "{bad} steps in a row gave NaN or inf and were not applied; lower --lr (now {lr:g}), or "
                "look at the data named above (the weights before them are saved)",
                bad=state.nonfinite_steps,
                lr=lr,
            )
        )


def lr_warning(optimizer: str, peak_lr: float) -> str:
    """A warning of a peak learning rate that few models survive."""
    if peak_lr <= MAX_USUAL_LR:
        return ""
    return _(
        "the learning rate reaches {peak:.2g}, {optimizer} usually takes 1e-4 to 1e-2: the loss "
        "will probably diverge; lower --lr",
        peak=peak_lr,
        optimizer=optimizer,
    )


# ---------------------------------------------------------------------------------------- out of memory, lost processes


@contextmanager
def errors_as_faults(trainer: Trainer) -> Iterator[None]:
    """Raise the Fault behind an error of memory, threads or processes in a block."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if fault := as_fault(error, trainer.state.step + 1, trainer.micro_batch_shape, trainer.dist):
            raise fault from error
        raise


def as_fault(error: BaseException, step: int, micro_batch_shape: str, process_group: SingleProcess) -> Fault | None:
    """The Fault behind an error of memory, threads or processes; None for any other error."""
    text = str(error)
    if "can't start new thread" in text:
        return Unavailable(
            _(
                "after step {step} the machine cannot start another thread; end other programs, or raise its "
                "limits, and continue with --resume (the last checkpoint is safe)",
                step=step - 1,
            )
        )
    if isinstance(error, OutOfMemoryError) or is_out_of_memory(error):
        return Unavailable(
            _(
                "step {step} needs more memory than there is, for a micro-batch of {piece}; give "
                "--micro-batch-tokens or --gradient-checkpointing and continue with --resume (the last "
                "checkpoint is safe)",
                step=step,
                piece=micro_batch_shape,
            )
        )
    if isinstance(error, (dist.DistError, RuntimeError)) and ("gloo" in text or isinstance(error, dist.DistError)):
        why = text.splitlines()[0].rpartition("] ")[2][:80]
        missing = ", ".join(map(str, process_group.missing_ranks()))
        return Unavailable(
            _(
                "step {step} needs all processes, {who} does not answer ({why}); continue with "
                "--resume, or let torchrun --max-restarts do it",
                step=step,
                who=_("process {rank}", rank=missing) if missing else _("one of them"),
                why=why,
            )
        )
    return None


# ------------------------------------------------------------------------------------------- texts of notes


def short_error(error: Exception) -> str:
    """
    >>> short_error(KeyError("loss")), short_error(OSError(28, "No space left on device"))
    ("KeyError: 'loss'", 'OSError: [Errno 28] No space left on device')
    """
    return _("{name}: {split}", name=type(error).__name__, split=" ".join(str(error).split())[:80])


def describe_batch(batch: IndexBatch) -> str:
    """
    >>> describe_batch(IndexBatch(range(9), 2, 0))
    'examples 0, 1, 2, 3, 4, 5, 6, 7 … of epoch 2'
    """
    indices = ", ".join(map(str, batch.indices[:8])) + (" …" if len(batch.indices) > 8 else "")
    return _("examples {shown} of epoch {epoch}", shown=indices, epoch=batch.epoch)


# ----------------------------------------------------------------------------------------------------------- stragglers

SLOW_RATIO = 1.5  # times the others
# steps until it may be said, and until it may be said again
FIRST_REPORT_STEP = 20
STEPS_BETWEEN_REPORTS = 500
SECONDS_DECAY = 0.9


class StragglerDetector:
    """Detects a rank that is slower than the others, by moving averages of its compute time."""

    def __init__(self) -> None:
        self.mean_seconds: list[float] = []
        self.steps = 0
        self.next_report_step = FIRST_REPORT_STEP

    def update(self, seconds: Sequence[float]) -> str:
        """A warning of a slow rank, from the compute seconds of each rank in a step; mostly empty."""
        before = self.mean_seconds or list(seconds)
        self.mean_seconds = [
            SECONDS_DECAY * old + (1 - SECONDS_DECAY) * new for old, new in zip(before, seconds, strict=True)
        ]
        self.steps += 1
        if len(seconds) < 2 or self.steps < self.next_report_step:
            return ""
        slowest = max(range(len(self.mean_seconds)), key=self.mean_seconds.__getitem__)
        others = median(t for rank, t in enumerate(self.mean_seconds) if rank != slowest)
        ratio = self.mean_seconds[slowest] / max(others, 1e-9)
        if ratio < SLOW_RATIO:
            return ""
        self.next_report_step = self.steps + STEPS_BETWEEN_REPORTS
        return _(
            "process {slowest} takes {ratio:.1f} times as long as the others, who wait for it",
            slowest=slowest,
            ratio=ratio,
        )
