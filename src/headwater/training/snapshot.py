"""What a checkpoint holds, and how a trainer goes on from it. Tensors as safetensors, all else as JSON, no pickle.

A snapshot is a copy in memory, taken between two steps; it is written while the next ones are done. Where processes
hold parts of a model, the whole is gathered: a checkpoint does not know how many wrote it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwater.core import Model
from headwater.errors import BadFile, BadSetting
from headwater.machine import library
from headwater.parts import from_plain, to_plain
from headwater.training.checkpoints import Checkpoints, Saved
from headwater.training.optimiser import load_state, state_of
from headwater.training.settings import Settings, read
from headwater.training.spread import laid_out, whole
from headwater.weights.native import put, tensors_of
from headwater.weights.tensors import TensorFile, pieces

if TYPE_CHECKING:
    from headwater.training.loop import Trainer

MODEL, OPTIMISER, AVERAGE, STATE = "model.safetensors", "optimizer.safetensors", "average.safetensors", "state.json"


@dataclass(frozen=True)
class Snapshot:
    """tensors: those of each file, by name."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]

    @property
    def size(self) -> int:
        return sum(t.nbytes for file in self.tensors.values() for t in file.values())


def snapshot(trainer: Trainer) -> Snapshot:
    """A trainer as it is now, in memory that no later step changes. Where it is sharded, all must ask for it."""
    live: dict[str, Mapping[str, Tensor]] = {
        MODEL: tensors_of(trainer.model),
        OPTIMISER: state_of(trainer.optimiser, trainer.model),
        AVERAGE: trainer.average.weights,
    }
    copied = {file: {name: whole(t) for name, t in tensors.items()} for file, tensors in live.items() if tensors}
    about = {"spec": to_plain(trainer.model.spec), "settings": trainer.settings.nested(), **environment(trainer.device)}
    state = {**trainer.state(), **about}
    return Snapshot(trainer.progress.step, copied, json.loads(json.dumps(state)))


def environment(device: torch.device) -> dict[str, Any]:
    """What the last bits of a number depend on, beside the settings."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "kernels": "C" if library.compiled() is not None else "torch",
        "processor": _processor(),
        "device": device.type,
    }


def _processor() -> str:
    """Its name, and a hash of what it can do: a compiler makes other code for another one."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    except OSError:
        return platform.processor()
    said = {name.strip(): value.strip() for name, value in lines.items()}
    flags = " ".join(sorted(said.get("flags", said.get("Features", "")).split()))
    return f"{said.get('model name', platform.machine())} ({hashlib.sha256(flags.encode()).hexdigest()[:8]})"


def keeper(checkpoints: Checkpoints, facts: Mapping[str, Any]) -> Callable[[Snapshot], str]:
    """What a trainer calls, in a thread of its own, to write a checkpoint. facts: what must not change (the data)."""

    def keep(snap: Snapshot) -> str:
        files: dict[str, Callable[[], Any]] = {name: partial(pieces, name, own) for name, own in snap.tensors.items()}
        files[STATE] = lambda: [json.dumps({**snap.state, **facts}, indent=1).encode()]
        checkpoints.make_room(snap.size)
        return str(checkpoints.save(snap.step, files))

    return keep


def spec_of(saved: Saved | None) -> Model | None:
    """The parts of the model that a checkpoint is of: with it, what the run once began from is needed no more."""
    plain = saved.state().get("spec") if saved else None
    spec = None if plain is None else from_plain(plain)
    if not isinstance(spec, Model | None):
        raise BadFile(f"{saved}: spec must be a Model; the file is not as it was written")
    return spec


def restore(trainer: Trainer, saved: Saved, facts: Mapping[str, Any]) -> list[str]:
    """Put a trainer where the checkpoint was made. Other data or another tokenizer are refused; notes say the rest."""
    state = saved.state()
    _check(state, facts, saved.path)
    put(trainer.model, _spread(trainer, saved.path / MODEL), saved.path / MODEL)
    load_state(trainer.optimiser, trainer.model, _spread(trainer, saved.path / OPTIMISER))
    if trainer.average.weights:
        trainer.average.load(_spread(trainer, saved.path / AVERAGE))
    trainer.load_state(state)
    if (plan := trainer.progress.plan) and plan[0][1] != trainer.settings.max_steps:
        trainer.progress.plan = []  # another number of steps is asked for now
    return _differences(state, environment(trainer.device))


def _differences(state: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    changed = {name: value for name, value in now.items() if state.get(name, value) != value}
    notes = [f"{name} was {state[name]} and is {value} now: numbers may differ in their last bits"
             for name, value in changed.items()]  # fmt: skip
    if "device" in changed:
        notes.append("another device draws other dropout masks: from here on the losses are those of another run")
    return notes


def settings_of(saved: Saved | None) -> Settings | None:
    """The settings that a checkpoint was made with; None where it does not say."""
    said = saved.state().get("settings") if saved else None
    return None if said is None else read(said)


def _spread(trainer: Trainer, path: Path) -> dict[str, Tensor]:
    """The tensors of a file, each spread over the processes as the parameter it belongs to."""
    own, file = dict(trainer.model.named_parameters()), TensorFile(path)
    owners = {name: own.get(name.rpartition(":")[2]) for name in file}
    return {name: t if (p := owners[name]) is None else laid_out(t, p) for name, t in file.items()}


def _check(state: Mapping[str, Any], facts: Mapping[str, Any], where: Path) -> None:
    for name, value in facts.items():
        if state.get(name) != value:
            raise BadSetting(f"{name} must be what it was when {where.name} was saved, it has changed; "
                             "bring it back, or begin a new run")  # fmt: skip
