"""From token ids to vectors, and what is known about each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.dropout import Dropout
from headwater.core.kinds import Embedding, Norm, Placing
from headwater.core.norms import NoNorm
from headwater.core.positions import NoPosition
from headwater.errors import BadInput
from headwater.machine.table import Table
from headwater.parts import must, part


@dataclass(frozen=True)
class Rows:
    """B rows of tokens. keep: True where a token is real. documents: 0 is padding, else the number of its document.

    places: where each token stands; counted over the real tokens of each row (or document) where it is not given.
    """

    ids: Tensor
    keep: Tensor | None = None
    documents: Tensor | None = None
    places: Tensor | None = None
    kinds: Tensor | None = None
    states: Tensor | None = None

    @property
    def gapless(self) -> bool:
        """Real tokens stand side by side, so places differ as indices do. Yes, where values must not be looked at."""
        if self.keep is None or torch.compiler.is_compiling() or self.keep.device.type == "meta":
            return True
        begins = self.keep[:, 0] + (self.keep[:, 1:] & ~self.keep[:, :-1]).sum(1)
        return bool((begins <= 1).all())

    def places_after(self, count: Any) -> Tensor:
        """[B|1, Q]; count [B|1, 1] real tokens came before."""
        if self.places is not None:
            return self.places
        if self.documents is not None:
            return _within(self.documents)
        if self.keep is not None:
            return count + (self.keep.cumsum(1) - 1).clamp(min=0)
        return count + torch.arange(self.ids.shape[1], device=self.ids.device)[None]


def _within(documents: Tensor) -> Tensor:
    """[B, Q] the place of each token within its document: the distance to where the document began."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


@part
class Tokens(Embedding):
    """tokens(id) · scale + kinds(kind) + position, then norm, dropout and, for a narrow table, a projection to d_model.

    scale is √d_model in the paper; only the token is scaled, never the position. kinds: how many token types there are.
    """

    vocab: int
    position: Placing = NoPosition()
    scale: float = 1.0
    kinds: int = 0
    norm: Norm = NoNorm()
    width: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        must(self.vocab >= 1, self, "vocab must be at least 1", self.vocab, "give the number of tokens")
        must(self.width != 0, self, "width must be at least 1", 0, "leave it out for d_model")
        must(0 <= self.dropout < 1, self, "dropout must be from 0 up to 1", self.dropout, "0.1 is usual")
        acts = getattr(self.position, "acts", None)
        must(acts != "attention", self, "position must act on the embedding", self.position, "give it to Attention")

    def build(self, d_model: int) -> nn.Module:
        return TokenEmbedding(self, d_model)


class TokenEmbedding(nn.Module):
    def __init__(self, spec: Tokens, d_model: int) -> None:
        super().__init__()
        width = spec.width or d_model
        self.scale, self.tokens = spec.scale, Table(spec.vocab, width)
        self.kinds = nn.Embedding(spec.kinds, width) if spec.kinds else None
        self.position, self.norm = spec.position.build(width), spec.norm.build(width)
        self.dropout = Dropout(spec.dropout)
        self.project = nn.Identity() if spec.width is None else nn.Linear(width, d_model)

    def forward(self, rows: Rows, places: Tensor) -> Tensor:
        x = look_up(self.tokens, rows.ids, "ids") * self.scale
        if self.kinds is None and rows.kinds is not None:
            raise BadInput("embed: this model has no token kinds, got some; leave kinds out")
        if self.kinds is not None:
            kinds = torch.zeros_like(rows.ids) if rows.kinds is None else rows.kinds
            x = x + look_up(self.kinds, kinds, "kinds")
        return self.project(self.dropout(self.norm(self.position.add(x, places))))


def look_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """table(ids); an id outside of the table is a fault that says which."""
    if torch.compiler.is_compiling() or ids.device.type != "cpu":
        return table(ids)
    try:
        return table(ids)
    except IndexError:
        bad = ids[(ids < 0) | (ids >= table.num_embeddings)][0]
        raise BadInput(
            f"embed: {what} must be from 0 to {table.num_embeddings - 1}, got {int(bad)}; "
            "use the tokenizer that belongs to this model"
        ) from None
