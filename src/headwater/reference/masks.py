"""3. Attention masks: causal, window, padding and packed documents. True = may attend; masks are combined with `&`.

A position is the number of earlier tokens of the same document in the row, so padding on either side does not change
it. Padding is document 0, to which nothing attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.reference.gradients import Array


@dataclass(frozen=True)
class Tokens:
    """A batch of token ids with their document ids and positions."""

    ids: Array  # [B, Q]
    document_ids: Array  # [B, Q] 1, 2, 3 … per row; 0 is padding
    positions: Array  # [B, Q]


def prepare_tokens(ids: Array, attention_mask: Array | None = None, document_ids: Array | None = None) -> Tokens:
    """Compute the positions of a batch. attention_mask [B, Q]: False = padding. document_ids [B, Q]: 0 = padding.

    >>> prepare_tokens(np.array([[7, 7, 8, 8, 8]]), document_ids=np.array([[1, 1, 2, 2, 2]])).positions
    array([[0, 1, 0, 1, 2]])
    """
    for name, mask in (("attention_mask", attention_mask), ("document_ids", document_ids)):
        if mask is not None and mask.shape != ids.shape:
            raise BadInput(
                _(
                    "{name} must have the shape of ids {shape}, got {shape2}; give one value per token",
                    name=name,
                    shape=ids.shape,
                    shape2=mask.shape,
                )
            )
    if document_ids is None:
        document_ids = np.ones(ids.shape, dtype=np.int64)
    if attention_mask is not None:
        document_ids = document_ids * attention_mask
    earlier = np.tri(ids.shape[1], k=-1, dtype=bool)
    positions = (document_mask(document_ids, document_ids) & earlier).sum(axis=-1)
    return Tokens(ids, document_ids, positions)


def document_mask(q_document_ids: Array, k_document_ids: Array) -> Array:
    """The document mask: tokens attend within their document."""
    return q_document_ids[:, :, None] == k_document_ids[:, None, :]


def padding_mask(k_document_ids: Array) -> Array:
    """The padding mask: every query may attend to every key that is not padding."""
    return (k_document_ids != 0)[:, None, :]


def causal_mask(q_positions: Array, k_positions: Array) -> Array:
    """The causal mask: a token attends to itself and to earlier ones."""
    return k_positions[:, None, :] <= q_positions[:, :, None]


def window_mask(q_positions: Array, k_positions: Array, window: int) -> Array:
    """The window mask: fewer than `window` positions away; with causal_mask, the last `window` tokens with itself."""
    return np.abs(k_positions[:, None, :] - q_positions[:, :, None]) < window


def self_mask(tokens: Tokens, causal: bool, window: int) -> Array:
    """The mask of self-attention, [B, Q, Q]. window 0: no window."""
    allowed = padding_mask(tokens.document_ids) & document_mask(tokens.document_ids, tokens.document_ids)
    if causal:
        allowed = allowed & causal_mask(tokens.positions, tokens.positions)
    if window:
        allowed = allowed & window_mask(tokens.positions, tokens.positions, window)
    return allowed


def cross_mask(q: Tokens, k: Tokens) -> Array:
    """The mask of cross-attention, [B, Q, S]: source tokens of the document with the same id, without padding."""
    return padding_mask(k.document_ids) & document_mask(q.document_ids, k.document_ids)
