"""Checkpoints: snapshots of a Trainer, written by a thread while training goes on, and restored on resume.

Tensors are stored as safetensors, all else as JSON, no pickle. A snapshot is a copy in memory, taken between two steps
and written during the next ones. Sharded models are gathered: a checkpoint does not depend on the number of ranks.
How checkpoints survive a crash: storage.py.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headwater.codecs import CodecSpec
from headwater.core import Model
from headwater.core.model import Transformer
from headwater.cpu import build
from headwater.errors import BadFile, BadSetting
from headwater.i18n import _
from headwater.parts import from_dict, to_dict
from headwater.training.config import FIELDS, TrainConfig, parse_config
from headwater.training.distributed import distribute_like, full_tensor
from headwater.training.optim import load_optimizer_state, optimizer_state
from headwater.training.state import CheckpointEvent, Event, NoteEvent
from headwater.training.storage import Checkpoint, CheckpointManager
from headwater.tuning.base import trained_parameters
from headwater.weights.native import copy_tensors
from headwater.weights.safetensors import SafetensorsFile, serialize_safetensors

if TYPE_CHECKING:
    from headwater.training.trainer import Trainer

Result = TypeVar("Result")

# ------------------------------------------------------------------------------------------------------------ snapshots

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
EMA_FILE = "ema.safetensors"
DATA_FILE = "data.safetensors"  # of a dataset with a state
STATE_FILE = "state.json"


@dataclass(frozen=True)
class TrainerSnapshot:
    """A copy of the trainer's state. tensors: by file and name."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for file in self.tensors.values() for t in file.values())


def take_snapshot(trainer: Trainer) -> TrainerSnapshot:
    """Copy the trainer's state. Where the model is sharded, every rank must call this."""
    live: dict[str, Mapping[str, Tensor]] = {
        MODEL_FILE: {path: p.detach() for path, p in trained_parameters(trainer.model).items()},
        OPTIMIZER_FILE: optimizer_state(trainer.optimizer, trainer.model),
        EMA_FILE: trainer.ema.weights,
        DATA_FILE: {name: torch.from_numpy(array) for name, array in trainer.dataset.state_arrays().items()},
    }
    copied = {file: {name: full_tensor(t) for name, t in tensors.items()} for file, tensors in live.items() if tensors}
    about = {
        "spec": to_dict(trainer.model.spec),
        "config": trainer.config.to_dict(),
        **runtime_environment(trainer.device),
    }
    state = {**trainer.state_dict(), **about}
    return TrainerSnapshot(trainer.state.step, copied, json.loads(json.dumps(state)))


def runtime_environment(device: torch.device) -> dict[str, Any]:
    """What the last bits of a number depend on, beside the config."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": "C" if build.training_library() is not None else "torch",
        "processor": _cpu_description(),
        "device": device.type,
    }


def _cpu_description() -> str:
    """CPU name and a hash of its feature flags, on which compiled code depends."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    expected = {name.strip(): value.strip() for name, value in lines.items()}
    flags = " ".join(sorted(expected.get("flags", expected.get("Features", "")).split()))
    return f"{expected.get('model name', platform.machine())} ({hashlib.sha256(flags.encode()).hexdigest()[:8]})"


# -------------------------------------------------------------------------------------------------------------- writing


class TrainOutput:
    """Where a Trainer writes its checkpoints and its best model: nowhere."""

    writes_checkpoints = False

    def before_write(self) -> None:
        """Called before anything is written; raises where nothing may be."""

    def recreate_missing(self) -> bool:
        """Recreate what was deleted meanwhile; returns whether anything was."""
        return False

    def write_checkpoint(self, snapshot: TrainerSnapshot) -> str:
        """Write a checkpoint, in a thread of its own; returns its path."""
        raise NotImplementedError

    def write_best(self, model: Transformer) -> None:
        """Write the best model so far."""

    def load_best(self, model: Transformer) -> Transformer | None:
        """The best model, as it was written; None where nothing is written. model: that of today."""
        return None


