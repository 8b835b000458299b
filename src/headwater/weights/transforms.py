"""Invertible tensor transforms between checkpoint and model layout: transpose, split, squeeze, RoPE deinterleave.

A transform maps a list of tensors to a list of tensors and back: inverse(forward(x)) = x, bit for bit.
In a name map they follow the colon, in the order in which a checkpoint is loaded:

    transpose               a matrix stored [in, out]; other tensors are unchanged
    split                   one tensor holds several parameters, concatenated by rows: q | k | v
    split by heads          the same, but interleaved by head: q0 k0 v0 q1 k1 v1 ...
    squeeze                 [1, n] is loaded as [n]
    deinterleave by heads   RoPE pairs stored interleaved (0 1 | 2 3 ...) are loaded as two halves (0 2 ... | 1 3 ...)

The word after `by` names a size of the model: `deinterleave by kv_heads` uses sizes["kv_heads"].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.errors import BadSetting, nearest
from headwater.i18n import _

# (tensors, how many parameters the rule names, the size named by `by`) -> tensors
TransformFunction = Callable[[Sequence[Tensor], int, int], list[Tensor]]


@dataclass(frozen=True)
class TensorTransform:
    """forward: checkpoint to model; inverse: model to checkpoint; accepts: whether a shape can be transformed."""

    forward: TransformFunction
    inverse: TransformFunction
    accepts: Callable[[Tensor, int, int], bool] = lambda tensor, count, size: True


def rope_interleaved_to_halves(rows: Tensor, heads: int) -> Tensor:
    """Reorder the RoPE rows of each head from interleaved pairs (Meta, GGUF) to two halves (as in transformers).

    Row h·d + 2j + s goes to row h·d + s·d/2 + j, where d is head_dim and s is 0 or 1.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def rope_halves_to_interleaved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of rope_interleaved_to_halves: row h·d + s·d/2 + j goes to row h·d + 2j + s."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _transpose(tensors: Sequence[Tensor], count: int, size: int) -> list[Tensor]:
    return [t.t() if t.dim() == 2 else t for t in tensors]


def _split_by_head(tensors: Sequence[Tensor], count: int, heads: int) -> list[Tensor]:
    (fused,) = tensors  # [heads · count · d, ...]
    return [piece.flatten(0, 1) for piece in fused.unflatten(0, (heads, count, -1)).unbind(1)]


def _join_by_head(tensors: Sequence[Tensor], count: int, heads: int) -> list[Tensor]:
    return [torch.stack([t.unflatten(0, (heads, -1)) for t in tensors], 1).flatten(0, 2)]


TRANSFORMS: dict[str, TensorTransform] = {
    "transpose": TensorTransform(_transpose, _transpose),
    "split": TensorTransform(
        lambda tensors, count, size: list(tensors[0].chunk(count)),
        lambda tensors, count, size: [torch.cat(list(tensors))],
        lambda tensor, count, size: tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % count == 0,
    ),
    "split by": TensorTransform(
        _split_by_head,
        _join_by_head,
        lambda tensor, count, heads: (
            tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % (heads * count) == 0
        ),
    ),
    "squeeze": TensorTransform(
        lambda tensors, count, size: [t[0] for t in tensors],
        lambda tensors, count, size: [t[None] for t in tensors],
        lambda tensor, count, size: tensor.dim() > 0 and tensor.shape[0] == 1,
    ),
    "deinterleave by": TensorTransform(
        lambda tensors, count, heads: [rope_interleaved_to_halves(t, heads) for t in tensors],
        lambda tensors, count, heads: [rope_halves_to_interleaved(t, heads) for t in tensors],
        lambda tensor, count, heads: tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % (2 * heads) == 0,
    ),
}


@dataclass(frozen=True)
class Transforms:
    """The transforms of one rule, in loading order: (transform, the name of its size or "")."""

    steps: tuple[tuple[TensorTransform, str], ...] = ()

    def forward(self, tensor: Tensor, count: int, sizes: Mapping[str, int]) -> list[Tensor] | None:
        """Parameters from a checkpoint tensor, or None where its shape cannot be transformed."""
        tensors = [tensor]
        for transform, size_name in self.steps:
            size = sizes.get(size_name, 1)
            if not all(transform.accepts(t, count, size) for t in tensors):
                return None
            tensors = transform.forward(tensors, count, size)
        return tensors

    def inverse(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """The checkpoint tensor from the parameters it holds."""
        count = len(tensors)
        for transform, size_name in reversed(self.steps):
            tensors = transform.inverse(tensors, count, sizes.get(size_name, 1))
        (fused,) = tensors
        return fused

    def of_rows(self) -> Transforms:
        """The transforms of rows alone: what becomes of B in W + B A, whichever way the file stores W."""
        return Transforms(tuple(step for step in self.steps if step[0] is not TRANSFORMS["transpose"]))

    def required_sizes(self) -> set[str]:
        """The names of the sizes that the transforms need."""
        return {size_name for _, size_name in self.steps if size_name}


def parse_transforms(text: str) -> Transforms:
    """Parse a list of transforms such as `transpose, split`.

    >>> parse_transforms("deinterleave by heads").required_sizes()
    {'heads'}
    """
    steps = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        word, by, size = part.partition(" by ")
        name = word + by.rstrip()
        if name not in TRANSFORMS:
            raise BadSetting(
                _("a name map has no transform {name!r}; {nearest}", name=name, nearest=nearest(name, TRANSFORMS))
            )
        steps.append((TRANSFORMS[name], size.strip()))
    return Transforms(tuple(steps))
