"""What may differ between a public tensor and ours, besides its name: small changes that work in both directions.

A change reads a list of tensors into a list of tensors and writes it back: write(read(x)) = x, bit for bit.
In a name table they stand after the colon, in the order of reading:

    transposed              a matrix stored [in, out]; anything else is left alone
    split                   one tensor holds several of ours, one after another by rows: q | k | v
    split by heads          the same, but interleaved by head: q0 k0 v0 q1 k1 v1 ...
    row                     [1, n] is read as [n]
    paired by heads         rotary pairs stored side by side (0 1 | 2 3 ...) are read as two halves (0 2 ... | 1 3 ...)

The word after `by` names a size the caller gives: `paired by kv_heads` reads sizes["kv_heads"].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.errors import BadSetting, nearest

Step = Callable[[Sequence[Tensor], int, int], list[Tensor]]  # tensors, pieces the row names, size named by `by`


@dataclass(frozen=True)
class Change:
    read: Step
    write: Step
    fits: Callable[[Tensor, int, int], bool] = lambda tensor, count, size: True


def halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """Rotary rows of each head from pairs side by side (Meta, GGUF) to two halves (ours, the public folders).

    Row h·d + 2j + s goes to row h·d + s·d/2 + j, where d is the head width, s is 0 or 1.
    """
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def pairs_from_halves(rows: Tensor, heads: int) -> Tensor:
    """The way back: row h·d + s·d/2 + j goes to row h·d + 2j + s."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _transposed(tensors: Sequence[Tensor], count: int, size: int) -> list[Tensor]:
    return [t.t() if t.dim() == 2 else t for t in tensors]


def _split_by_head(tensors: Sequence[Tensor], count: int, heads: int) -> list[Tensor]:
    (whole,) = tensors
    return [piece.flatten(0, 1) for piece in whole.unflatten(0, (heads, count, -1)).unbind(1)]


def _join_by_head(tensors: Sequence[Tensor], count: int, heads: int) -> list[Tensor]:
    return [torch.stack([t.unflatten(0, (heads, -1)) for t in tensors], 1).flatten(0, 2)]


CHANGES: dict[str, Change] = {
    "transposed": Change(_transposed, _transposed),
    "split": Change(
        lambda tensors, count, size: list(tensors[0].chunk(count)),
        lambda tensors, count, size: [torch.cat(list(tensors))],
        lambda tensor, count, size: tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % count == 0,
    ),
    "split by": Change(
        _split_by_head,
        _join_by_head,
        lambda tensor, count, heads: (
            tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % (heads * count) == 0
        ),
    ),
    "row": Change(
        lambda tensors, count, size: [t[0] for t in tensors],
        lambda tensors, count, size: [t[None] for t in tensors],
        lambda tensor, count, size: tensor.dim() > 0 and tensor.shape[0] == 1,
    ),
    "paired by": Change(
        lambda tensors, count, heads: [halves_from_pairs(t, heads) for t in tensors],
        lambda tensors, count, heads: [pairs_from_halves(t, heads) for t in tensors],
        lambda tensor, count, heads: tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % (2 * heads) == 0,
    ),
}


@dataclass(frozen=True)
class Steps:
    """The changes of one row, in reading order: (change, the name of its size or "")."""

    steps: tuple[tuple[Change, str], ...] = ()

    def read(self, tensor: Tensor, count: int, sizes: Mapping[str, int]) -> list[Tensor] | None:
        """Ours from theirs, or None when the tensor has a shape no model could mean."""
        tensors = [tensor]
        for change, by in self.steps:
            if not all(change.fits(t, count, sizes.get(by, 1)) for t in tensors):
                return None
            tensors = change.read(tensors, count, sizes.get(by, 1))
        return tensors

    def write(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        count = len(tensors)
        for change, by in reversed(self.steps):
            tensors = change.write(tensors, count, sizes.get(by, 1))
        (whole,) = tensors
        return whole

    def needs(self) -> set[str]:
        return {by for _, by in self.steps if by}


def parse_steps(text: str) -> Steps:
    """`transposed, split` -> its steps.

    >>> parse_steps("paired by heads").needs()
    {'heads'}
    """
    steps = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        word, by, size = part.partition(" by ")
        name = word + by.rstrip()
        if name not in CHANGES:
            raise BadSetting(f"a name table knows no change {name!r}; {nearest(name, CHANGES)}")
        steps.append((CHANGES[name], size.strip()))
    return Steps(tuple(steps))