class CheckpointWriter(TrainOutput):
    """Writes checkpoints, and nothing else. fingerprint: what must not change on resume."""

    writes_checkpoints = True

    def __init__(self, checkpoints: CheckpointManager, fingerprint: Mapping[str, Any]) -> None:
        self.checkpoints = checkpoints
        self.fingerprint = fingerprint

    def write_checkpoint(self, snapshot: TrainerSnapshot) -> str:
        files: dict[str, Callable[[], Any]] = {
            name: partial(serialize_safetensors, name, tensors) for name, tensors in snapshot.tensors.items()
        }
        files[STATE_FILE] = lambda: [json.dumps({**snapshot.state, **self.fingerprint}, indent=1).encode()]
        self.checkpoints.check_disk_space(snapshot.num_bytes)
        return str(self.checkpoints.save(snapshot.step, files))


MAX_TIME_FRACTION = 1 / 50  # writing may take this fraction of the time since the last checkpoint


class _PendingSave(NamedTuple):
    step: int
    start_time: float
    future: Future[str]


class AsyncCheckpointer:
    """Asynchronous checkpointing: the state is copied between two steps and written by a thread.

    At most one write is in flight: the next one waits for it. Its result is reported at the next step or at the end.
    interval_seconds, or interval_steps in place of time: between checkpoints; emit: receives the events.
    """

    def __init__(self, interval_seconds: float, interval_steps: int, emit: Callable[[Event], None]) -> None:
        self.interval_seconds = interval_seconds
        self.interval_steps = interval_steps
        self.emit = emit
        self.executor = ThreadPoolExecutor(1, "checkpoint")
        self.pending: _PendingSave | None = None
        self.last_saved = time.monotonic()
        self.last_seconds = 0.0

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be taken after this step."""
        if self.interval_steps:
            return step % self.interval_steps == 0
        interval = max(self.interval_seconds, self.last_seconds / MAX_TIME_FRACTION)
        return self.pending is None and time.monotonic() - self.last_saved >= interval

    def start(
        self, step: int, take_snapshot: Callable[[], TrainerSnapshot], write: Callable[[TrainerSnapshot], str] | None
    ) -> None:
        """Copy the state now, and write it in the thread. write: None on a rank that takes part in the copy alone."""
        self.join()
        start_time = time.monotonic()
        snapshot = take_snapshot()
        if write is not None:
            self.pending = _PendingSave(step, start_time, self.executor.submit(write, snapshot))

    def join(self, wait: bool = True) -> None:
        """Report the write in flight once it is done. Errors other than those of the disk are raised here."""
        if self.pending is None or not (wait or self.pending.future.done()):
            return
        pending = self.pending
        self.pending = None
        path = or_warn(pending.future.result, self.emit, pending.step)
        self.last_saved = time.monotonic()
        self.last_seconds = self.last_saved - pending.start_time
        if path:
            self.emit(CheckpointEvent(pending.step, path, self.last_seconds))


def or_warn(work: Callable[[], Result], emit: Callable[[Event], None], step: int) -> Result | None:
    """Run `work`; on a disk error emit a note and return None, so that training goes on."""
    try:
        return work()
    except (OSError, BadFile) as error:
        reason = getattr(error, "strerror", "") or error
        emit(NoteEvent(step, _("nothing was saved: {value}; trying again later", value=reason)))
        return None


# ------------------------------------------------------------------------------------------------------------ restoring


def checkpoint_spec(checkpoint: Checkpoint | None) -> Model | CodecSpec | None:
    """The model spec of a checkpoint: with it the pretrained model of the run is not needed to resume."""
    plain = checkpoint.state().get("spec") if checkpoint else None
    spec = None if plain is None else from_dict(plain)
    if not isinstance(spec, Model | CodecSpec | None):
        raise BadFile(_("{saved}: spec must be a Model; the file is not as it was written", saved=checkpoint))
    return spec


def restore_checkpoint(trainer: Trainer, checkpoint: Checkpoint, fingerprint: Mapping[str, Any]) -> list[str]:
    """Restore a trainer from a checkpoint. Other data or another tokenizer are refused; returns notes."""
    state = checkpoint.state()
    _check_fingerprint(state, fingerprint, checkpoint.path)
    tensors = _load_distributed(trainer, checkpoint.path / MODEL_FILE)
    copy_tensors(trained_parameters(trainer.model), tensors, checkpoint.path / MODEL_FILE)
    load_optimizer_state(trainer.optimizer, trainer.model, _load_distributed(trainer, checkpoint.path / OPTIMIZER_FILE))
    if trainer.ema.weights:
        trainer.ema.load(_load_distributed(trainer, checkpoint.path / EMA_FILE))
    if (checkpoint.path / DATA_FILE).is_file():
        arrays = {name: t.numpy().copy() for name, t in SafetensorsFile(checkpoint.path / DATA_FILE).items()}
        trainer.dataset.load_state_arrays(arrays)
    trainer.load_state_dict(state)
    if (plan := trainer.state.step_plan) and plan[0][1] != trainer.config.max_steps:
        trainer.state.step_plan = []  # another number of steps is configured now
    return _environment_notes(state, runtime_environment(trainer.device))


def _environment_notes(state: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    changed = {name: value for name, value in current.items() if state.get(name, value) != value}
    notes: list[str] = [
        _(
            "{name} was {state} and is {value} now: numbers may differ in their last bits",
            name=name,
            state=state[name],
            value=value,
        )
        for name, value in changed.items()
    ]
    if "device" in changed:
        notes.append(_("another device draws other dropout masks: from here on the losses are those of another run"))
    return notes


def checkpoint_config(checkpoint: Checkpoint | None) -> TrainConfig | None:
    """The config of a checkpoint; None where it holds none."""
    expected = checkpoint.state().get("config") if checkpoint else None
    return None if expected is None else parse_config(expected)


def _load_distributed(trainer: Trainer, path: Path) -> dict[str, Tensor]:
    """The tensors of a file, each sharded like the parameter it belongs to."""
    parameters = dict(trainer.model.named_parameters())
    tensors = {}
    for name, tensor in SafetensorsFile(path).items():
        parameter = parameters.get(name.rpartition(":")[2])
        tensors[name] = tensor if parameter is None else distribute_like(tensor, parameter)
    return tensors


def _check_fingerprint(state: Mapping[str, Any], fingerprint: Mapping[str, Any], checkpoint_path: Path) -> None:
    for name, value in fingerprint.items():
        if state.get(name) != value:
            raise BadSetting(
                _(
                    "{name} must be the same as when {name2} was saved, it has changed; restore it, or start a new run",
                    name=name,
                    name2=checkpoint_path.name,
                )
            )


# ------------------------------------------------------------------------------------------ changes of config on resume


class ConfigChange(NamedTuple):
    name: str
    old: Any
    new: Any


FILE_SETTINGS = ("paths", "valid", "synonyms")  # files may lie elsewhere now: what is in them is compared, by its hash


def config_differences(old: TrainConfig, new: TrainConfig) -> list[ConfigChange]:
    return [ConfigChange(n, getattr(old, n), getattr(new, n)) for n in FIELDS if getattr(old, n) != getattr(new, n)]


def check_config_matches(config: TrainConfig, saved_config: TrainConfig, config_path: str, checkpoint: str) -> None:
    """config.yaml must be the config of the checkpoint, but for mutable settings."""
    for change in config_differences(saved_config, config):
        if not FIELDS[change.name].mutable and change.name not in FILE_SETTINGS:
            raise BadSetting(
                _(
                    "{where}: {name} must be {before!r}, as it was when {checkpoint} was saved, it is {now!r} "
                    "now; restore it, or start a new run",
                    where=config_path,
                    name=change.name,
                    before=change.old,
                    checkpoint=checkpoint,
                    now=change.new,
                )
            )


def check_resume_changes(old: TrainConfig, new: TrainConfig) -> list[ConfigChange]:
    """The changed settings of a resumed run. A change of an immutable setting is refused."""
    changes = config_differences(old, new)
    for change in changes:
        if not FIELDS[change.name].mutable:
            raise BadSetting(
                _(
                    "{name} cannot change in a resumed run: it was {before!r}, got {now!r}; leave it out, or "
                    "start a new run",
                    name=change.name,
                    before=change.old,
                    now=change.new,
                )
            )
    return changes
