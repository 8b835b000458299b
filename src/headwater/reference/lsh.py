"""14. LSH attention (Reformer): a token sees those whose vectors point where its own does, found by hashing.

One row of one head: S tokens, K width, R rounds of hashing, L tokens a chunk. Queries and keys are the same vectors.
"""

from __future__ import annotations

import math

import numpy as np

from headwater.reference.gradients import Array

HIDDEN = -1e9  # the score of a key after the query
ITSELF = -1e5  # the score of the query's own key: it is read only where nothing else is


def hash_buckets(qk: Array, directions: Array) -> Array:
    """Bucket of each vector in each round [R, S]: the nearest of N directions and their N opposites.

    Two vectors with a small angle between them have the same nearest direction more often than not.
    """
    along = np.einsum("sk,krn->rsn", qk, directions)
    return np.concatenate((along, -along), -1).argmax(-1)


def sort_by_bucket(buckets: Array) -> Array:
    """The tokens of each round in order of bucket, and of position within a bucket: one ring [R · S] of all rounds.

    >>> sort_by_bucket(np.array([[1, 0, 1, 0]])).tolist()
    [1, 3, 0, 2]
    """
    return np.argsort(buckets, axis=-1, kind="stable").reshape(-1)


def lsh_attention(
    qk: Array, v: Array, directions: Array, chunk: int, before: int = 1, after: int = 0, causal: bool = True
) -> Array:
    """Attention of each token to its chunk of sorted tokens and to those around it; the rounds are combined."""
    length, width = qk.shape
    rounds = directions.shape[1]
    order = sort_by_bucket(hash_buckets(qk, directions))
    chunks = order.reshape(-1, chunk)
    keys = qk / np.sqrt(np.square(qk).mean(-1, keepdims=True) + 1e-6)  # of one length: only the direction counts

    outputs = np.zeros((rounds, length, v.shape[-1]))
    totals = np.zeros((rounds, length))  # the logarithm of the attention that each round finds
    for number, tokens in enumerate(chunks):
        near = [chunks[(number + offset) % len(chunks)] for offset in range(-before, after + 1)]
        seen = np.concatenate(near)
        scores = qk[tokens] @ keys[seen].T / math.sqrt(width)
        if causal:
            scores = np.where(tokens[:, None] >= seen, scores, HIDDEN)
        scores = np.where(tokens[:, None] != seen, scores, ITSELF)
        total = np.logaddexp.reduce(scores, -1)
        round_number = number * chunk // length
        outputs[round_number, tokens] = np.exp(scores - total[:, None]) @ v[seen]
        totals[round_number, tokens] = total

    # a round that finds more attention counts more
    weights = np.exp(totals - np.logaddexp.reduce(totals, 0))
    return (weights[:, :, None] * outputs).sum(0)
