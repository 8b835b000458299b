"""Codes of several codebooks as one embedding, with a head for each codebook: the tokens of sound codecs.

codes [B, Q, K] ── table 0 (code 0) + … + table K-1 (code K-1) ── + position ── dropout ── [B, Q, D]
[B, Q, D] ── head 0 … head K-1 ── logits [B, Q, K, vocab]

A model may read the first codebooks alone, and predict the last of those it reads (Bark's fine model).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from headwater.core.base import EmbeddingSpec, HeadSpec, PositionSpec, check_dropout, check_positive
from headwater.core.embeddings import (
    Embeddings,
    EmbeddingsLayer,
    InputEmbedding,
    ModelInputs,
    describe,
    lookup,
    signal_inputs,
)
from headwater.core.modules import Dropout
from headwater.core.positions import NoPosition
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part

MAX_BOOKS = 256


@part
class Codes(EmbeddingSpec):
    """Embedding of codes [B, Q, K]: the sum of a row of each codebook's table. K may be smaller than books."""

    books: int
    vocab: int
    position: PositionSpec = NoPosition()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_books(self, self.books)
        check_positive(self, "vocab", _("give the number of codes of a codebook"))
        check_dropout(self)
        applies_to = getattr(self.position, "applies_to", None)
        acts = applies_to != "attention"
        must(acts, self, _("position must act on the embedding"), self.position, _("give it to Attention"))

    def build(self, d_model: int) -> CodesLayer:
        return CodesLayer(self, d_model)


class CodesLayer(InputEmbedding):
    """The tables of Codes, one for each codebook."""

    def __init__(self, spec: Codes, d_model: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(spec.vocab, d_model) for _ in range(spec.books))
        self.position = spec.position.build(d_model)
        self.dropout = Dropout(spec.dropout)

    def read(self, x: Tensor, name: str) -> ModelInputs:
        """Codes [B, Q, K] of the first K codebooks."""
        is_integer = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32)
        if not is_integer or x.dim() != 3 or not x.shape[1] or not 1 <= x.shape[2] <= len(self.tables):
            raise BadInput(
                _(
                    "model: {name} must be int64 or int32 [batch, length, 1 to {books} codebooks], got {got}; "
                    "correct its type or shape",
                    name=name,
                    books=len(self.tables),
                    got=describe(x),
                )
            )
        return signal_inputs(x, x.shape[1])

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """codes [B, Q, K] -> [B, Q, D]"""
        assert inputs.signal is not None
        codes = inputs.signal.unbind(-1)  # K of [B, Q]
        tables = cast(Iterable[nn.Embedding], self.tables)
        vectors = [lookup(table, book, "codes") for table, book in zip(tables, codes, strict=False)]
        return self.dropout(self.position.add(torch.stack(vectors).sum(0), positions))


@part
class SummedPairs(Embeddings):
    """Embeddings of ids [B, Q], or of pairs of ids [B, Q, 2] whose rows are added (Bark: a text and a voice)."""

    def build(self, d_model: int) -> SummedPairsLayer:
        return SummedPairsLayer(self, d_model)


class SummedPairsLayer(EmbeddingsLayer):
    """One table, read once or twice."""

    def read(self, x: Tensor, name: str) -> ModelInputs:
        """Ids [B, Q], or pairs [B, Q, 2]."""
        is_pairs = isinstance(x, Tensor) and x.dim() == 3 and x.shape[2] == 2
        inputs = super().read(x[..., 0] if is_pairs else x, name)
        return signal_inputs(x, x.shape[1]) if is_pairs else inputs

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """ids [B, Q] or pairs [B, Q, 2] -> [B, Q, D]"""
        if inputs.signal is None:
            return super().forward(inputs, positions)
        first, second = (lookup(self.tokens, ids, "ids") * self.scale for ids in inputs.signal.unbind(-1))
        return self.projection(self.dropout(self.norm(self.position.add(first + second, positions))))


# --------------------------------------------------------------------------------------------------------------- heads


@part
class CodeHeads(HeadSpec):
    """A head for each codebook: logits [B, Q, K, vocab]."""

    books: int
    vocab: int

    def __post_init__(self) -> None:
        _check_books(self, self.books)
        check_positive(self, "vocab", _("give the number of codes of a codebook"))

    def build(self, d_model: int) -> nn.Module:
        return CodeHeadsLayer(self, d_model)


class CodeHeadsLayer(nn.Module):
    """The matrices of CodeHeads."""

    def __init__(self, spec: CodeHeads, d_model: int) -> None:
        super().__init__()
        self.books = nn.ModuleList(nn.Linear(d_model, spec.vocab, bias=False) for _ in range(spec.books))

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        return torch.stack([head(x) for head in self.books], 2)


@part
class LastCodeHead(HeadSpec):
    """Logits [B, Q, vocab] of the last codebook that was read, by a head of its own (Bark's fine model).

    num_given: codebooks that are never predicted; the heads are those of the others, up to `books`.
    """

    books: int
    vocab: int
    num_given: int = 1

    def __post_init__(self) -> None:
        _check_books(self, self.books)
        check_positive(self, "vocab", _("give the number of codes of a codebook"))
        must(
            0 < self.num_given < self.books,
            self,
            _("num_given must be from 1 and below books"),
            self.num_given,
            _("1 is usual"),
        )

    def build(self, d_model: int) -> nn.Module:
        return LastCodeHeadLayer(self, d_model)


class LastCodeHeadLayer(nn.Module):
    """The matrices of LastCodeHead; books.0 is that of the first codebook that is not given."""

    def __init__(self, spec: LastCodeHead, d_model: int) -> None:
        super().__init__()
        self.num_given = spec.num_given
        self.books = nn.ModuleList(
            nn.Linear(d_model, spec.vocab, bias=False) for _ in range(spec.books - spec.num_given)
        )

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        book = 0 if inputs.signal is None else inputs.signal.shape[-1] - 1
        if book < self.num_given:
            raise BadInput(
                _(
                    "model: it predicts the last codebook it reads, which must be codebook {first} or a later one "
                    "(counted from 1), got {got}; give it a value for that codebook",
                    first=self.num_given + 1,
                    got=book + 1,
                )
            )
        return self.books[book - self.num_given](x)


def _check_books(spec: object, books: int) -> None:
    must(
        0 < books <= MAX_BOOKS,
        spec,
        _("books must be from 1 to {limit}", limit=MAX_BOOKS),
        books,
        _("4 and 8 are usual"),
    )
