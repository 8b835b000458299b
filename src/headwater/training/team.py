"""The processes that train one model together, each on its share of every batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Alone:
    """One process: nothing to agree on, nothing to add up."""

    rank, world = 0, 1

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number, summed over all processes."""
        return list(numbers)

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Every gradient becomes the sum of all processes' gradients."""

    def told(self, numbers: Sequence[float]) -> Sequence[float]:
        """What the first process knows."""
        return numbers

    def wait(self) -> None:
        """Until all are here."""
