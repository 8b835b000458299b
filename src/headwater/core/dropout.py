"""Dropout: while training each number is 0 with probability p, and the others are 1 / (1 - p) times as large."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.machine.dropout import add_dropout, dropout


class Dropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and self.p else x

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """x + dropout(y): what a branch writes into the residual stream."""
        return add_dropout(x, y, self.p) if self.training and self.p else x + y
