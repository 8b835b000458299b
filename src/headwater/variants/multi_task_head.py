"""Multi-task head: several heads on the same hidden states, as masked LM and next sentence in BERT's pre-training."""

from __future__ import annotations

from torch import Tensor, nn

from headwater.core.base import HeadSpec
from headwater.core.embeddings import ModelInputs
from headwater.parts import part


@part
class MultiTaskHead(HeadSpec):
    """Heads by name; the outputs are a dictionary with the same names."""

    heads: tuple[tuple[str, HeadSpec], ...]

    def build(self, d_model: int) -> nn.Module:
        return MultiTaskHeadLayer({name: head.build(d_model) for name, head in self.heads})


class MultiTaskHeadLayer(nn.ModuleDict):
    """The module of MultiTaskHead: the heads by name."""

    def forward(self, x: Tensor, inputs: ModelInputs) -> dict[str, Tensor]:
        return {name: head(x, inputs) for name, head in self.items()}
