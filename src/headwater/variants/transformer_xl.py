"""The relative positions of Transformer-XL: a bias of the scores that depends on the queries (Dai et al. 2019)."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from headwater.core.base import PositionSpec
from headwater.core.positions import CosSin, PositionEncoding, SinusoidalEncoding
from headwater.parts import part


@part
class RelativeXL(PositionSpec):
    """Transformer-XL: score = (q + u)·k + (q + v)·R(distance), R = W sinusoids(distance); u, v, W of each layer."""

    applies_to: ClassVar[str] = "attention"
    shared: ClassVar[bool] = False

    def build(self, width: int, heads: int = 1) -> PositionEncoding:
        return TransformerXLBias(width, heads)


class TransformerXLBias(PositionEncoding):
    """The relative position terms of one Transformer-XL layer."""

    has_query_bias = True

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.empty(heads, 1, width))
        self.v = nn.Parameter(torch.empty(heads, 1, width))
        self.position_projection = nn.Linear(heads * width, heads * width, bias=False)
        self.sinusoids = SinusoidalEncoding(heads * width, 10000.0, halves=True)

    def rotate(self, q: Tensor, k: Tensor, cos_sin: CosSin | None) -> tuple[Tensor, Tensor]:
        return q + self.u, k

    def query_bias(self, q: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """R is computed once for each distance that occurs, not for each pair of positions."""
        distance = q_positions[:, :, None] - k_positions[:, None, :]  # [B|1, Q, S]
        lowest, highest = self._distance_range(q_positions, k_positions, distance)
        distances = torch.arange(lowest, highest + 1, device=q.device)
        r = self.position_projection(self.sinusoids.add(q.new_zeros(1), distances))
        r = r.unflatten(-1, q.shape[1::2]).transpose(0, 1)  # [H, distances, D]
        by_distance = (q - self.u + self.v) @ r.mT  # [B, H, Q, distances]
        index = (distance - lowest)[:, None].expand(q.shape[0], q.shape[1], -1, -1)
        return by_distance.gather(-1, index)

    @staticmethod
    def _distance_range(q_positions: Tensor, k_positions: Tensor, distance: Tensor) -> tuple[int, int]:
        """The lowest and highest distance; bounds from the lengths alone while compiling or on the meta device."""
        if torch.compiler.is_compiling() or distance.device.type == "meta":
            bound = max(q_positions.shape[1], k_positions.shape[1])
            return -bound, bound
        return int(distance.min()), int(distance.max())
