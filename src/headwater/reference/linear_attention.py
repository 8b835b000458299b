"""Linear attention (Katharopoulos et al. 2020) in NumPy, three ways that agree: as weights, as sums, as a recurrence.

softmax attention weights a key by exp(q · k). Linear attention weights it by φ(q) · φ(k), with φ(x) = elu(x) + 1:

    out_i = Σ_j (φ(q_i) · φ(k_j)) v_j / Σ_j φ(q_i) · φ(k_j)       j ≤ i if causal

φ(q_i) does not depend on j, so it can be taken out of both sums. What is left, Σ φ(k_j) v_jᵀ and Σ φ(k_j), is the same
for all queries: time O(n) instead of O(n²). Causal, the sums grow by one key at a time: a recurrent network.
q, k [.., n, D], v [.., n, V] -> [.., n, V].
"""

from __future__ import annotations

import numpy as np

EPS = 1e-6  # added to the denominator


def feature_map(x: np.ndarray) -> np.ndarray:
    """φ(x) = elu(x) + 1: x + 1 above zero, exp(x) below; always positive."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def as_weights(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool = False) -> np.ndarray:
    """The definition, with all n² weights."""
    weights = feature_map(q) @ feature_map(k).swapaxes(-1, -2)  # [.., n, n]
    if causal:
        weights = np.tril(weights)
    return weights @ v / (weights.sum(-1, keepdims=True) + EPS)


def as_sums(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Both directions, in time O(n): one matrix and one vector stand for all keys."""
    kv = feature_map(k).swapaxes(-1, -2) @ v  # [.., D, V]
    total = feature_map(k).sum(-2)[..., None]  # [.., D, 1]
    queries = feature_map(q)
    return queries @ kv / (queries @ total + EPS)


def as_recurrence(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal, one token at a time: all that is kept of the past is kv [.., D, V] and total [.., D]."""
    kv = np.zeros((*k.shape[:-2], k.shape[-1], v.shape[-1]))
    total = np.zeros((*k.shape[:-2], k.shape[-1]))
    outputs = []
    for i in range(q.shape[-2]):
        query = feature_map(q[..., i, :])
        key = feature_map(k[..., i, :])
        kv = kv + key[..., :, None] * v[..., i, None, :]
        total = total + key
        numerator = (query[..., None, :] @ kv)[..., 0, :]
        outputs.append(numerator / ((query * total).sum(-1, keepdims=True) + EPS))
    return np.stack(outputs, -2)
