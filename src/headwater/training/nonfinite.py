"""Forward hooks on every module, the tensors of a module call, and the search for the first NaN or infinity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.modules import Tap

MAX_LISTED_POSITIONS = 5


@contextlib.contextmanager
def forward_hooks(model: nn.Module, make_hook: Callable[[str], Callable[..., None]]) -> Iterator[None]:
    """Register make_hook(path) on every module except taps: a tap with a hook makes its kernel use the eager formula.

    A hook is called as hook(module, args, kwargs, output), for children before their parents.
    """
    modules = [(path, module) for path, module in model.named_modules() if not isinstance(module, Tap)]
    handles = [module.register_forward_hook(make_hook(path), with_kwargs=True) for path, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def flatten_tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings, except nested tensors, which have no position axis."""
    if isinstance(value, Tensor):
        return [] if value.is_nested else [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in flatten_tensors(item)]


def by_position(t: Tensor, rows: int, length: int) -> Tensor | None:
    """Reshape t to [B, L, everything else]; None if it is not clear which axis is that of the positions."""
    if t.dim() and length not in t.shape and t.shape[0] == rows * length:
        return t.reshape(rows, length, -1)  # [B·L, ...]
    axes = [axis for axis, size in enumerate(t.shape) if size == length]
    if t.dim() >= 2 and t.shape[0] == rows and t.shape[1] == length and len(axes) == 1:
        return t.reshape(rows, length, -1)  # [B, L, ...]

    axes = [axis for axis in axes if not (axis == 0 and rows == length)]
    if len(axes) != 1:
        return None  # no axis, or [..., L, L]: attention scores before their mask may depend on anything
    row_axis = next((axis for axis, size in enumerate(t.shape) if size == rows and axis != axes[0]), None)
    if row_axis is None:
        return t.movedim(axes[0], 0).reshape(1, length, -1).expand(rows, -1, -1)
    return t.movedim((row_axis, axes[0]), (0, 1)).reshape(rows, length, -1)


# ---------------------------------------------------------------------------------------------------- NaN and infinity


@dataclass(frozen=True)
class NonFinite:
    """The first module that outputs NaN or infinity from finite inputs; positions: (row, column) of some of them."""

    path: str
    what: str
    positions: tuple[tuple[int, int], ...] = ()


def is_nonfinite(t: Tensor, *, allow_neg_inf: bool = False) -> bool:
    """Whether a tensor holds NaN or infinity. allow_neg_inf: -inf does not count, as in additive masks and logits."""
    if not t.is_floating_point():
        return False
    if allow_neg_inf:
        return bool((t.isnan() | (t == torch.inf)).any())
    return not bool(t.isfinite().all())


def first_nonfinite_module(
    model: nn.Module, forward: Callable[[], Any], size: tuple[int, int] | None = None
) -> NonFinite | None:
    """Call forward() and return the innermost module that first outputs NaN or infinity from finite inputs.

    size: rows and length of the ids, to report the positions too. The model itself may output -inf: a suppressed token.
    """
    sources: list[NonFinite] = []

    def make_hook(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if sources:
                return
            for out in flatten_tensors(output):
                if not is_nonfinite(out, allow_neg_inf=not path or _is_additive_mask(out)):
                    continue
                if any(is_nonfinite(t, allow_neg_inf=True) for t in flatten_tensors((args, kwargs))):
                    continue
                what = "NaN" if bool(out.isnan().any()) else "an infinity"
                sources.append(NonFinite(path, what, _nonfinite_positions(out, size)))
                return

        return hook

    with forward_hooks(model, make_hook):
        forward()
    return sources[0] if sources else None


def _is_additive_mask(t: Tensor) -> bool:
    return bool(((t == -torch.inf) | (t == 0)).all())


def _nonfinite_positions(t: Tensor, size: tuple[int, int] | None) -> tuple[tuple[int, int], ...]:
    rows = by_position(t, *size) if size is not None else None  # [B, L, ...]
    if rows is None:
        return ()
    indices = (~rows.isfinite()).any(2).nonzero()[:MAX_LISTED_POSITIONS]
    return tuple((int(row), int(column)) for row, column in indices)
