"""Which module did it: the inputs and outputs of every module in two runs that must agree, compared in order.

The culprit is the innermost module whose inputs still agree and whose output no longer does.
B rows, L places; a tensor is looked at if one of its axes can be told to be the places.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.taps import Tap


@dataclass(frozen=True)
class Pass:
    """One pass through one module; nth: how often this module had run before in the same call."""

    path: str
    nth: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@contextlib.contextmanager
def recording(model: nn.Module) -> Iterator[list[Pass]]:
    """Every pass through every module, in the order they end; children come before their parents."""
    passes: list[Pass] = []
    often: Counter[str] = Counter()

    def listen(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            came, left = (tuple(t.detach().clone() for t in tensors(value)) for value in ((args, kwargs), output))
            passes.append(Pass(path, often[path], came, left))
            often[path] += 1

        return hook

    with hooked(model, listen):
        yield passes


@contextlib.contextmanager
def hooked(model: nn.Module, hook: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """A forward hook on every module but the taps: a watched tap makes its owner spell its work out: another run."""
    modules = [(path, module) for path, module in model.named_modules() if not isinstance(module, Tap)]
    handles = [module.register_forward_hook(hook(path), with_kwargs=True) for path, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings; not those of ragged rows, which have no places to compare."""
    if isinstance(value, Tensor):
        return [] if value.is_nested else [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in tensors(item)]


def by_place(t: Tensor, rows: int, length: int) -> Tensor | None:
    """t as [B, L, everything else]; None where no single axis is the places."""
    if t.dim() and length not in t.shape and t.shape[0] == rows * length:
        return t.reshape(rows, length, -1)
    at = [axis for axis, size in enumerate(t.shape) if size == length]
    if t.dim() >= 2 and t.shape[0] == rows and t.shape[1] == length and len(at) == 1:
        return t.reshape(rows, length, -1)
    at = [axis for axis in at if not (axis == 0 and rows == length)]
    if len(at) != 1:
        return None  # none, or a square of places by places: scores before their mask may depend on anything
    row = next((axis for axis, size in enumerate(t.shape) if size == rows and axis != at[0]), None)
    if row is None:
        return t.movedim(at[0], 0).reshape(1, length, -1).expand(rows, -1, -1)
    return t.movedim((row, at[0]), (0, 1)).reshape(rows, length, -1)


Places = tuple[Tensor, Tensor]  # rows and columns, one of each for every place that is compared


@dataclass(frozen=True)
class Twins:
    """Places of run a and the places of run b that must agree with them, one to one."""

    a: Places
    b: Places
    size_a: tuple[int, int]
    size_b: tuple[int, int]

    def apart(self, a: Tensor, b: Tensor) -> tuple[Tensor, float] | None:
        """How far apart each pair is, and the largest number among them; None where they cannot be compared."""
        left, right = by_place(a, *self.size_a), by_place(b, *self.size_b)
        if left is None or right is None or left.shape[2] != right.shape[2] or not len(self.a[0]):
            return None
        x, y = left[self.a].double(), right[self.b].double()
        same = (x == y) | (x.isnan() & y.isnan())
        gap = torch.where(same, 0.0, (x - y).abs().nan_to_num(nan=torch.inf)).amax(1)
        scale = float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0
        return gap, scale

    def differ(self, a: tuple[Tensor, ...], b: tuple[Tensor, ...], tolerance: float) -> bool | None:
        """Whether any tensor of one pass differs from its twin; None where none can be compared."""
        found = [pair for x, y in zip(a, b, strict=False) if (pair := self.apart(x, y))]
        return any(bool((gap > tolerance * max(scale, 1e-6)).any()) for gap, scale in found) if found else None


def culprit(a: list[Pass], b: list[Pass], twins: Callable[[str], Twins], tolerance: float) -> str | None:
    """The path of the module where two runs part; None where no module shows it."""
    other = {(p.path, p.nth): p for p in b}
    first = None
    for here in a:
        there, pairs = other.get((here.path, here.nth)), twins(here.path)
        if there is None or not pairs.differ(here.outputs, there.outputs, tolerance):
            continue
        first = here.path if first is None else first
        if here.path and pairs.differ(here.inputs, there.inputs, tolerance) is False:
            return here.path
    return first
