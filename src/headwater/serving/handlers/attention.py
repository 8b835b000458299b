"""Handlers for attention weights: one forward pass per text, then thumbnails, tiles and exact blocks on demand.

A forward pass over 1,000 tokens produces a gigabyte of weights in a small model, so at most MAX_CACHED_BYTES are
cached. An evicted layer is recomputed on demand. Weights as uint8: 0 is exactly zero, 255 the largest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.errors import BadInput, Unavailable, nearest
from headwater.i18n import _
from headwater.inspection.attention import query_key_tokens
from headwater.inspection.attention_weights import AttentionSite, attention_sites, capture_weights
from headwater.inspection.head_patterns import MEASURES, PATTERNS, HeadPattern, PatternStats
from headwater.inspection.inputs import TokenizedInput
from headwater.inspection.results import to_jsonable
from headwater.serving.errors import Expired

MAX_CACHED_BYTES = 256 << 20
MAX_TRACES = 8
THUMBNAIL_SIZE = 28
TILE_SIZE = 256
MAX_BLOCK_VALUES = 1 << 16
LOCAL_DISTANCE = 4  # tokens: a head with a smaller mean distance is local


@dataclass(frozen=True, eq=False)
class HeadlessInput(TokenizedInput):
    """An input whose forward pass ends at the hidden states: logits over the vocabulary would cost more."""

    def forward(self) -> Any:
        with torch.inference_mode():
            return self.hidden_states()


@dataclass
class AttentionGroup:
    """All attention layers of one kind: largest weight, pattern and thumbnail of each layer and head."""

    shape: tuple[int, int, int]  # heads, queries, keys
    sites: list[AttentionSite]
    max_weights: list[list[float]]
    patterns: list[list[dict[str, Any]]]
    thumbnails: list[Tensor]

    def to_dict(self) -> dict[str, Any]:
        heads, queries, keys = self.shape
        return {
            "layers": len(self.sites),
            "heads": heads,
            "queries": queries,
            "keys": keys,
            "thumbnail_size": [min(queries, THUMBNAIL_SIZE), min(keys, THUMBNAIL_SIZE)],
            "max_weights": self.max_weights,
            "patterns": self.patterns,
        }


class AttentionTrace:
    """The attention of one forward pass: summaries of all heads, and weights that are cached or recomputed."""

    def __init__(self, trace_id: str, inputs: TokenizedInput) -> None:
        self.trace_id = trace_id
        self.inputs = HeadlessInput(**vars(inputs))
        self.kinds: dict[str, AttentionGroup] = {}
        self.cached_weights: OrderedDict[AttentionSite, Tensor] = OrderedDict()
        self._capture(attention_sites(inputs.model), first_pass=True)
        if not self.kinds:
            raise Unavailable(
                _("this model's attention has no weights to show: it never computes the attention matrix")
            )

    def _capture(self, sites: list[AttentionSite], first_pass: bool = False) -> None:
        """Run one forward pass. The rows of a layer arrive in chunks; it is cached after the last chunk."""
        stats: dict[AttentionSite, PatternStats] = {}
        chunks: dict[AttentionSite, list[Tensor]] = {}

        def receive(site: AttentionSite, first_row: int, weights: Tensor) -> None:  # weights: [H, rows, S]
            stats.setdefault(site, PatternStats(self.inputs, site)).update(first_row, weights)
            chunks.setdefault(site, []).append(weights.clone())
            num_queries = len(query_key_tokens(self.inputs, site.kind)[0])
            if first_row + weights.shape[1] == num_queries:
                layer_weights = torch.cat(chunks.pop(site), 1)  # [H, Q, S]
                if first_pass:
                    self._describe(site, layer_weights, stats[site])
                self._cache_weights(site, layer_weights)

        capture_weights(self.inputs, sites, receive)

    def _describe(self, site: AttentionSite, weights: Tensor, stats: PatternStats) -> None:
        """Add the largest weight, the pattern and the thumbnail of each head of a layer [H, Q, S]."""
        heads, queries, keys = weights.shape
        group = self.kinds.setdefault(site.kind, AttentionGroup((heads, queries, keys), [], [], [], []))
        group.sites.append(site)
        group.max_weights.append(weights.amax((1, 2)).tolist())
        group.patterns.append([_head_dict(head) for head in stats.compute()])
        size = (min(queries, THUMBNAIL_SIZE), min(keys, THUMBNAIL_SIZE))
        pooled = F.adaptive_max_pool2d(weights[None], size)[0]
        group.thumbnails.append(torch.stack([to_uint8(head, float(head.max()), 0.5) for head in pooled]))

    def _cache_weights(self, site: AttentionSite, weights: Tensor) -> None:
        self.cached_weights[site] = weights
        while len(self.cached_weights) > 1 and self._cached_bytes() > MAX_CACHED_BYTES:
            self.cached_weights.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(weights.numel() * 4 for weights in self.cached_weights.values())

    def layer_weights(self, kind: str, layer: int) -> Tensor:
        """Weights of one layer [H, Q, S], recomputed if they were evicted."""
        if kind not in self.kinds:
            raise BadInput(
                _(
                    "this model has no attention {kind!r}; {nearest}",
                    kind=kind[:40],
                    nearest=nearest(kind, self.kinds),
                    kinds="、".join(self.kinds),
                )
            )
        sites = self.kinds[kind].sites
        if not 0 <= layer < len(sites):
            raise BadInput(
                _("{kind} has {num_layers} layers, got {layer}", kind=kind, num_layers=len(sites), layer=layer)
            )
        site = sites[layer]
        if site not in self.cached_weights:
            self._capture([site])
        self.cached_weights.move_to_end(site)
        return self.cached_weights[site]

    def head_weights(self, kind: str, layer: int, head: int) -> Tensor:
        """Weights of one head [Q, S]; head -1 is the mean over heads, -2 the maximum."""
        weights = self.layer_weights(kind, layer)
        if not -2 <= head < len(weights):
            raise BadInput(_("{kind} has {num_heads} heads, got {head}", kind=kind, num_heads=len(weights), head=head))
        if head == -1:
            return weights.mean(0)
        if head == -2:
            return weights.amax(0)
        return weights[head]

    def block(self, kind: str, layer: int, head: int, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        """A block of float32 weights; rows and columns are [first, end)."""
        if (rows[1] - rows[0]) * (columns[1] - columns[0]) > MAX_BLOCK_VALUES:
            raise BadInput(_("a block may have {limit} values; request fewer rows or columns", limit=MAX_BLOCK_VALUES))
        return self.head_weights(kind, layer, head)[slice(*rows), slice(*columns)]

    def tile(self, kind: str, layer: int, head: int, level: int, row: int, column: int, power: float) -> Tensor:
        """One uint8 tile [≤ TILE_SIZE, ≤ TILE_SIZE]; at level n a cell is the maximum of 2ⁿ × 2ⁿ weights."""
        weights = self.head_weights(kind, layer, head)
        size = TILE_SIZE << level
        tile = weights[row * size : (row + 1) * size, column * size : (column + 1) * size]
        if not tile.numel():
            raise BadInput(_("there is no tile {row}, {column} at level {level}", row=row, column=column, level=level))
        if level:
            tile = F.max_pool2d(tile[None, None], 1 << level, ceil_mode=True)[0, 0]
        return to_uint8(tile, float(weights.max()), power)

    def to_dict(self) -> dict[str, Any]:
        return {
            "trace_id": self.trace_id,
            "tokens": token_dicts(self.inputs.tokens),
            "source": token_dicts(self.inputs.source),
            "next_tokens": token_dicts(self.inputs.next_tokens),
            "generated": self.inputs.generated,
            "kinds": {name: group.to_dict() for name, group in self.kinds.items()},
        }


def _head_dict(head: HeadPattern) -> dict[str, Any]:
    """The measures of a head, and its pattern: the measure that decided it, else local or mixed."""
    measures = {name: to_jsonable(getattr(head, name)) for name in MEASURES}
    pattern = "local" if head.distance < LOCAL_DISTANCE else "mixed"  # cross-attention has no distance: NaN
    for name, (_threshold, description) in PATTERNS.items():
        if description == head.pattern:
            pattern = name
            break
    return {**measures, "pattern": pattern}


def to_uint8(weights: Tensor, max_weight: float, power: float) -> Tensor:
    """round(255 · (w / max_weight) ^ power), but 0 only for exact zeros, so that a tiny weight differs from zero.

    >>> to_uint8(torch.tensor([0.0, 1e-9, 0.5, 1.0]), 1.0, 1.0).tolist()
    [0, 1, 128, 255]
    """
    relative = weights / max_weight if max_weight > 0 else weights
    scaled = 255 * relative.clamp(0, 1) ** power
    return torch.where(weights > 0, scaled.round().clamp(1, 255), 0).to(torch.uint8)


def token_dicts(tokens: Any) -> list[dict[str, Any]]:
    """Tokens as JSON: id, text, axis label, and the number of tokens of its character."""
    return [{"id": t.id, "text": t.text, "label": t.label, "num_pieces": t.num_pieces} for t in tokens]


class TraceCache:
    """LRU cache of traces by a hash of model and tokens: the same text on the same model is traced once."""

    def __init__(self) -> None:
        self.traces: OrderedDict[str, AttentionTrace] = OrderedDict()

    def get_or_create(self, model_key: tuple[Any, ...], inputs: TokenizedInput) -> AttentionTrace:
        """The trace of these tokens on a model, from the cache or computed."""
        ids = ([t.id for t in inputs.tokens], [t.id for t in inputs.source])
        trace_id = hashlib.sha256(repr((model_key, ids)).encode()).hexdigest()[:20]
        if trace_id not in self.traces:
            self.traces[trace_id] = AttentionTrace(trace_id, inputs)
            while len(self.traces) > MAX_TRACES:
                self.traces.popitem(last=False)
        self.traces.move_to_end(trace_id)
        self._drop_old_weights()
        return self.traces[trace_id]

    def _drop_old_weights(self) -> None:
        """Drop the weights of all traces but the last; their thumbnails stay."""
        for trace in list(self.traces.values())[:-1]:
            trace.cached_weights.clear()

    def get(self, trace_id: str) -> AttentionTrace:
        if trace_id not in self.traces:
            raise Expired(_("this trace has expired; it is computed again"))
        return self.traces[trace_id]
