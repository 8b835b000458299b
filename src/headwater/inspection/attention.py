"""Attention weights of every layer and head, with their query and key tokens; and the alignment of a translation.

They arrive in chunks of queries (attention_weights.py) and are stored as exactly as the memory allows.
H heads, Q queries, S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from headwater.errors import BadInput, BadSetting, nearest
from headwater.i18n import _, join
from headwater.inspection.attention_weights import AttentionSite, capture_weights, select_sites
from headwater.inspection.inputs import ModelLike, TextLike, Token, TokenizedInput, tokenize_input
from headwater.inspection.results import InspectionResult, group_label, group_tokens, pool_by_group

MAX_WEIGHT_BYTES = 1 << 28  # of the stored weights


# -------------------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True, eq=False)
class AttentionMap:
    """The weights of one attention layer, [H, Q, S].

    dtype float32; of a long text uint8 in steps of 1/255, max-pooled over pool_size × pool_size if that is too large.
    """

    kind: str
    layer: int
    heads: tuple[int, ...]
    weights: np.ndarray
    pool_size: int = 1

    def head_weights(self, head: int | None = None) -> np.ndarray:
        """The weights [Q, S] of one head in float32; the mean over heads if head is None."""
        if head is None:
            return self._to_float(self.weights).mean(0)
        if head not in self.heads:
            raise BadSetting(
                _(
                    "attention: head {head} was not stored, only {heads}; request it with heads=",
                    head=head,
                    heads=list(self.heads),
                )
            )
        return self._to_float(self.weights[self.heads.index(head)])

    @staticmethod
    def _to_float(weights: np.ndarray) -> np.ndarray:
        return weights / np.float32(255) if weights.dtype == np.uint8 else weights

    def tile(
        self,
        head: int | None = None,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        size: int | None = None,
    ) -> np.ndarray:
        """Weights of query tokens rows[0]:rows[1] and key tokens columns[0]:columns[1] as uint8; 255 is a weight of 1.

        size: the maximum number of rows and of columns; a larger tile is max-pooled.
        """
        weights = self.head_weights(head)  # [Q, S]
        queries = _cell_range(rows, self.pool_size, weights.shape[0])
        keys = _cell_range(columns, self.pool_size, weights.shape[1])
        tile = weights[queries, keys]
        if size is not None and max(tile.shape) > size:
            tile = max_pool(torch.from_numpy(tile)[None], math.ceil(max(tile.shape) / size))[0].numpy()
        return to_uint8(tile)


def _cell_range(span: tuple[int, int] | None, pool_size: int, num_cells: int) -> slice:
    """The cells of a range of tokens."""
    if span is None:
        return slice(0, num_cells)
    return slice(span[0] // pool_size, min(num_cells, -(-span[1] // pool_size)))


def to_uint8(weights: np.ndarray) -> np.ndarray:
    """Weights quantized to steps of 1/255; NaN becomes 0."""
    return np.rint(np.nan_to_num(weights) * 255).astype(np.uint8)


def max_pool(weights: Tensor, size: int) -> Tensor:
    """Max pooling: [H, Q, S] -> [H, ⌈Q/size⌉, ⌈S/size⌉]."""
    return nn.functional.max_pool2d(weights, size, ceil_mode=True) if size > 1 else weights


@dataclass(frozen=True, eq=False)
class AttentionMaps(InspectionResult):
    """Attention maps, one for each selected layer and kind. precision: how exactly the weights are stored."""

    tokens: tuple[Token, ...]
    source: tuple[Token, ...]
    maps: tuple[AttentionMap, ...]
    precision: str
    inputs: TokenizedInput = field(repr=False)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map.kind for map in self.maps))

    def get_map(self, kind: str, layer: int) -> AttentionMap:
        """The map of one kind and layer."""
        result = next((m for m in self.maps if (m.kind, m.layer) == (kind, layer)), None)
        if result is None:
            known = [f"{m.kind} {m.layer}" for m in self.maps]
            raise BadSetting(
                _(
                    "attention: {kind} {layer} was not stored; {nearest}",
                    kind=kind,
                    layer=layer,
                    nearest=nearest(f"{kind} {layer}", known),
                )
            )
        return result

    def query_key_tokens(self, kind: str) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
        """The tokens of the queries (rows) and of the keys (columns)."""
        return query_key_tokens(self.inputs, kind)

    def lines(self) -> list[str]:
        layers = [
            _("{kind}: {maps} layers", kind=kind, maps=sum(m.kind == kind for m in self.maps)) for kind in self.kinds
        ]
        return [
            _(
                "{layers}; {num_tokens} tokens; weights {precision}",
                layers=join(", ", layers),
                num_tokens=len(self.tokens),
                precision=self.precision,
            )
        ]


def query_key_tokens(inputs: TokenizedInput, kind: str) -> tuple[tuple[Token, ...], tuple[Token, ...]]:
    """The tokens of the queries and of the keys of a kind of attention."""
    in_encoder = kind.startswith("encoder.") and inputs.source
    queries = inputs.source if in_encoder else inputs.tokens
    keys = inputs.source if kind == "decoder.cross_attn" else queries
    return queries, keys


class _WeightStore:
    """Stores weights as exactly as max_bytes allows: float32, uint8, or max-pooled uint8."""

    def __init__(
        self, inputs: TokenizedInput, sites: Sequence[AttentionSite], heads: Sequence[int] | None, max_bytes: int
    ) -> None:
        self.heads = {site: [h for h in range(site.heads) if heads is None or h in heads] for site in sites}
        self.shapes = {site: [len(side) for side in query_key_tokens(inputs, site.kind)] for site in sites}  # [Q, S]
        num_weights = sum(len(self.heads[site]) * math.prod(self.shapes[site]) for site in sites)
        self.exact = 4 * num_weights <= max_bytes
        self.pool_size = max(1, math.ceil(math.sqrt(num_weights / max_bytes)))
        self.dtype = torch.float32 if self.exact else torch.uint8
        self.weights: dict[AttentionSite, Tensor] = {}
        self.pending_rows: Tensor | None = None  # queries that do not fill a pooling window yet

    @property
    def precision(self) -> str:
        """How exactly the weights are stored, as a message."""
        if self.exact:
            return _("exact")
        pooled = _(", pooled by {pooled}", pooled=self.pool_size) if self.pool_size > 1 else ""
        return _("in steps of 1/255{what}", what=pooled)

    def add(self, site: AttentionSite, first: int, weights: Tensor) -> None:
        """Store weights [H, queries, S], from query `first` on."""
        q_cells, k_cells = (-(-n // self.pool_size) for n in self.shapes[site])
        stored = self.weights.setdefault(site, torch.zeros(len(self.heads[site]), q_cells, k_cells, dtype=self.dtype))
        weights = weights[self.heads[site]]
        if self.pending_rows is not None:
            first -= self.pending_rows.shape[1]
            weights = torch.cat((self.pending_rows, weights), 1)

        # only full pooling windows, except at the end
        num_rows = weights.shape[1]
        if first + num_rows < self.shapes[site][0]:
            num_rows = num_rows // self.pool_size * self.pool_size
        self.pending_rows = weights[:, num_rows:] if num_rows < weights.shape[1] else None
        if num_rows:
            pooled = max_pool(weights[:, :num_rows], self.pool_size)
            start = first // self.pool_size
            cells = pooled if self.exact else (pooled * 255).round().to(torch.uint8)
            stored[:, start : start + pooled.shape[1]] = cells

    def maps(self) -> tuple[AttentionMap, ...]:
        """The stored weights as maps."""
        return tuple(
            AttentionMap(site.kind, site.layer, tuple(self.heads[site]), weights.numpy(), self.pool_size)
            for site, weights in self.weights.items()
        )


def attention_maps(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    max_bytes: int = MAX_WEIGHT_BYTES,
) -> AttentionMaps:
    """The attention weights of every layer and head, or of the selected ones, in at most max_bytes of memory."""
    inputs = tokenize_input(model, text, target)
    store = _WeightStore(inputs, select_sites(inputs.model, kinds, layers, heads), heads, max_bytes)
    capture_weights(inputs, list(store.heads), store.add)
    return AttentionMaps(inputs.tokens, inputs.source, store.maps(), store.precision, inputs)


# ----------------------------------------------------------------------------------------------------------- alignment


@dataclass(frozen=True, eq=False)
class Alignment(InspectionResult):
    """Cross-attention while each target token was predicted: weights [T, S], the mean over heads and layers.

    A character of several tokens is one row or one column.
    """

    target: tuple[str, ...]
    source: tuple[str, ...]
    weights: np.ndarray
    generated: bool

    def lines(self) -> list[str]:
        best = self.weights.argmax(1)
        pairs = (f"{token} ← {self.source[position]}" for token, position in zip(self.target, best, strict=True))
        return [_("target ← source with the highest weight: {pairs}", pairs="   ".join(pairs))]


def alignment(
    model: ModelLike, text: TextLike, target: str | Iterable[int] | None = None, *, layers: Sequence[int] | None = None
) -> Alignment:
    """The mean cross-attention of a translation; row i is that of the query which predicts target token i."""
    inputs = tokenize_input(model, text, target)
    if not inputs.source:
        raise BadInput(_("alignment: the model must be an encoder-decoder, this one has one stack; use attention_maps"))
    sites = select_sites(inputs.model, ["decoder.cross_attn"], layers)
    mean = torch.zeros(len(inputs.tokens), len(inputs.source))

    def add(site: AttentionSite, first: int, weights: Tensor) -> None:
        mean[first : first + weights.shape[1]] += weights.mean(0) / len(sites)

    capture_weights(inputs, sites, add)

    # tokens of one character become one row or column
    rows = group_tokens(inputs.next_tokens)
    columns = group_tokens(inputs.source)
    return Alignment(
        target=tuple(group_label(inputs.next_tokens, group) for group in rows),
        source=tuple(group_label(inputs.source, group) for group in columns),
        weights=pool_by_group(mean.numpy(), rows, columns),
        generated=inputs.generated,
    )
