"""3. Who may look at whom. One convention everywhere: True = may attend. Rules are joined with `&`.

A place is the number of earlier tokens of the same document in the row, so it counts the same whether padding stands
on the left, on the right or nowhere. Padding is simply document 0, which nobody sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.errors import BadInput
from headwater.reference.gradients import Array


@dataclass(frozen=True)
class Tokens:
    """A batch of rows of ids, and where each token stands."""

    ids: Array  # [B, Q]
    documents: Array  # [B, Q] 1, 2, 3 … per row; 0 is padding
    places: Array  # [B, Q]


def lay_out(ids: Array, keep: Array | None = None, documents: Array | None = None) -> Tokens:
    """keep [B, Q]: True = a real token. documents [B, Q]: which packed document a token is of, 0 = padding.

    >>> lay_out(np.array([[7, 7, 8, 8, 8]]), documents=np.array([[1, 1, 2, 2, 2]])).places
    array([[0, 1, 0, 1, 2]])
    """
    for name, mask in (("keep", keep), ("documents", documents)):
        if mask is not None and mask.shape != ids.shape:
            raise BadInput(f"{name} must have the shape of ids {ids.shape}, got {mask.shape}; give one value per token")
    owner = np.ones(ids.shape, dtype=np.int64) if documents is None else documents
    owner = owner if keep is None else owner * keep
    earlier = np.tri(ids.shape[1], k=-1, dtype=bool)
    places = (same_document(owner, owner) & earlier).sum(axis=-1)
    return Tokens(ids, owner, places)


def same_document(q_documents: Array, k_documents: Array) -> Array:
    return q_documents[:, :, None] == k_documents[:, None, :]


def real(k_documents: Array) -> Array:
    """The padding mask: every query may look at every key that is not padding."""
    return (k_documents != 0)[:, None, :]


def past(q_places: Array, k_places: Array) -> Array:
    """The causal mask: a token sees itself and what stands before it."""
    return k_places[:, None, :] <= q_places[:, :, None]


def near(q_places: Array, k_places: Array, window: int) -> Array:
    """Fewer than `window` places away: with `past`, the last `window` tokens, oneself among them."""
    return np.abs(k_places[:, None, :] - q_places[:, :, None]) < window


def self_mask(tokens: Tokens, causal: bool, window: int) -> Array:
    """Everything that holds for tokens that look at one another, [B, Q, Q]. window 0: no window."""
    allowed = real(tokens.documents) & same_document(tokens.documents, tokens.documents)
    if causal:
        allowed = allowed & past(tokens.places, tokens.places)
    if window:
        allowed = allowed & near(tokens.places, tokens.places, window)
    return allowed


def cross_mask(q: Tokens, k: Tokens) -> Array:
    """For tokens that look at those of another stack, [B, Q, S]: the real ones of the document with the same number."""
    return real(k.documents) & same_document(q.documents, k.documents)
