"""Hierarchical reading: a long text in chunks, then a small stack over one summary of each chunk.

    tokens      a b c d | e f g h | i j .       each chunk alone through the layers of the stack
    summaries      s1   |    s2   |   s3        the mean of each chunk, through the layers of `top`
    output      a b c d + s1 | e f g h + s2     each token with the summary of its chunk, which has seen the others

Cost O(n · chunk + (n / chunk)²) instead of O(n²). For encoders: a token sees its own chunk, and the others through
their summaries. The output has one vector per token, so every head fits.

    spec = hierarchical(headwater.encoder(8000), chunk=128, layers=2)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.base import BlockSpec, EmbeddingSpec, PositionSpec, check_positive
from headwater.core.cache import KVCache, NoCache
from headwater.core.embeddings import InputEmbedding, ModelInputs, signal_inputs
from headwater.core.model import Model
from headwater.core.positions import Sinusoidal
from headwater.core.stack import Stack, TransformerStack
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part


@part
class HierarchicalStack(Stack):
    """A stack that reads chunks, and `top` layers over their summaries. top_position: of the chunks."""

    chunk: int = 128
    top: tuple[BlockSpec, ...] = ()
    top_position: PositionSpec = Sinusoidal()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "chunk", _("128 is usual"))
        must(bool(self.top), self, _("top must have a layer"), self.top, _("2 are usual"))
        must(
            getattr(self.top_position, "applies_to", None) != "attention",
            self,
            _("top_position must act on the embedding"),
            self.top_position,
            _("Sinusoidal() or Learned(chunks)"),
        )

    @property
    def max_positions(self) -> int | None:
        """Positions are counted within a chunk; the position encoding of the chunks may have a limit."""
        chunks = self.top_position.max_positions
        return None if chunks is None else chunks * self.chunk

    def build(self) -> TransformerStack:
        return HierarchicalTransformerStack(self)


@dataclass(frozen=True)
class Chunks:
    """A row as chunks: tokens with ids and attention_mask [B · C, chunk], padded on the right; present [B, C]: not all
    padding.
    """

    tokens: ModelInputs
    present: Tensor

    @staticmethod
    def of(inputs: ModelInputs, size: int) -> Chunks:
        mask = inputs.attention_mask
        if mask is None:
            mask = torch.ones_like(inputs.ids, dtype=torch.bool)
        missing = -inputs.ids.shape[1] % size

        def cut(x: Tensor) -> Tensor:
            return F.pad(x, (0, missing)).unflatten(1, (-1, size)).flatten(0, 1)  # [B · C, chunk]

        types = None if inputs.token_types is None else cut(inputs.token_types)
        tokens = ModelInputs(cut(inputs.ids), cut(mask), token_types=types)
        return Chunks(tokens, F.pad(mask, (0, missing)).unflatten(1, (-1, size)).any(2))


class HierarchicalTransformerStack(TransformerStack):
    """The module of HierarchicalStack. top: the stack over the summaries."""

    spec: HierarchicalStack

    def __init__(self, spec: HierarchicalStack) -> None:
        super().__init__(spec)
        embed = SummaryEmbeddings(spec.top_position)
        self.top = Stack(spec.d_model, embed, spec.top, spec.final_norm, dropout=spec.dropout).build()

    def forward(self, inputs: ModelInputs, cache: KVCache, memory: ModelInputs | None = None) -> Tensor:
        """The hidden states [B, Q, D]: of each token, plus those of its chunk."""
        self._check(inputs, cache, memory)
        rows, length = inputs.ids.shape
        chunks = Chunks.of(inputs, self.spec.chunk)
        tokens = super().forward(chunks.tokens, NoCache())  # [B · C, chunk, D]

        # the mean of each chunk, and what the chunks say to each other
        mask = chunks.tokens.attention_mask
        assert mask is not None
        weights = mask[..., None].to(tokens.dtype)
        means = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1)
        means = means.unflatten(0, (rows, -1))  # [B, C, D]
        summaries = self.top(replace(signal_inputs(means, means.shape[1]), attention_mask=chunks.present), NoCache())

        states = tokens.unflatten(0, (rows, -1)) + summaries[:, :, None]  # [B, C, chunk, D]
        return states.flatten(1, 2)[:, :length]

    def _check(self, inputs: ModelInputs, cache: KVCache, memory: ModelInputs | None) -> None:
        """Refuse what chunks cannot honour."""
        mask = inputs.attention_mask
        left = mask is not None and not mask.is_meta and not bool(mask[:, 0].all())
        refused = {
            _("a KV cache"): cache.spec is not None,
            _("a source"): memory is not None,
            _("packed documents"): inputs.document_ids is not None,
            _("positions of the call"): inputs.positions is not None,
            _("global tokens"): inputs.global_tokens is not None,
            _("padding on the left"): left,
        }
        for what, present in refused.items():
            if present:
                raise BadInput(
                    _(
                        "HierarchicalStack cannot be used with {what}, for it cuts rows into chunks from their start; "
                        "pad on the right, and read one document a row with an encoder",
                        what=what,
                    )
                )


@part
class SummaryEmbeddings(EmbeddingSpec):
    """The summaries of the chunks, with the positions of the chunks."""

    position: PositionSpec

    def build(self, d_model: int) -> InputEmbedding:
        return SummaryEmbeddingsLayer(self, d_model)


class SummaryEmbeddingsLayer(InputEmbedding):
    """The module of SummaryEmbeddings."""

    def __init__(self, spec: SummaryEmbeddings, d_model: int) -> None:
        super().__init__()
        self.position = spec.position.build(d_model)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """summaries [B, C, D] -> [B, C, D]"""
        assert inputs.signal is not None
        return self.position.add(inputs.signal, positions)


def hierarchical(model: Model, chunk: int = 128, layers: int = 2) -> Model:
    """The same encoder, reading in chunks, with `layers` more of its last layer over the summaries."""
    encoder = model.encoder
    must(
        encoder is not None and model.decoder is None,
        "hierarchical",
        _("the model must be an encoder"),
        None,
        _("use encoder()"),
    )
    assert encoder is not None
    plain = (encoder.d_model, encoder.embed, encoder.layers, encoder.final_norm, encoder.order, encoder.dropout)
    return replace(model, encoder=HierarchicalStack(*plain, chunk=chunk, top=encoder.layers[-1:] * layers))
