"""Where a number first stops being one, on the way forward and on the way back; and what gets no gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwater.inspection.calling import logits_of
from headwater.inspection.traces import Pass, by_place, hooked, tensors


@dataclass(frozen=True)
class Spoilt:
    """The first module to write a NaN or an infinity from inputs that had none; rows and places where it did."""

    path: str
    what: str
    places: tuple[tuple[int, int], ...]


def first_spoilt(passes: list[Pass], rows: int, length: int) -> Spoilt | None:
    for here in passes:
        for out in here.outputs:
            last = not here.path  # a model may say -inf for what must not be chosen
            if spoilt(out, minus=not last) and not any(spoilt(came, minus=False) for came in here.inputs):
                return Spoilt(here.path, _word(out), _where(out, rows, length))
    return None


def spoilt(t: Tensor, minus: bool) -> bool:
    """minus: whether -inf counts; in a mask it is meant."""
    if not t.is_floating_point():
        return False
    return bool((t.isnan() | (t == torch.inf)).any()) or (minus and bool((t == -torch.inf).any()) and not _is_mask(t))


def _is_mask(t: Tensor) -> bool:
    return bool(((t == -torch.inf) | (t == 0)).all())


def _word(t: Tensor) -> str:
    return "NaN" if bool(t.isnan().any()) else "an infinity"


def _where(t: Tensor, rows: int, length: int) -> tuple[tuple[int, int], ...]:
    placed = by_place(t, rows, length)
    if placed is None:
        return ()
    return tuple((int(r), int(c)) for r, c in (~placed.isfinite()).any(2).nonzero()[:5])


class Backward:
    """Gradients at the inputs and outputs of each pass through a module: were they finite?

    embedded: the first vectors made from ids [B, L], to ask what an answer depends on.
    """

    def __init__(self, rows: int, length: int) -> None:
        self.size = torch.Size((rows, length))
        self.passes: list[tuple[str, list[int], list[int]]] = []
        self.held: list[Tensor] = []  # a tensor that is gone may lend its id to another
        self.finite: dict[int, bool] = {}
        self.embedded: Tensor | None = None

    def listening(self, model: nn.Module) -> AbstractContextManager[None]:
        return hooked(model, self._hook)

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            came, left = tensors((args, kwargs)), tensors(output)
            vectors = any(t.is_floating_point() for t in left[:1]) and not any(t.is_floating_point() for t in came)
            if self.embedded is None and vectors and left[0].shape[:2] == self.size:
                self.embedded = left[0].requires_grad_()
            self.passes.append((path, self._watched(came), self._watched(left)))

        return hook

    def _watched(self, found: list[Tensor]) -> list[int]:
        for t in found:
            if t.requires_grad and id(t) not in self.finite:
                self.held.append(t)
                self.finite[id(t)] = True
                t.register_hook(partial(self._note, id(t)))
        return [id(t) for t in found if t.requires_grad]

    def _note(self, key: int, grad: Tensor) -> None:
        self.finite[key] = bool(grad.isfinite().all())

    def culprit(self) -> str | None:
        """The innermost module that was handed finite gradients and handed on others; the last comes first."""
        guilty = [path for path, came, left in self.passes if self._fine(left) and not self._fine(came)]
        inner = [path for path in guilty if path and not any(other.startswith(path + ".") for other in guilty)]
        return inner[-1] if inner else guilty[-1] if guilty else None

    def _fine(self, keys: list[int]) -> bool:
        return all(self.finite[key] for key in keys)


def objective(answer: Any, seed: int) -> Tensor:
    """A fixed random mixture of everything the model says; what is not finite takes no part."""
    total = torch.zeros((), dtype=torch.float32)
    draw = torch.Generator().manual_seed(seed)
    for out in tensors(answer) or [logits_of(answer)]:
        if out.is_floating_point() and out.requires_grad:
            weight = torch.randn(out.shape, generator=draw).to(out.device)
            total = total.to(out.device) + (torch.where(out.isfinite(), out, 0).float() * weight).sum()
    return total
