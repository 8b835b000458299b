"""Embeddings: token ids to vectors, with positions and token types; ModelInputs, the arguments of one forward pass.

Behind the embedding nothing knows what the input was: an image or a sound is a `signal` that its embedding turns into
vectors, one for each slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwater.core import functional
from headwater.core.base import EmbeddingSpec, NormSpec, PositionSpec, check_dropout, check_positive
from headwater.core.modules import Dropout
from headwater.core.norms import NoNorm
from headwater.core.positions import NoPosition
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must, part


@dataclass(frozen=True)
class ModelInputs:
    """The inputs of a stack, each [B, Q], B rows of Q tokens.

    attention_mask: True where a token is not padding. document_ids: 0 is padding, else the number of the document.
    positions: counted over the tokens of each row (or document) that are not padding, if not given.
    signal: the input of an embedding that does not read token ids; ids [B, Q] are then the numbers of its slots.
    global_tokens: True where a token sees all and is seen by all, in attention that is else local (Longformer).
    hidden_states [B, S, D]: set on the encoder output that the decoder reads.
    """

    ids: Tensor
    attention_mask: Tensor | None = None
    document_ids: Tensor | None = None
    positions: Tensor | None = None
    token_types: Tensor | None = None
    hidden_states: Tensor | None = None
    signal: Tensor | None = None
    global_tokens: Tensor | None = None

    @property
    def contiguous_mask(self) -> bool:
        """No padding between tokens, so positions differ as indices do. True while compiling or on the meta device."""
        if self.attention_mask is None or torch.compiler.is_compiling() or self.attention_mask.device.type == "meta":
            return True
        starts = self.attention_mask[:, 0] + (self.attention_mask[:, 1:] & ~self.attention_mask[:, :-1]).sum(1)
        return bool((starts <= 1).all())

    def positions_from(self, seen_tokens: Tensor | int) -> Tensor:
        """[B|1, Q] the positions; seen_tokens [B|1, 1] are in the KV cache already."""
        if self.positions is not None:
            return self.positions
        if self.document_ids is not None:
            return positions_within_documents(self.document_ids)
        if self.attention_mask is not None:
            return seen_tokens + (self.attention_mask.cumsum(1) - 1).clamp(min=0)
        return seen_tokens + torch.arange(self.ids.shape[1], device=self.ids.device)[None]


def positions_within_documents(document_ids: Tensor) -> Tensor:
    """[B, Q] the position of each token within its document: the distance to the start of the document."""
    index = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    is_start = torch.ones_like(document_ids, dtype=torch.bool)
    is_start[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - torch.where(is_start, index, 0).cummax(1).values


def longest_document(document_ids: Tensor) -> int | None:
    """The largest distance between two tokens of a document, by index, plus 1; None where values cannot be read."""
    if document_ids.is_meta or torch.compiler.is_compiling():
        return None
    numbers = document_ids.unique(return_inverse=True)[1]  # [B, Q] the same from 0, without gaps
    index = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    size = (len(numbers), int(numbers.max()) + 1)
    first = index.new_zeros(size).scatter_reduce(1, numbers, index, "amin", include_self=False)
    last = index.new_zeros(size).scatter_reduce(1, numbers, index, "amax", include_self=False)
    return int((last - first).max()) + 1


class InputEmbedding(nn.Module):
    """Base class of embeddings: read() checks the input of a stack, forward(inputs, positions) makes its vectors.

    Here the input is token ids; the embedding of images, sounds or several codebooks overrides read().
    """

    def read(self, x: Tensor, name: str) -> ModelInputs:
        """The input as ModelInputs: token ids [B, Q], checked for dtype and shape. name: what the caller calls it."""
        is_id_matrix = isinstance(x, Tensor) and x.dtype in (torch.int64, torch.int32) and x.dim() == 2
        if not is_id_matrix or not x.shape[1]:
            raise BadInput(
                _(
                    "model: {name} must be int64 or int32 [batch, length], got {got}; correct its type or shape",
                    name=name,
                    got=describe(x),
                )
            )
        return ModelInputs(x)

    def random_input(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Rows of random input, as read() takes it; here the first token."""
        return torch.zeros(rows, length, dtype=torch.int64)


def signal_inputs(signal: Tensor, slots: int) -> ModelInputs:
    """The inputs of a stack whose embedding makes `slots` vectors of each signal [B, …]."""
    ids = torch.arange(slots, device=signal.device).expand(signal.shape[0], slots)  # the numbers of the slots
    return ModelInputs(ids, signal=signal)


def describe(x: object) -> str:
    """The dtype and shape of a tensor, or the type of anything else, for an error."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


@part
class Embeddings(EmbeddingSpec):
    """Input embeddings: tokens(id) · scale + token_types(type) + position, then norm, dropout and a projection.

    scale is √d_model in Vaswani et al. 2017; only the token embedding is scaled, never the position. token_types: the
    number of token types (BERT's segments). width: of a factorized table (ALBERT), projected to d_model.
    """

    vocab: int
    position: PositionSpec = NoPosition()
    scale: float = 1.0
    token_types: int = 0
    norm: NormSpec = NoNorm()
    width: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "vocab", _("give the number of tokens"))
        check_positive(self, "width", _("leave it out for d_model"))
        check_dropout(self)
        applies_to = getattr(self.position, "applies_to", None)
        must(
            applies_to != "attention",
            self,
            _("position must act on the embedding"),
            self.position,
            _("give it to Attention"),
        )

    def build(self, d_model: int) -> InputEmbedding:
        return EmbeddingsLayer(self, d_model)


class EmbeddingsLayer(InputEmbedding):
    """The embedding tables, the norm and the projection of Embeddings."""

    def __init__(self, spec: Embeddings, d_model: int) -> None:
        super().__init__()
        width = spec.width or d_model
        self.scale = spec.scale
        self.tokens = nn.Embedding(spec.vocab, width)
        self.token_types = nn.Embedding(spec.token_types, width) if spec.token_types else None
        self.position = spec.position.build(width)
        self.norm = spec.norm.build(width)
        self.dropout = Dropout(spec.dropout)
        self.projection = nn.Identity() if spec.width is None else nn.Linear(width, d_model)

    def random_input(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """Random token ids [rows, length]."""
        return torch.randint(self.tokens.num_embeddings, (rows, length), generator=generator)

    def forward(self, inputs: ModelInputs, positions: Tensor) -> Tensor:
        """ids [B, Q] -> [B, Q, D]"""
        x = lookup(self.tokens, inputs.ids, "ids") * self.scale
        if self.token_types is None and inputs.token_types is not None:
            raise BadInput(_("embed: this model has no token types, got some; leave token_types out"))
        if self.token_types is not None:
            token_types = torch.zeros_like(inputs.ids) if inputs.token_types is None else inputs.token_types
            x = x + lookup(self.token_types, token_types, "token_types")
        return self.projection(self.dropout(self.norm(self.position.add(x, positions))))


def lookup(table: nn.Embedding, ids: Tensor, name: str) -> Tensor:
    """table(ids); an id outside of the table is a BadInput that names it."""
    try:
        return functional.embedding(ids, table)
    except IndexError:
        bad = ids[(ids < 0) | (ids >= table.num_embeddings)][0]
        raise BadInput(
            _(
                "embed: {name} must be from 0 to {max}, got {bad}; use the tokenizer that belongs to this model",
                name=name,
                max=table.num_embeddings - 1,
                bad=int(bad),
            )
        ) from None
