"""What a chooser is, and those that narrow the choice: how bold to be, and how many tokens may be chosen.

B rows, V tokens in the vocabulary. A score of -inf means never.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from headwater.parts import must, part


class Said(NamedTuple):
    """The tokens of one row: those that were given, and those that were chosen."""

    prompt: Sequence[int]
    new: Sequence[int]


class Chooser:
    """certain: at most one token is left, so there is nothing to draw."""

    certain: ClassVar[bool] = False

    def check(self, vocab: int) -> None:
        """Refuse what a vocabulary of this size cannot give."""

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        raise NotImplementedError


# ------------------------------------------------------------------------------------------------- how bold to be


@part
class Greedy(Chooser):
    """Only the most probable token; of equals, the one with the lowest id."""

    certain: ClassVar[bool] = True

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        best = scores.argmax(-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, best, scores.gather(-1, best))


@part
class Temperature(Chooser):
    """scores / value: below 1 bolder differences, above 1 smaller ones; 0 is Greedy()."""

    value: float = 1.0

    def __post_init__(self) -> None:
        law = "value must be 0 (greedy) or from 0.0001 to 100"
        must(self.value == 0 or 1e-4 <= self.value <= 100, self, law, self.value, "0.7 is usual")

    @property
    def certain(self) -> bool:  # type: ignore[override]
        return self.value == 0

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        if self.value == 0:
            return Greedy()(scores, said)
        return (scores - scores.amax(-1, keepdim=True)) / self.value  # from the top, so that nothing overflows


# ------------------------------------------------------------------------------------------ how many may be chosen


@part
class TopK(Chooser):
    """The count most probable tokens, and any that equal the last of them."""

    count: int

    def __post_init__(self) -> None:
        must(self.count >= 1, self, "count must be at least 1", self.count, "50 is usual; leave it out for all tokens")

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        least = scores.topk(min(self.count, scores.shape[-1])).values[:, -1:]
        return scores.masked_fill(scores < least, -torch.inf)


@part
class TopP(Chooser):
    """The most probable tokens until their mass reaches `mass`: a token stays if less than that came before it."""

    mass: float

    def __post_init__(self) -> None:
        must(0 <= self.mass <= 1, self, "mass must be from 0 to 1", self.mass, "0.95 is usual; 1 keeps all tokens")

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        if self.mass == 1:
            return scores
        shares = scores.softmax(-1)
        for count in (256, scores.shape[-1]):  # the few first: a whole vocabulary is seldom worth sorting
            top, ids = shares.topk(min(count, scores.shape[-1]))
            sums = top.cumsum(-1)
            if bool((sums[:, -1] >= self.mass).all()):
                break
        stays = sums - top < self.mass
        stays[:, 0] = True
        return torch.full_like(scores, -torch.inf).scatter(
            -1, ids, scores.gather(-1, ids).masked_fill(~stays, -torch.inf)
        )


@part
class MinP(Chooser):
    """Tokens at least `share` times as probable as the most probable one."""

    share: float

    def __post_init__(self) -> None:
        must(0 <= self.share <= 1, self, "share must be from 0 to 1", self.share, "0.05 is usual; 0 keeps all tokens")

    def __call__(self, scores: Tensor, said: Sequence[Said]) -> Tensor:
        shares = scores.softmax(-1)
        return scores.masked_fill(shares < self.share * shares.amax(-1, keepdim=True), -torch.inf)
