"""Attention masks: causal, sliding window, local, padding and packed documents. True = may attend.

A mask rule is a spec that compares two positions; padding and document ids are arguments of the forward pass.
`AttentionMask` combines them once per forward pass and knows the cheap cases: nothing is masked, a plain causal mask,
and a window, which can be computed in blocks. Packed documents are within a window as wide as the longest of them.
B batch, Q queries, S keys; positions are integers, [1, Q] where every row has the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from headwater.core.base import check_positive
from headwater.i18n import _
from headwater.parts import part

if TYPE_CHECKING:
    from headwater.core.positions import PositionEncoding

WindowSize = tuple[int | None, int | None]


@runtime_checkable
class MaskRule(Protocol):
    """A predicate on a query and a key position.

    window_size = (back, ahead): it allows exactly the keys of -back ≤ k - q ≤ ahead (None = unlimited).
    """

    @property
    def window_size(self) -> WindowSize: ...
    def allows(self, q: Tensor, k: Tensor) -> Tensor | None: ...


@part
class Bidirectional:
    """Full attention: nothing is masked."""

    window_size: ClassVar[WindowSize] = (None, None)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return None


@part
class Causal:
    """Causal mask: a token and everything before it, k ≤ q."""

    window_size: ClassVar[WindowSize] = (None, 0)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return k <= q


@part
class SlidingWindow:
    """Causal sliding window: a token and the size - 1 before it, 0 ≤ q - k < size."""

    size: int

    def __post_init__(self) -> None:
        check_positive(self, "size", _("1 sees only itself"))

    @property
    def window_size(self) -> WindowSize:
        return self.size - 1, 0

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return (k <= q) & (q - k < self.size)


@part
class LocalWindow:
    """Local attention in both directions: |q - k| ≤ size."""

    size: int

    @property
    def window_size(self) -> WindowSize:
        return self.size, self.size

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        return (q - k).abs() <= self.size


@part
class And:
    """What both rules allow."""

    first: MaskRule
    second: MaskRule

    @property
    def window_size(self) -> WindowSize:
        back, ahead = self.first.window_size
        other_back, other_ahead = self.second.window_size
        return _min_or_none(back, other_back), _min_or_none(ahead, other_ahead)

    def allows(self, q: Tensor, k: Tensor) -> Tensor | None:
        first = self.first.allows(q, k)
        second = self.second.allows(q, k)
        return first if second is None else _and(first, second)


@dataclass(frozen=True)
class AttentionMask:
    """The mask of one forward pass: a rule at given positions, with padding and document boundaries.

    q_positions [B|1, Q], k_positions [B|1, S]. attention_mask [B, S]: True where a key is no padding; None: all True.
    q_document_ids [B, Q], k_document_ids [B, S]: tokens attend within their document; None: one document per row.
    aligned: keys and queries are the same tokens in the same order, so that positions differ as indices do.
    longest_document: no two tokens of a document are further apart than longest_document - 1, by index.
    """

    rule: MaskRule
    position: PositionEncoding
    q_positions: Tensor
    k_positions: Tensor
    attention_mask: Tensor | None = None
    q_document_ids: Tensor | None = None
    k_document_ids: Tensor | None = None
    aligned: bool = False
    longest_document: int | None = None

    @property
    def window_size(self) -> WindowSize:
        """That of the rule, within the longest document."""
        back, ahead = self.rule.window_size
        if self.longest_document is None:
            return back, ahead
        limit = self.longest_document - 1
        return _min_or_none(back, limit), _min_or_none(ahead, limit)

    @property
    def is_causal(self) -> bool:
        """A plain causal mask over the tokens of this pass, which a kernel applies without a mask tensor."""
        back, ahead = self.rule.window_size
        unlimited = back is None or back + 1 >= self.k_positions.shape[1]
        unmasked = self.attention_mask is None and self.k_document_ids is None
        return self.aligned and ahead == 0 and unlimited and unmasked

    @property
    def block_size(self) -> int | None:
        """Queries per block for a windowed rule or short documents; None where one dense mask costs less."""
        back, ahead = self.window_size
        if not self.aligned or back is None or ahead is None:
            return None
        size = max(64, -(-(back + ahead + 1) // 2))
        return size if self.k_positions.shape[1] > 3 * size else None

    def boolean(self) -> Tensor | None:
        """[B|1, 1, Q|1, S], True = may attend; None where nothing is masked."""
        allowed = self.rule.allows(self.q_positions[:, :, None], self.k_positions[:, None, :])
        if self.attention_mask is not None:
            allowed = _and(allowed, self.attention_mask[:, None, :])
        if self.q_document_ids is not None and self.k_document_ids is not None:
            allowed = _and(allowed, self.q_document_ids[:, :, None] == self.k_document_ids[:, None, :])
        return None if allowed is None else allowed[:, None]

    def additive(self, dtype: torch.dtype, query_bias: Tensor | None = None) -> Tensor | None:
        """The tensor for scaled_dot_product_attention: boolean(), or with a position bias a float tensor to add.

        query_bias [B, H, Q, S]: a bias that depends on the queries, scaled as the scores are.
        """
        allowed = self.boolean()
        bias = query_bias
        if self.position.has_bias:
            position_bias = self.position.bias(self.q_positions, self.k_positions).to(dtype)  # [B|1, H, Q, S]
            bias = position_bias if bias is None else bias + position_bias
        if bias is None:
            return allowed
        return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)

    def narrow(self, q: slice, k: slice) -> AttentionMask:
        """The mask of some of the queries and some of the keys."""

        def cut(t: Tensor | None, s: slice) -> Tensor | None:
            return None if t is None else t[:, s]

        return replace(
            self,
            q_positions=self.q_positions[:, q],
            k_positions=self.k_positions[:, k],
            attention_mask=cut(self.attention_mask, k),
            q_document_ids=cut(self.q_document_ids, q),
            k_document_ids=cut(self.k_document_ids, k),
            aligned=False,
        )


def _and(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a & b


def _min_or_none(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
