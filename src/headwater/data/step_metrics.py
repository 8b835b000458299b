"""Metrics of training steps beside the loss, such as rewards, margins and KL divergence: means since the last look."""

from __future__ import annotations

from collections.abc import Mapping


class MetricMeans:
    """Sums and counts by name; take() gives the means and begins again."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `count` values whose sum is `total`."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        self.counts[name] = self.counts.get(name, 0.0) + count

    def update(self, means: Mapping[str, float]) -> None:
        """Add one value of each name."""
        for name, value in means.items():
            self.add(name, value)

    def take(self) -> dict[str, float]:
        """The means since the last call.

        >>> means = MetricMeans()
        >>> means.add("reward", 6.0, 4)
        >>> means.take(), means.take()
        ({'reward': 1.5}, {})
        """
        means = {name: total / max(self.counts[name], 1e-12) for name, total in self.sums.items()}
        self.sums.clear()
        self.counts.clear()
        return means
