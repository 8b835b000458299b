"""What a checkpoint holds, and how a trainer goes on from it. Tensors as safetensors, all else as JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadSetting
from headwater.training.checkpoints import Checkpoints, Saved
from headwater.training.loop import Trainer
from headwater.training.optimiser import load_state, state_of
from headwater.training.storage import Piece
from headwater.weights.native import put, tensors_of
from headwater.weights.tensors import TensorFile, pieces

MODEL, OPTIMISER, AVERAGE, STATE = "model.safetensors", "optimizer.safetensors", "average.safetensors", "state.json"


def files_of(trainer: Trainer, facts: Mapping[str, Any]) -> dict[str, Callable[[], Iterable[Piece]]]:
    """The files of a checkpoint, each made when it is written. facts: what must not change (data, tokenizer)."""
    tensors: dict[str, Mapping[str, Tensor]] = {
        MODEL: tensors_of(trainer.model),
        OPTIMISER: state_of(trainer.optimiser, trainer.model),
    }
    if trainer.average.weights:
        tensors[AVERAGE] = trainer.average.weights

    def bytes_of(name: str) -> Callable[[], Iterator[Piece]]:
        return lambda: pieces(name, tensors[name])

    state = {**trainer.state(), **facts, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {**{name: bytes_of(name) for name in tensors}, STATE: lambda: [json.dumps(state, indent=1).encode()]}


def keeper(checkpoints: Checkpoints, facts: Mapping[str, Any]) -> Callable[[Trainer], str]:
    """What a trainer calls to write a checkpoint."""

    def keep(trainer: Trainer) -> str:
        files = files_of(trainer, facts)
        checkpoints.make_room(sum(t.numel() * t.element_size() for t in _all_tensors(trainer)))
        return str(checkpoints.save(trainer.progress.step, files))

    return keep


def _all_tensors(trainer: Trainer) -> Iterator[Tensor]:
    yield from tensors_of(trainer.model).values()
    yield from state_of(trainer.optimiser, trainer.model).values()
    yield from trainer.average.weights.values()


def restore(trainer: Trainer, saved: Saved, facts: Mapping[str, Any]) -> list[str]:
    """Put a trainer where the checkpoint was made. Other data or another tokenizer are refused; notes say the rest."""
    state = saved.state()
    _check(state, facts, saved.path)
    put(trainer.model, TensorFile(saved.path / MODEL), saved.path / MODEL)
    load_state(trainer.optimiser, trainer.model, TensorFile(saved.path / OPTIMISER))
    if trainer.average.weights:
        trainer.average.load(TensorFile(saved.path / AVERAGE))
    trainer.load_state(state)
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return [f"{name} was {state.get(name)} and is {value} now: numbers may differ in their last bits"
            for name, value in now.items() if state.get(name) != value]  # fmt: skip


def _check(state: Mapping[str, Any], facts: Mapping[str, Any], where: Path) -> None:
    for name, value in facts.items():
        if state.get(name) != value:
            raise BadSetting(f"{name} must be what it was when {where.name} was saved, it has changed; "
                             "bring it back, or begin a new run")  # fmt: skip
