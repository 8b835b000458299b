"""A mixture of experts: each token is sent to its best few feed-forwards, weighed by the router (Mixtral)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core.kinds import Layer
from headwater.parts import must, part


@part
class Experts(Layer):
    """Σ w_e · ffn_e(x) over the `chosen` experts with the highest router scores; w is a softmax over the chosen."""

    ffn: Layer
    count: int
    chosen: int

    def __post_init__(self) -> None:
        fits = 1 <= self.chosen <= self.count
        must(fits, self, f"chosen must be from 1 to count ({self.count})", self.chosen, "2 of 8 is usual")

    def build(self, d_model: int) -> nn.Module:
        return ExpertsLayer(self, d_model)


class ExpertsLayer(nn.Module):
    def __init__(self, spec: Experts, d_model: int) -> None:
        super().__init__()
        self.chosen, self.router = spec.chosen, nn.Linear(d_model, spec.count, bias=False)
        self.experts = nn.ModuleList(spec.ffn.build(d_model) for _ in range(spec.count))

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [..., D]. Each expert works only on the tokens sent to it."""
        tokens = x.flatten(0, -2)
        scores, which = self.router(tokens).float().topk(self.chosen, -1)
        share, out = scores.softmax(-1).to(x.dtype), torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = (which == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, share[token, rank, None] * expert(tokens[token]))
        return out.view_as(x)
