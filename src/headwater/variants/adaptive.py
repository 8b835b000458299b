"""Adaptive embeddings and adaptive softmax (Grave et al. 2017, Baevski and Auli 2019): narrow tables for rare words.

Words are sorted by frequency and cut into clusters. Cluster c has vectors of width / div**c, projected to d_model:

    cutoffs (2000, 10000)   [0, 2000) width      [2000, 10000) width / div      [10000, vocab) width / div²

    log p(word) = log p(word or cluster c | first cluster) + log p(word | cluster c)
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwater.core.base import EmbeddingSpec, HeadSpec, check_dropout, check_positive
from headwater.core.embeddings import InputEmbedding, ModelInputs, lookup
from headwater.core.modules import Dropout
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part


def _check_clusters(spec: AdaptiveEmbeddings | AdaptiveHead) -> None:
    check_positive(spec, "vocab", _("give the number of tokens"))
    check_positive(spec, "width", _("512 is usual"))
    check_positive(spec, "div", _("1 gives every cluster the same width"))
    edges = (0, *spec.cutoffs, spec.vocab)
    must(
        all(a < b for a, b in pairwise(edges)),
        spec,
        _("cutoffs must rise, between 0 and vocab ({vocab})", vocab=spec.vocab),
        spec.cutoffs,
        _("correct them"),
    )
    smallest = spec.width // spec.div ** len(spec.cutoffs)
    must(smallest >= 1, spec, _("div must leave a width for the last cluster"), spec.div, _("choose a smaller one"))


@part
class AdaptiveEmbeddings(EmbeddingSpec):
    """Adaptive input embeddings, times scale. width: of the first cluster; div: how much narrower each next one is."""

    vocab: int
    width: int
    cutoffs: tuple[int, ...] = ()
    div: int = 1
    scale: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_clusters(self)
        check_dropout(self)

    def build(self, d_model: int) -> InputEmbedding:
        return AdaptiveEmbeddingsLayer(self, d_model)


@part
class AdaptiveHead(HeadSpec):
    """Adaptive softmax: log-probabilities of all words, with the clusters of AdaptiveEmbeddings."""

    vocab: int
    width: int
    cutoffs: tuple[int, ...] = ()
    div: int = 1

    def __post_init__(self) -> None:
        _check_clusters(self)

    def build(self, d_model: int) -> nn.Module:
        return AdaptiveHeadLayer(self, d_model)


class ClusterProjection(nn.Module):
    """weight [D, width]: from the vectors of a cluster to d_model, and back by its transpose."""

    def __init__(self, width: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_model, width))

    def forward(self, vectors: Tensor) -> Tensor:
        """[.., width] -> [.., D]"""
        return vectors @ self.weight.mT

    def back(self, x: Tensor) -> Tensor:
        """[.., D] -> [.., width]"""
        return x @ self.weight


class Table(nn.Module):
    """weight [words, width], bias [words]: the output vectors of a cluster."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, width))
        self.bias = nn.Parameter(torch.empty(words))


