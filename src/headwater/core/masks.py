"""Who may attend to whom. One convention everywhere: True = may attend.

A rule is a part that judges two places; padding and documents come with the call. `Sight` puts them together, once a
call, and knows the cheap cases: nothing to hide, plain causal, and a window that only ever reaches so far.
B batch, Q queries, S keys; places are whole numbers, [1, Q] where every row has the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwater.parts import must, part

if TYPE_CHECKING:
    from headwater.core.positions import Position

Reach = tuple[int | None, int | None]


@runtime_checkable
class Rule(Protocol):
    """How far back and ahead a place sees (None = without end), and the same as a test on two places."""

    @property
    def reach(self) -> Reach: ...
    def allows(self, q: Tensor, k: Tensor) -> Tensor | None: ...


@part
class Everyone:
    reach: ClassVar[Reach] = (None, None)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return None


@part
class Past:
    """Itself and everything before it: k ≤ q."""

    reach: ClassVar[Reach] = (None, 0)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return k <= q


@part
class Window:
    """Itself and the size - 1 places before it: 0 ≤ q - k < size."""

    size: int

    def __post_init__(self) -> None:
        must(self.size >= 1, self, "size must be at least 1", self.size, "1 sees only itself")

    @property
    def reach(self) -> Reach:
        return self.size - 1, 0

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return (k <= q) & (q - k < self.size)


@part
class Around:
    """The places at most `size` away on either side: |q - k| ≤ size."""

    size: int

    @property
    def reach(self) -> Reach:
        return self.size, self.size

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return (q - k).abs() <= self.size


@part
class Both:
    """What two rules allow together."""

    first: Rule
    second: Rule

    @property
    def reach(self) -> Reach:
        (back, ahead), (other_back, other_ahead) = self.first.reach, self.second.reach
        return _shorter(back, other_back), _shorter(ahead, other_ahead)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        first, second = self.first.allows(q, k), self.second.allows(q, k)
        return first if second is None else _both(first, second)


@dataclass(frozen=True)
class Sight:
    """A rule asked about the places of one call, with what is real and which document each token belongs to.

    keep [B, S] True where a key is real; q_docs [B, Q], k_docs [B, S] document numbers. None: all real, one document.
    aligned: keys and queries are the same tokens in the same order, so that places differ as indices do.
    """

    rule: Rule
    position: Position
    q_places: Tensor
    k_places: Tensor
    keep: Tensor | None = None
    q_docs: Tensor | None = None
    k_docs: Tensor | None = None
    aligned: bool = False

    @property
    def causal(self) -> bool:
        """Plain causal over the call's own tokens: the kernel needs no mask to know it."""
        back, ahead = self.rule.reach
        whole = back is None or back + 1 >= self.k_places.shape[1]
        return self.aligned and ahead == 0 and whole and self.keep is None and self.k_docs is None

    @property
    def block(self) -> int | None:
        """The block of queries by which a short-sighted rule is worked off; None where one dense mask costs less."""
        back, ahead = self.rule.reach
        if not self.aligned or back is None or ahead is None:
            return None
        size = max(64, -(-(back + ahead + 1) // 2))
        return size if self.k_places.shape[1] > 3 * size else None

    def allowed(self) -> Tensor | None:
        """[B|1, 1, Q|1, S], True = may attend; None where nothing is hidden."""
        allowed = self.rule.allows(self.q_places[:, :, None], self.k_places[:, None, :])
        if self.keep is not None:
            allowed = _both(allowed, self.keep[:, None, :])
        if self.q_docs is not None and self.k_docs is not None:
            allowed = _both(allowed, self.q_docs[:, :, None] == self.k_docs[:, None, :])
        return None if allowed is None else allowed[:, None]

    def mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores or hides them: bias of the position and allowed(), as one tensor."""
        allowed, bias = self.allowed(), self.position.bias(self.q_places, self.k_places)
        if bias is None:
            return allowed
        return bias.to(dtype) if allowed is None else bias.to(dtype).masked_fill(~allowed, -torch.inf)

    def part(self, q: slice, k: slice) -> Sight:
        """The same question about some of the queries and some of the keys."""

        def cut(t: Tensor | None, s: slice) -> Tensor | None:
            return None if t is None else t[:, s]

        return replace(
            self,
            q_places=self.q_places[:, q],
            k_places=self.k_places[:, k],
            keep=cut(self.keep, k),
            q_docs=cut(self.q_docs, q),
            k_docs=cut(self.k_docs, k),
            aligned=False,
        )


def _both(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _shorter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
