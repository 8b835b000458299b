"""Linear attention in NumPy: three forms that agree, and the core gives the same."""

from __future__ import annotations

import numpy as np
import torch

from headwater.reference.linear_attention import as_recurrence, as_sums, as_weights
from headwater.variants.linear_attention import linear_attention

RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(2, 3, 70, width)) for width in (8, 8, 5))


def test_three_forms_agree():
    np.testing.assert_allclose(as_sums(Q, K, V), as_weights(Q, K, V), rtol=1e-9)
    np.testing.assert_allclose(as_recurrence(Q, K, V), as_weights(Q, K, V, causal=True), rtol=1e-9)
    assert np.abs(as_weights(Q, K, V) - as_weights(Q, K, V, causal=True)).max() > 0.1


def test_the_core_gives_the_same():
    q, k, v = map(torch.from_numpy, (Q, K, V))
    for causal in (False, True):
        out, _state = linear_attention(q, k, v, causal)
        np.testing.assert_allclose(out.numpy(), as_weights(Q, K, V, causal), rtol=1e-6)
