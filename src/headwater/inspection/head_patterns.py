"""Attention head patterns: measures of previous-token, induction, duplicate-token and attention-sink heads.

P [Q, S] are the weights of one head: rows are queries, columns are keys. In a causal model row 0 has only one key, so
means are over the rows from 1 on.

    diagonal    mean P[i, i]          previous    mean P[i, i-1]        next    mean P[i, i+1], rows from 0
    first       mean P[i, 0]          last        mean P[i, S-1]
    duplicate   mean weight on equal tokens elsewhere, beyond what those columns get from every row
    induction   the same for the token after an earlier equal token (Olsson and others, 2022)
    max_column  the largest mean weight of any column
    entropy     mean -Σ P ln P        normalized_entropy    mean entropy / ln(number of visible keys)
    distance    mean Σ P |i - j|      max_weight    mean of each row's largest weight
    monotonicity  correlation of a row with the mean column it attends to (cross-attention)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headwater.i18n import _
from headwater.inspection.attention import query_key_tokens
from headwater.inspection.attention_weights import AttentionSite, capture_weights, select_sites
from headwater.inspection.inputs import ModelLike, TextLike, TokenizedInput, tokenize_input
from headwater.inspection.results import InspectionResult

UNDEFINED = math.nan  # a measure without cells: induction without repeated tokens, distance in cross-attention


@dataclass(frozen=True)
class HeadPattern:
    """The measures of one head (see the top of the file), and its pattern as a message."""

    kind: str
    layer: int
    head: int
    diagonal: float
    previous: float
    next: float
    first: float
    last: float
    duplicate: float
    induction: float
    max_column: float
    entropy: float
    normalized_entropy: float
    distance: float
    max_weight: float
    monotonicity: float
    pattern: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.layer}.{self.head}"


MEASURES = tuple(f.name for f in fields(HeadPattern) if f.type == "float")
PATTERNS = {  # measure -> its threshold and the pattern; the first threshold that is reached decides
    "previous": (0.4, _("attends to the previous token")),
    "next": (0.4, _("attends to the next token")),
    "diagonal": (0.5, _("attends to itself")),
    "induction": (0.3, _("attends to the token after an earlier copy of the same token (induction)")),
    "duplicate": (0.4, _("attends to the same token elsewhere")),
    "first": (0.5, _("attention sink on the first token")),
    "last": (0.5, _("attention sink on the last token")),
    "max_column": (0.5, _("attention sink on one token")),
    "monotonicity": (0.9, _("monotonic alignment with the source")),
    "normalized_entropy": (0.9, _("uniform attention")),
    "max_weight": (0.6, _("peaked on single tokens")),
}
SINK_MEASURES = ("first", "last", "max_column", "normalized_entropy")  # their patterns are listed last
LOCAL_PATTERN = _("local attention")
MIXED_PATTERN = _("mixed attention")


def describe_pattern(measures: dict[str, float]) -> str:
    """The pattern of a head as a message."""
    for name, (threshold, pattern) in PATTERNS.items():
        if measures[name] >= threshold:
            return pattern
    distance = measures["distance"]
    if distance < 4:
        return _("local attention, {distance:.1f} tokens away on average", distance=distance)
    return MIXED_PATTERN


def _without_distance(pattern: str) -> str:
    """The pattern without the distance, which differs from head to head."""
    return LOCAL_PATTERN if pattern.startswith(LOCAL_PATTERN) else pattern


@dataclass(frozen=True, eq=False)
class HeadPatterns(InspectionResult):
    """The patterns of all heads of a model on a text."""

    heads: tuple[HeadPattern, ...]

    def find(self, kind: str, layer: int, head: int) -> HeadPattern:
        return next(h for h in self.heads if (h.kind, h.layer, h.head) == (kind, layer, head))

    def notable_heads(self, max_heads: int = 6) -> list[HeadPattern]:
        """The strongest head of each pattern; attention sinks come last."""
        strongest: dict[str, HeadPattern] = {}
        for head in sorted(self.heads, key=pattern_strength, reverse=True):
            strongest.setdefault(_without_distance(head.pattern), head)
        sinks = [PATTERNS[measure][1] for measure in SINK_MEASURES]
        others = [pattern for _, pattern in PATTERNS.values() if pattern not in sinks]
        order: list[str] = [*others, LOCAL_PATTERN, MIXED_PATTERN, *sinks]
        return sorted(strongest.values(), key=lambda head: order.index(_without_distance(head.pattern)))[:max_heads]

    def pattern_counts(self) -> dict[str, int]:
        """The number of heads of each pattern, the most frequent first."""
        counts = Counter(_without_distance(head.pattern) for head in self.heads)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def lines(self) -> list[str]:
        heads = [f"  {head.name:<23}  {head.pattern} ({pattern_strength(head):.0%})" for head in self.notable_heads()]
        return [_("notable heads"), *heads]


def pattern_strength(head: HeadPattern) -> float:
    """The measure that decided the pattern of the head."""
    for name, (_threshold, pattern) in PATTERNS.items():
        if pattern == head.pattern:
            return float(getattr(head, name))
    return head.max_weight


def classify_heads(
    model: ModelLike,
    text: TextLike,
    target: str | Iterable[int] | None = None,
    *,
    kinds: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
) -> HeadPatterns:
    """The pattern of every head, with its measures. No weights are stored, so the text may be long."""
    inputs = tokenize_input(model, text, target)
    stats: dict[AttentionSite, PatternStats] = {}

    def update(site: AttentionSite, first: int, weights: Tensor) -> None:
        stats.setdefault(site, PatternStats(inputs, site)).update(first, weights)

    capture_weights(inputs, select_sites(inputs.model, kinds, layers), update)
    return HeadPatterns(tuple(head for site_stats in stats.values() for head in site_stats.compute()))


class PatternStats:
    """Running sums of the measures over chunks of rows, for all heads of one attention layer."""

    def __init__(self, inputs: TokenizedInput, site: AttentionSite) -> None:
        queries, keys = query_key_tokens(inputs, site.kind)
        self.site = site
        self.is_self_attention = queries is keys
        self.query_ids = torch.tensor([token.id for token in queries])
        self.key_ids = torch.tensor([token.id for token in keys])
        self.total: dict[str, Tensor] = {}  # measure -> sum [H]
        self.count: dict[str, float] = {}  # measure -> number of rows or cells in the sum
        self.mean_columns: list[Tensor] = []  # [H, rows] of each chunk
        self.column_sums = torch.zeros(site.heads, len(keys))  # weight of each column, from the rows that see it
        self.column_counts = torch.zeros(len(keys))
        self.match_counts = {name: torch.zeros(len(keys)) for name in ("duplicate", "induction")}

    def update(self, first: int, weights: Tensor) -> None:
        """Add weights [H, rows, S], from row `first` on."""
        i = torch.arange(first, first + weights.shape[1])[:, None]
        j = torch.arange(weights.shape[2])[None]
        counted = (i > 0) if len(self.query_ids) > 1 else (i >= 0)  # [rows, 1]
        visible = (i >= j) | (self.site.kind != "decoder.self_attn")
        num_keys = (weights > 0).sum(2)
        entropy = -torch.special.xlogy(weights, weights).sum(2)  # [H, rows]

        self.column_sums += (weights * counted).sum(1)
        self.column_counts += (visible & counted).sum(0)
        self.mean_columns.append((weights * j).sum(2))

        rows = counted[:, 0]
        self._update_rows("entropy", entropy, rows)
        self._update_rows("normalized_entropy", entropy / num_keys.clamp(min=2).log(), rows & (num_keys > 1).any(0))
        self._update_rows("max_weight", weights.amax(2), rows)
        self._update_cells("first", weights, (j == 0) & counted)
        self._update_cells("last", weights, (j == weights.shape[2] - 1) & counted)
        if self.is_self_attention:
            self._update_self_attention(weights, i, j, counted, visible)

    def _update_self_attention(self, weights: Tensor, i: Tensor, j: Tensor, counted: Tensor, visible: Tensor) -> None:
        """The measures that compare the query's token and position with the key's."""
        rows = counted[:, 0]
        self._update_cells("diagonal", weights, (i == j) & counted)
        self._update_cells("previous", weights, i - 1 == j)
        self._update_cells("next", weights, i + 1 == j)
        self._update_rows("distance", (weights * (i - j).abs()).sum(2), rows)

        duplicate = (self.query_ids[i] == self.key_ids[j]) & (i != j) & visible
        induction = torch.zeros_like(duplicate)  # the key after an earlier equal token
        induction[:, 1:] = duplicate[:, :-1] & (j < i)[:, :-1] & (i != j)[:, 1:]
        for name, cells in (("duplicate", duplicate), ("induction", induction)):
            self._update_rows(name, (weights * cells).sum(2), cells.any(1) & rows)
            self.match_counts[name] += (cells & counted).sum(0)

    def _update_rows(self, name: str, values: Tensor, rows: Tensor) -> None:
        """Add the values [H, rows] of the selected rows."""
        self.total[name] = self.total.get(name, 0) + values[:, rows].sum(1)
        self.count[name] = self.count.get(name, 0) + int(rows.sum())

    def _update_cells(self, name: str, weights: Tensor, cells: Tensor) -> None:
        """Add the weights [H, rows, S] of the selected cells."""
        self.total[name] = self.total.get(name, 0) + (weights * cells).sum((1, 2))
        self.count[name] = self.count.get(name, 0) + int(cells.sum())

    def compute(self) -> list[HeadPattern]:
        """The pattern of each head."""
        monotonicity = self._monotonicity()  # [H]
        column_means = self.column_sums / self.column_counts.clamp(min=1)  # [H, S]
        often_visible = self.column_counts >= max(2.0, len(self.query_ids) / 4)  # [S]
        patterns = []
        for head in range(self.site.heads):
            measures = {name: self._mean(name, head) for name in MEASURES}
            measures["monotonicity"] = float(monotonicity[head])
            for name, cells in self.match_counts.items():  # minus what those columns get from every row
                measures[name] -= float(cells @ column_means[head]) / max(self.count.get(name, 0), 1)
            columns = column_means[head][often_visible]
            measures["max_column"] = float(columns.max()) if len(columns) else UNDEFINED
            pattern = describe_pattern({name: 0.0 if math.isnan(value) else value for name, value in measures.items()})
            patterns.append(HeadPattern(self.site.kind, self.site.layer, head, **measures, pattern=pattern))
        return patterns

    def _mean(self, name: str, head: int) -> float:
        return float(self.total[name][head]) / self.count[name] if self.count.get(name) else UNDEFINED

    def _monotonicity(self) -> Tensor:
        """Pearson correlation of the row with the mean column it attends to, [H]; of cross-attention only."""
        columns = torch.cat(self.mean_columns, 1)  # [H, Q]
        if self.is_self_attention or columns.shape[1] < 3:
            return torch.full((columns.shape[0],), UNDEFINED)
        rows = torch.arange(columns.shape[1], dtype=torch.float32).expand_as(columns)
        a = columns - columns.mean(1, keepdim=True)
        b = rows - rows.mean(1, keepdim=True)
        return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp(min=1e-9)
