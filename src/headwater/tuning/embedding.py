"""LoRA of embedding tables: the vector of a token becomes W[id] + s · B A[:, id], with A [r, vocab] and B [d, r].

Only the lookup changes: an output layer that is tied to the table keeps the weights of the base, as in peft.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import Transformer, functional
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.quantization.layers import QuantizedEmbedding, replace_module
from headwater.tuning.base import Change, ChangedModule, Selection, selection_of
from headwater.tuning.paths import TOKEN_TABLE

EMBEDDING_TYPES = (nn.Embedding, QuantizedEmbedding)


class TunedEmbedding(ChangedModule):
    """An embedding table with changes, for the rows of a batch that use the adapter."""

    def __init__(self, base: nn.Embedding | QuantizedEmbedding, selection: Selection) -> None:
        super().__init__()
        self.base = base
        self.changes = nn.ModuleDict()
        self.selection = selection
        self.num_embeddings = base.num_embeddings
        self.embedding_dim = base.embedding_dim

    @property
    def weight(self) -> Tensor:
        """The weight of the base; a quantized one is dequantized."""
        weight: Tensor = self.base.weight  # type: ignore[assignment]
        return weight

    @weight.setter
    def weight(self, weight: nn.Parameter) -> None:
        """Weight tying sets the weight of the base."""
        self.base.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, Q] -> [B, Q, D]"""
        x = functional.embedding(ids, self.base)
        for change, rows in self.active():
            assert isinstance(change, LowRankTable)
            if rows is None:
                x = x + change(ids).to(x.dtype)
            else:
                x = x.index_add(0, rows.to(x.device), change(ids[rows]).to(x.dtype))
        return x

    def merged(self, name: str) -> nn.Embedding:
        """One plain table that gives the same with the adapter of that name."""
        change = self.changes[name]
        assert isinstance(change, LowRankTable)
        weight = self.weight.detach().float() + change.delta()
        table = nn.Embedding(self.num_embeddings, self.embedding_dim, device="meta")
        table.weight = nn.Parameter(weight, requires_grad=False)
        return table


class LowRankTable(Change):
    """s · B A, added to an embedding table. A is zero at the start, so that the model is unchanged."""

    def __init__(self, table: TunedEmbedding, r: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        device = next((t.device for t in (*table.base.parameters(), *table.base.buffers())), torch.device("cpu"))
        initial = torch.randn(table.embedding_dim, r, generator=generator)  # as peft's
        self.scale = scale
        self.lora_a = nn.Parameter(torch.zeros(r, table.num_embeddings, device=device))
        self.lora_b = nn.Parameter(initial.to(device))

    def forward(self, ids: Tensor) -> Tensor:
        """[B, Q] -> [B, Q, D]: what is added to the vectors of these tokens."""
        columns = F.embedding(ids, self.lora_a.t())  # [B, Q, r]
        return self.scale * F.linear(columns, self.lora_b)

    def delta(self) -> Tensor:
        """s · (B A)ᵀ [vocab, D]"""
        return self.scale * (self.lora_b.detach() @ self.lora_a.detach()).t()

    def extra_repr(self) -> str:
        return f"r={len(self.lora_a)}, scale={self.scale:g}"


def embedding_paths(model: Transformer) -> list[str]:
    """The paths of the tables of tokens, without those inside a changed one."""
    tables = (*EMBEDDING_TYPES, TunedEmbedding)
    return [path for path, m in model.named_modules() if isinstance(m, tables) and path.endswith(TOKEN_TABLE)]


def tuned_embedding(model: Transformer, path: str) -> TunedEmbedding:
    """The table at a path as a TunedEmbedding, which is put in its place if it is none yet."""
    table = model.get_submodule(path)
    if isinstance(table, TunedEmbedding):
        return table
    assert isinstance(table, EMBEDDING_TYPES)
    if table._forward_hooks:  # of virtual tokens, which are put into what the table gives
        raise BadSetting(
            _("tune: {path} has virtual tokens, and LoRA cannot change it too; give LoRA another target", path=path)
        )
    changed = TunedEmbedding(table, selection_of(model))
    replace_module(model, path, changed)
    return changed
