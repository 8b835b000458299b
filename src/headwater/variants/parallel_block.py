"""Parallel residual branches: attention and feed-forward read the same hidden states (GPT-J, GPT-NeoX)."""

from __future__ import annotations

from torch import Tensor

from headwater.core import functional
from headwater.core.attention import ForwardContext
from headwater.core.norms import NoNorm
from headwater.core.stack import Block, BlockLayer
from headwater.i18n import _
from headwater.parts import must, part


@part
class ParallelBlock(Block):
    """Branches in parallel: all read the same residual stream, and their sum is added to it (GPT-J, GPT-NeoX)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        must(
            all(branch.post_norm == NoNorm() for branch in self.branches),
            self,
            _("branches must not have a post_norm"),
            "one",
            _("there is one sum for all of them; use norm"),
        )

    def build(self, d_model: int) -> BlockLayer:
        return ParallelBlockLayer(self, d_model)


class ParallelBlockLayer(BlockLayer):
    """One Transformer layer with parallel branches: x + the sum of dropout(out_norm(layer(norm(x))))."""

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]"""
        total = x
        for branch in self.branches:
            y = branch.out_norm(branch.layer(branch.norm(x), context, step))
            total = functional.add_dropout(total, y, self.dropout.rate)
        return total
