"""What a run writes into its directory: checkpoints, the best model, logs and plots."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from headwater.core.model import Transformer
from headwater.families.tuned_folder import ADAPTER_NAME, save_tuned_folder
from headwater.tasks import TaskData
from headwater.training.checkpoint import CheckpointWriter, TrainerSnapshot, TrainOutput
from headwater.training.config import TrainConfig
from headwater.training.distributed import SingleProcess
from headwater.training.evaluate import Evaluator
from headwater.training.loggers import MetricsLogger, OrderLogger, SampleLogger
from headwater.training.plots import PlotWriter
from headwater.training.predict import load_run
from headwater.training.run_dir import RunDir
from headwater.training.schedules import MAX_EVAL_EXAMPLES
from headwater.training.state import Callback
from headwater.training.storage import CheckpointManager
from headwater.tuning import copy_adapter, set_adapter_tensors, tuning_of
from headwater.weights.safetensors import SafetensorsFile


def run_callbacks(run: RunDir, config: TrainConfig) -> list[Callback]:
    """The loggers of a run directory, and its plots."""
    callbacks: list[Callback] = [
        MetricsLogger(run.folder / "metrics.jsonl", config.log_every),
        SampleLogger(run.folder / "samples.jsonl"),
    ]
    if config.log_order:
        callbacks.append(OrderLogger(run.folder / "order.jsonl"))
    return [*callbacks, PlotWriter(run)]


def run_fingerprint(task_data: TaskData, model: Transformer) -> dict[str, Any]:
    """What must not change when the run is resumed, beside the config: data, tokenizer, the base of a tuned model."""
    fingerprint = {"data": task_data.file_hashes, "tokenizer": task_data.tokenizer.hash}
    tuning = tuning_of(model)
    return fingerprint if tuning is None else {**fingerprint, "base": tuning.fingerprint}


class RunOutput(TrainOutput):
    """Writes checkpoints and the best model into a run directory, which must exist when training begins.

    The directory is recreated where it was deleted; where another process trains in it, nothing is written.
    """

    writes_checkpoints = True

    def __init__(self, run: RunDir, config: TrainConfig, task_data: TaskData, fingerprint: Mapping[str, Any]) -> None:
        self.run = run
        self.config = config
        self.task_data = task_data
        self.fingerprint = fingerprint

    @cached_property
    def essential_files(self) -> dict[Path, bytes]:
        return self.run.essential_files()

    @cached_property
    def checkpoint_writer(self) -> CheckpointWriter:
        checkpoints = CheckpointManager(self.run.checkpoints_dir, self.run.id, max_to_keep=self.config.keep_checkpoints)
        return CheckpointWriter(checkpoints, self.fingerprint)

    def before_write(self) -> None:
        self.run.check_locked(self.essential_files)

    def recreate_missing(self) -> bool:
        return self.run.recreate_missing(self.essential_files)

    def write_checkpoint(self, snapshot: TrainerSnapshot) -> str:
        self.before_write()
        return self.checkpoint_writer.write_checkpoint(snapshot)

    def write_best(self, model: Transformer) -> None:
        self.before_write()
        saved = self.task_data.task.saved_model(model)
        if tuning_of(saved) is None:
            self.task_data.task.save_model(self.run.model_dir, saved, self.task_data)
        else:
            save_tuned_folder(self.run.model_dir, saved, self.task_data.metadata)
        self.task_data.task.write_pictures(self.run.plots_dir, model, self.task_data)

    def load_best(self, model: Transformer) -> Transformer:
        if tuning_of(model) is None:
            return load_run(self.run.folder).model.to(self.config.device)
        best = self.task_data.task.saved_model(copy_adapter(model))
        file = SafetensorsFile(self.run.model_dir / ADAPTER_NAME)
        set_adapter_tensors(best, file, file.where)
        return best.eval()


def build_evaluator(config: TrainConfig, task_data: TaskData, dist: SingleProcess | None = None) -> Evaluator:
    """The evaluator of a config. dist: the ranks that share the batches."""
    max_examples = config.eval_examples or MAX_EVAL_EXAMPLES
    return Evaluator(task_data, config.metric, max_examples, config.samples, dist or SingleProcess())
