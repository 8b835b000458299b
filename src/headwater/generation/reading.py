"""A model reads tokens after what its cache holds, and says what may follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwater.core.embed import Rows
from headwater.generation.listening import Listener
from headwater.generation.slots import Slots
from headwater.generation.stepping import Stepper


def read(model: Any, slots: Slots, texts: Sequence[Sequence[int]]) -> Tensor:
    """Read new tokens, at least one a row; scores [B, V] for the token after each row's last.

    Rows may differ in length; a shorter one is filled up with its own last token, which nobody sees, and cropped again.
    """
    if stepper := _stepper(model, slots, texts):
        return stepper.read(slots, texts)
    ids = rectangle(texts, slots.device)
    before = slots.lengths
    states = _states(model, slots, ids)
    slots.crop(length + len(text) for length, text in zip(before, texts, strict=True))
    ends = torch.tensor([len(text) - 1 for text in texts], device=slots.device)
    return _head(model, states[torch.arange(len(texts), device=slots.device), ends][:, None])[:, 0]


def read_each(model: Any, slots: Slots, texts: Sequence[Sequence[int]], lasts: Sequence[int]) -> list[Tensor]:
    """Read new tokens, at least one a row; for each row scores [last, V] after each of its last ones."""
    sizes = [len(text) for text in texts]
    if stepper := _stepper(model, slots, texts):
        most = max(lasts)
        found = stepper.read(slots, texts, most).split([min(most, size) for size in sizes])
        return [scores[-last:] for scores, last in zip(found, lasts, strict=True)]
    before = slots.lengths
    states = _states(model, slots, rectangle(texts, slots.device))
    slots.crop(length + size for length, size in zip(before, sizes, strict=True))
    ends = [row[size - last : size] for row, size, last in zip(states, sizes, lasts, strict=True)]
    return list(_head(model, torch.cat(ends)[None])[0].split(list(lasts)))


def read_all(model: Any, slots: Slots, text: Sequence[int], last: int) -> Tensor:
    """Read new tokens of a single row; scores [last, V] after each of the last ones."""
    return read_each(model, slots, [text], [last])[0]


def _stepper(model: Any, slots: Slots, texts: Sequence[Sequence[int]]) -> Stepper | None:
    """The compiled step, for a model it knows; made once for a cache."""
    if slots.stepper is None:
        slots.stepper = (model, Stepper.of(model))
    whose, stepper = slots.stepper
    return stepper if whose is model and stepper is not None and stepper.takes(slots, texts) else None


@torch.inference_mode()
def listen(model: Any, slots: Slots, sources: Sequence[Sequence[int]]) -> None:
    """Encode the sources; the decoder's keys and values for them are worked out when it first reads."""
    ids = rectangle(sources, slots.device)
    sizes = torch.tensor([len(source) for source in sources], device=slots.device)
    keep = torch.arange(ids.shape[1], device=slots.device)[None] < sizes[:, None]
    kept = None if bool(keep.all()) else keep
    listener = Listener.of(model)
    with at_rest(model):
        if listener is not None and listener.takes(sources):
            states = listener.read(sources).to(next(model.parameters()).dtype)
            slots.hear(model.bridge(Rows(ids, kept, states=states)))
        else:
            slots.hear(model.encode(ids, keep=kept))


@torch.inference_mode()
def _states(model: Any, slots: Slots, ids: Tensor) -> Tensor:
    """The states of new tokens. Whatever interrupts the model, the cache is as it was before."""
    held = slots.held
    try:
        with at_rest(model):
            states = model.states(model.rows(ids, None, None, None, None), memory=slots.memory, cache=slots)
            slots.told = None
            return states
    except BaseException:
        slots.held = held
        raise


@torch.inference_mode()
def _head(model: Any, states: Tensor) -> Tensor:
    with at_rest(model):
        return model.head(states, None)


@contextmanager
def at_rest(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, and afterwards every module as it was."""
    busy = [module for module in model.modules() if module.training] if model.training else []
    try:
        for module in busy:
            module.training = False
        yield
    finally:
        for module in busy:
            module.training = True


def rectangle(texts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[B, Q] ids; a shorter row is filled up with its own last token."""
    width = max(map(len, texts))
    return torch.tensor([[*text, *[text[-1]] * (width - len(text))] for text in texts], device=device)