class Clusters(NamedTuple):
    """What both layers have in common. edges: the first word of each cluster, and the one after its last.

    table_sizes: words and width of each table: one for all clusters where div is 1 (one_table). projects: whether the
    vectors have another width than d_model.
    """

    edges: list[tuple[int, int]]
    widths: list[int]
    table_sizes: list[tuple[int, int]]
    one_table: bool
    projects: bool

    @staticmethod
    def of(spec: AdaptiveEmbeddings | AdaptiveHead, d_model: int) -> Clusters:
        edges = list(pairwise((0, *spec.cutoffs, spec.vocab)))
        widths = [spec.width // spec.div**cluster for cluster in range(len(edges))]
        sizes = [(last - first, width) for (first, last), width in zip(edges, widths, strict=True)]
        one_table = spec.div == 1
        if one_table:
            sizes = [(spec.vocab, spec.width)]
        return Clusters(edges, widths, sizes, one_table, projects=not one_table or spec.width != d_model)


class AdaptiveEmbeddingsLayer(InputEmbedding):
    """The module of AdaptiveEmbeddings."""

    def __init__(self, spec: AdaptiveEmbeddings, d_model: int) -> None:
        super().__init__()
        self.spec = spec
        self.clusters = Clusters.of(spec, d_model)
        self.tables = nn.ModuleList(nn.Embedding(*size) for size in self.clusters.table_sizes)
        widths = [width for _words, width in self.clusters.table_sizes]
        self.projections = nn.ModuleList(
            ClusterProjection(width, d_model) for width in widths if self.clusters.projects
        )
        self.d_model = d_model
        self.dropout = Dropout(spec.dropout)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """ids [B, Q] -> [B, Q, D]"""
        if inputs.token_types is not None:
            raise BadInput(_("embed: this model has no token types, got some; leave token_types out"))
        ids = inputs.ids
        if self.clusters.one_table:
            table = self.tables[0]
            assert isinstance(table, nn.Embedding)
            return self.dropout(self._project(lookup(table, ids, "ids"), 0) * self.spec.scale)
        if not ids.is_meta and (bad := ids[(ids < 0) | (ids >= self.spec.vocab)]).numel():
            raise BadInput(
                _(
                    "embed: {name} must be from 0 to {max}, got {bad}; use the tokenizer that belongs to this model",
                    name="ids",
                    max=self.spec.vocab - 1,
                    bad=int(bad[0]),
                )
            )
        dtype = next(self.parameters()).dtype
        x = torch.zeros(*ids.shape, self.d_model, dtype=dtype, device=ids.device)
        for cluster, (first, last) in enumerate(self.clusters.edges):
            inside = (ids >= first) & (ids < last)
            table = self.tables[cluster]
            assert isinstance(table, nn.Embedding)
            vectors = table((ids - first).clamp(0, last - first - 1))
            x = x + self._project(vectors, cluster) * inside[..., None]
        return self.dropout(x * self.spec.scale)

    def _project(self, vectors: Tensor, cluster: int) -> Tensor:
        """[.., width of the cluster] -> [.., D]"""
        if not self.clusters.projects:
            return vectors
        projection = self.projections[cluster]
        assert isinstance(projection, ClusterProjection)
        return projection(vectors)


class AdaptiveHeadLayer(nn.Module):
    """The module of AdaptiveHead. clusters: the vectors of all clusters but the first, read beside its words."""

    def __init__(self, spec: AdaptiveHead, d_model: int) -> None:
        super().__init__()
        self.shape = Clusters.of(spec, d_model)
        self.tables = nn.ModuleList(Table(*size) for size in self.shape.table_sizes)
        self.projections = nn.ModuleList(
            ClusterProjection(w, d_model) for w in self.shape.widths if self.shape.projects
        )
        self.clusters = Table(len(spec.cutoffs), spec.width) if spec.cutoffs else None

    def forward(self, x: Tensor, inputs: ModelInputs) -> Tensor:
        """x [B, Q, D] -> log-probabilities [B, Q, vocab]"""
        weight, bias = self._words(0)
        if self.clusters is not None:
            weight = torch.cat((weight, self.clusters.weight))
            bias = torch.cat((bias, self.clusters.bias))
        first = nn.functional.linear(self._narrow(x, 0), weight, bias).log_softmax(-1)
        size = self.shape.edges[0][1]
        parts = [first[..., :size]]
        for cluster in range(1, len(self.shape.edges)):
            words = nn.functional.linear(self._narrow(x, cluster), *self._words(cluster)).log_softmax(-1)
            parts.append(words + first[..., size + cluster - 1 : size + cluster])
        return torch.cat(parts, -1)

    def _narrow(self, x: Tensor, cluster: int) -> Tensor:
        """[.., D] -> [.., width of the cluster]"""
        if not self.shape.projects:
            return x
        projection = self.projections[cluster]
        assert isinstance(projection, ClusterProjection)
        return projection.back(x)

    def _words(self, cluster: int) -> tuple[Tensor, Tensor]:
        """The output vectors and biases of a cluster's words."""
        table = self.tables[0 if self.shape.one_table else cluster]
        assert isinstance(table, Table)
        rows = slice(*self.shape.edges[cluster]) if self.shape.one_table else slice(None)
        return table.weight[rows], table.bias[rows]


def tied_clusters(embed: str, spec: AdaptiveHead, d_model: int) -> tuple[tuple[str, str], ...]:
    """Pairs for Model.tied: the tables of head and embedding, and their projections but for the first cluster."""
    tables = 1 if spec.div == 1 else len(spec.cutoffs) + 1
    pairs = [(f"head.tables.{i}", f"{embed}.tables.{i}") for i in range(tables)]
    if spec.div != 1 or spec.width != d_model:
        source = [0 if spec.div == 1 else i for i in range(len(spec.cutoffs) + 1)]
        pairs += [(f"head.projections.{i}", f"{embed}.projections.{source[i]}") for i in range(1, len(source))]
    return tuple(pairs)
