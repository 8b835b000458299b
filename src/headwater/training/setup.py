"""Set-up of a training run: data, tokenizer, model, plan of steps and evaluations, learning rate schedule, trainer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn

from headwater.codecs import CodecSpec
from headwater.core import Model
from headwater.core.model import Transformer
from headwater.core.modules import eval_mode
from headwater.cpu.memory import return_freed_memory
from headwater.data.dataset import IndexBatch
from headwater.data.examples import Example
from headwater.data.summary import DataSummary
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.quantization.layers import QuantizedEmbedding
from headwater.tasks import TaskData, get_task
from headwater.tasks.batch import LossFn, to_tensors
from headwater.text.tokenizer import Tokenizer
from headwater.training.checkpoint import TrainOutput
from headwater.training.config import TrainConfig
from headwater.training.diagnostics import lr_warning
from headwater.training.distributed import SingleProcess
from headwater.training.evaluate import Evaluator
from headwater.training.gradients import autocast
from headwater.training.optim import build_optimizer
from headwater.training.pretrained import init_model
from headwater.training.recipes import resolve
from headwater.training.run_dir import RunDir, unused_path
from headwater.training.run_output import RunOutput, build_evaluator, run_callbacks, run_fingerprint
from headwater.training.schedules import EvaluationPlan, Schedule, build_schedule, plan_evaluations
from headwater.training.state import Callback, ReservedSeconds, TrainDataset, TrainState
from headwater.training.task_data import build_task_data, load_task_data, read_data
from headwater.training.trainer import Trainer
from headwater.training.tuned import is_tuned
from headwater.tuning.base import trained_parameters
from headwater.tuning.embedding import TunedEmbedding
from headwater.variants.towers import TwoTowers


@dataclass(frozen=True)
class TrainSetup:
    """A prepared run: config, data, model and trainer, before the first step."""

    config: TrainConfig
    task_data: TaskData
    model: Transformer
    trainer: Trainer
    run: RunDir | None  # None on a rank that writes nothing
    eval_plan: EvaluationPlan
    step_seconds: float  # measured
    data_summary: DataSummary | None = None
    notes: Sequence[str] = ()  # of the plan; those of the data are in task_data.notes


class ResumePoint(NamedTuple):
    """Steps and seconds of a run before it is resumed with another time limit."""

    steps: int = 0
    seconds: float = 0.0


FRESH_START = ResumePoint()


def build_train_setup(
    config: TrainConfig,
    *,
    examples: Mapping[str, list[Example]] | None = None,
    tokenizer: Tokenizer | None = None,
    run: RunDir | None = None,
    callbacks: Iterable[Callback] = (),
    dist: SingleProcess,
    start_time: float,
    saved_spec: Model | CodecSpec | None = None,
    resume_point: ResumePoint = FRESH_START,
) -> TrainSetup:
    """Set up a run from files, or from examples. tokenizer, run, saved_spec, resume_point: of a resumed run."""
    # data and tokenizer
    task_data, data_summary = _load_data(config, examples, tokenizer)

    # model
    config = resolve(config, task_data, saved_spec)
    model = _build_model(config, task_data, saved_spec, dist.world_size)

    # number of steps and evaluations, from the seconds that some of them take
    timings = dist.broadcast(measure_timings(config, task_data, model, start_time))
    num_valid = len(task_data.valid_examples) or task_data.valid.size
    planned, eval_plan = plan_steps(config, timings, num_valid, resume_point)
    state = TrainState()
    if not config.max_steps:  # the time limit decides, and may decide again
        state.step_plan = [(0, planned.max_steps)]
    if not config.eval_every:
        state.eval_cadence = (0, planned.eval_every)

    # run directory: rank 0 writes it
    output = TrainOutput()
    if dist.rank == 0:
        run = run or RunDir(Path(config.out) if config.out else _default_run_folder(config))
        output = RunOutput(run, planned, task_data, run_fingerprint(task_data, model))
        callbacks = [*run_callbacks(run, planned), *callbacks]

    # trainer
    schedule = build_schedule(planned)
    trainer = Trainer(
        model,
        task_data.task.loss,
        task_data.train,
        schedule,
        planned,
        count_targets=task_data.task.num_targets,
        evaluate_fn=build_evaluator(planned, task_data, dist),
        output=output,
        callbacks=callbacks if dist.rank == 0 else (),
        state=state,
        reserved=ReservedSeconds(eval_plan.seconds, timings.shutdown_seconds),
        dist=dist,
    )
    trainer.prepare_step = task_data.task.prepare_step
    warnings = (_peak_lr_warning(planned, schedule), _time_limit_warning(config, timings, eval_plan))
    notes = [warning for warning in warnings if warning]
    return TrainSetup(planned, task_data, model, trainer, run, eval_plan, timings.step_seconds, data_summary, notes)


def _load_data(
    config: TrainConfig, examples: Mapping[str, list[Example]] | None, tokenizer: Tokenizer | None
) -> tuple[TaskData, DataSummary | None]:
    if examples:
        task = get_task("seq2seq" if config.task == "auto" else config.task, config.objective).configured(config)
        return build_task_data(config, task, examples["train"], examples["valid"], tokenizer), None
    data_summary, splits = read_data(config)
    return load_task_data(config, data_summary, splits, tokenizer), data_summary


def _build_model(
    config: TrainConfig, task_data: TaskData, saved_spec: Model | CodecSpec | None, world_size: int
) -> Transformer:
    """The model before the first step; that of a resumed run is filled from its checkpoint afterwards."""
    if saved_spec is not None and not is_tuned(config):  # of a tuned model a checkpoint has the adapter alone
        model = cast(Transformer, saved_spec.build(seed=config.seed))
    else:
        model = _initial_model(config, task_data)
    check_vocab_size(model, task_data, config)
    model = model.to(config.device).train(task_data.task.uses_dropout)
    prepare_model(model, config, world_size)

    # what is computed once of the initial model; a resumed run has it in its checkpoint
    task_data.task.prepare(model, task_data, config, resumed=saved_spec is not None)
    return model


def _initial_model(config: TrainConfig, task_data: TaskData) -> Transformer:
    spec = build_spec(config, task_data)
    return init_model(spec, config, task_data.task, list(task_data.labels))


def prepare_model(model: Transformer, config: TrainConfig, world_size: int = 1) -> None:
    """Gradient checkpointing and torch.compile, as configured."""
    if config.gradient_checkpointing:
        model.gradient_checkpointing()
        return_freed_memory()
    if config.compile and config.fsdp and world_size > 1:
        raise BadSetting(
            _("compile and fsdp cannot be combined: FSDP2 gathers and frees the weights of each layer; choose one")
        )
    if isinstance(model, TwoTowers) and config.fsdp and world_size > 1:
        raise BadSetting(
            _("two towers cannot be trained with fsdp, which shards no scalar; leave it out: --nproc alone")
        )
    if config.compile:
        torch._dynamo.config.optimize_ddp = False  # a stack is one graph, not one for each bucket of DDP
        for stack in filter(None, (model.encoder, model.decoder)):
            # fallback_random: the same dropout masks as in eager mode
            stack.compile(dynamic=True, options={"fallback_random": True})


def _default_run_folder(config: TrainConfig) -> Path:
    stem = Path(config.paths[0].removesuffix(".gz")).stem if config.paths else "examples"
    return unused_path(config.task, stem)


# ------------------------------------------------------------------------------------------------ timings and the plan

PLANNED_TIME_FRACTION = 0.97  # of the time for steps; the rest is for checkpoints
SHUTDOWN_SECONDS = 2.0  # to end a run, without writing its files
DISK_BYTES_PER_SECOND = 3e8
MAX_SLOWDOWN = 5.0
# evaluated to measure the time per example
FIRST_PROBE_EXAMPLES = 2
PROBE_EXAMPLES = 16
MAX_PROBE_SECONDS = 1.0  # a first probe that takes longer is enough


class Timings(NamedTuple):
    """Durations measured before training."""

    step_seconds: float  # of a training step
    example_seconds: float  # of one validation row's evaluation
    setup_seconds: float = 0.0  # since the command began
    shutdown_seconds: float = 0.0  # after the last evaluation: files, plots


def measure_timings(config: TrainConfig, task_data: TaskData, model: Transformer, start_time: float) -> Timings:
    """Measure a few steps and evaluations. start_time: of the command."""
    clock_start = time.monotonic()
    cpu_start = time.process_time()
    step_seconds = benchmark_step(model, task_data.task.loss, task_data.train, config)
    step_seconds += task_data.train.extra_step_seconds
    example_seconds = 0.0
    if config.max_time or not (config.eval_every and config.eval_examples):
        example_seconds = benchmark_evaluation(model, build_evaluator(config, task_data))
    now = time.monotonic()
    slowdown = (now - clock_start) / max(1e-9, time.process_time() - cpu_start)
    return Timings(step_seconds, example_seconds, now - start_time, estimate_shutdown_seconds(model, slowdown))


def benchmark_step(
    model: Transformer, loss_fn: LossFn, dataset: TrainDataset, config: TrainConfig, num_steps: int = 3
) -> float:
    """Seconds per step in this process, the median of some real batches. The learning rate is 0: no weight changes."""
    device = next(model.parameters()).device
    optimizer = build_optimizer(model, 0.0, config)
    seconds = []
    for batch in islice(_sample_batches(dataset), num_steps + 1):
        dataset.take_metrics()  # those of the measurement are not of the run
        start = time.perf_counter()
        for indices in dataset.micro_batches(batch.indices, config.micro_batch_tokens or config.batch_tokens):
            micro_batch = to_tensors(dataset.collate(indices, batch.epoch), device)
            with autocast(device, config.dtype):
                loss = loss_fn(model, micro_batch, config.label_smoothing)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    measured = sorted(seconds[1:])  # the first one warms up
    return measured[len(measured) // 2]


def _sample_batches(dataset: TrainDataset) -> Iterator[IndexBatch]:
    """Batches of short, medium and long rows."""
    batches = list(islice(dataset.batches_from(0), dataset.probe_batches))
    for index in (0, *range(0, len(batches), max(1, len(batches) // 3))):
        yield batches[index % len(batches)]


def benchmark_evaluation(model: Transformer, evaluator: Evaluator) -> float:
    """Seconds per example of an evaluation, measured on a few. Before training most outputs are of maximum length."""
    for num_examples in (FIRST_PROBE_EXAMPLES, PROBE_EXAMPLES):
        start = time.perf_counter()
        with eval_mode(model):
            evaluator(model, num_examples)
        seconds = time.perf_counter() - start
        if seconds > MAX_PROBE_SECONDS:
            break
    return max(seconds / num_examples, 1e-9)


def estimate_shutdown_seconds(model: Transformer, slowdown: float) -> float:
    """Seconds after the last evaluation: writing a checkpoint and the model, plots, loading the model.

    slowdown: clock time over CPU time so far; above 1 on a shared machine.
    """
    alone = SHUTDOWN_SECONDS + 24 * sum(p.numel() for p in trained_parameters(model).values()) / DISK_BYTES_PER_SECOND
    return alone * min(MAX_SLOWDOWN, max(1.0, slowdown))


def plan_steps(
    config: TrainConfig, timings: Timings, num_valid: int, resume_point: ResumePoint = FRESH_START
) -> tuple[TrainConfig, EvaluationPlan]:
    """Plan the number of steps, the warmup and the evaluations. num_valid: validation examples there are."""
    limit = math.inf
    if config.max_time:
        limit = config.max_time - resume_point.seconds - timings.setup_seconds - timings.shutdown_seconds
    seconds = max(0.0, min(limit, config.max_steps * timings.step_seconds or math.inf))
    eval_plan = plan_evaluations(config, seconds, timings.step_seconds, timings.example_seconds, num_valid)

    steps = config.max_steps
    if not steps:  # as many as fit into the time beside the evaluations
        seconds -= eval_plan.total_seconds(int(seconds / timings.step_seconds))
        steps = resume_point.steps + max(1, int(PLANNED_TIME_FRACTION * seconds / timings.step_seconds))
    every = config.eval_every or min(eval_plan.every, steps)
    planned = config.replace(
        max_steps=steps,
        warmup=config.warmup if config.warmup >= 0 else min(4000, max(1, steps // 10)),
        eval_every=every,
        eval_examples=eval_plan.num_examples,
        final_eval_examples=eval_plan.num_final_examples,
    )
    return planned, eval_plan._replace(every=every)


def _time_limit_warning(config: TrainConfig, timings: Timings, plan: EvaluationPlan) -> str:
    """A warning where setup and the last evaluation take up the time limit; else empty."""
    ending = plan.seconds + plan.final_seconds + timings.shutdown_seconds
    if not config.max_time or timings.setup_seconds + ending + timings.step_seconds <= config.max_time:
        return ""
    return _(
        "--max-time {max_time:.0f}s is too short: reading and planning took {spent:.1f} s, a "
        "step takes {step:.1f} s, and the last evaluation and the files need about {ending:.1f} s",
        max_time=config.max_time,
        spent=timings.setup_seconds,
        step=timings.step_seconds,
        ending=ending,
    )


def _peak_lr_warning(config: TrainConfig, schedule: Schedule) -> str:
    """A warning of an unusually high peak learning rate; else empty."""
    return lr_warning(config.optimizer, schedule.at(max(1, config.warmup)))


# ----------------------------------------------------------------------------------------------------------- model spec


def build_spec(config: TrainConfig, task_data: TaskData) -> Model:
    """The model spec of a config: stacks and head by task."""
    if config.init_from:  # only the head and the token types are used
        config = config.replace(d_model=8, heads=1, layers=1, d_ff=8, position="none")
    spec = task_data.task.model_spec(config, len(task_data.tokenizer), len(task_data.labels))
    return task_data.task.adapt_spec(spec, task_data)


def check_vocab_size(model: Transformer, task_data: TaskData, config: TrainConfig) -> None:
    """Every token id must have a row in the embedding table."""
    if not task_data.task.reads_text:
        return
    table = model.output_stack.embed.tokens
    assert isinstance(table, nn.Embedding | QuantizedEmbedding | TunedEmbedding)
    rows = table.num_embeddings
    if rows < len(task_data.tokenizer):
        raise BadSetting(
            _(
                "--init-from {init_from}: the model has {rows} tokens, the tokenizer {num_tokenizer}; leave "
                "--tokenizer out to use the model's own",
                init_from=config.init_from,
                rows=rows,
                num_tokenizer=len(task_data.tokenizer),
            )
        )
