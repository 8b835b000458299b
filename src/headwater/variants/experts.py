"""Mixture of experts: a router sends each token to its top-k feed-forward layers (Mixtral)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwater.core.base import BranchLayerSpec
from headwater.i18n import _
from headwater.parts import must, part


@part
class Experts(BranchLayerSpec):
    """Mixture of experts: Σ w_e · ffn_e(x) over the top_k experts of the router; w is the softmax of their logits."""

    ffn: BranchLayerSpec
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        must(
            1 <= self.top_k <= self.num_experts,
            self,
            _("top_k must be from 1 to num_experts ({num_experts})", num_experts=self.num_experts),
            self.top_k,
            _("2 of 8 is usual"),
        )

    def build(self, d_model: int) -> nn.Module:
        return ExpertsLayer(self, d_model)


class ExpertsLayer(nn.Module):
    """The module of Experts: a router and num_experts feed-forward layers."""

    def __init__(self, spec: Experts, d_model: int) -> None:
        super().__init__()
        self.top_k = spec.top_k
        self.router = nn.Linear(d_model, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(spec.ffn.build(d_model) for _ in range(spec.num_experts))

    def forward(self, x: Tensor, *_: object) -> Tensor:
        """x [..., D] -> [..., D]. Each expert computes only the tokens routed to it."""
        tokens = x.flatten(0, -2)
        logits, experts = self.router(tokens).float().topk(self.top_k, -1)  # [N, top_k]
        weights = logits.softmax(-1).to(x.dtype)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, rank = (experts == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, weights[token, rank, None] * expert(tokens[token]))
        return out.view_as(x)
