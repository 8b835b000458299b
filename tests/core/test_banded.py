"""Banded attention is softmax attention over the keys that a dense mask of the same rules leaves visible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headwater.core.banded import Band, LeadingKeys
from headwater.core.functional import banded_attention

BANDS = {
    "window": Band(5, 0),
    "wide window": Band(90, 3),
    "both ways": Band(4, 7),
    "only itself": Band(0, 0),
    "all": Band(400, 400),
    "blocks": Band(1, 1, block=8),
    "causal blocks": Band(2, 0, block=16, causal=True),
    "later queries": Band(1, 0, block=8, first_query=40),
}
KEYS = 208  # several chunks of 64, and whole blocks of 8 and 16


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def visible(band: Band, queries: int) -> Tensor:
    """[Q, S] The rule of a band, spelled out query by query."""
    allowed = torch.zeros(queries, KEYS, dtype=torch.bool)
    for query in range(queries):
        own = query + band.first_query
        first_of_block = own - own % band.block
        begin = max(0, first_of_block - band.back * band.block)
        end = own + 1 if band.causal else first_of_block + (band.ahead + 1) * band.block
        allowed[query, begin:end] = True
    return allowed


def dense(q: Tensor, k: Tensor, v: Tensor, band: Band, **given) -> Tensor:
    """The same with a matrix of all queries and keys; leading keys are further columns of it."""
    groups, queries = q.shape[1] // k.shape[1], q.shape[2]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    allowed = visible(band, queries).expand(*q.shape[:2], queries, KEYS).clone()
    own = torch.arange(queries)[:, None] + band.first_query
    bias = 0
    if "distance_bias" in given:
        bias = given["distance_bias"][:, (torch.arange(KEYS) - own + band.back).clamp(0, band.width - 1)]
    if "random_blocks" in given:
        block_of_key = torch.arange(KEYS) // band.block
        allowed |= (given["random_blocks"].repeat_interleave(band.block, 1)[..., None] == block_of_key).any(2)
    if "key_mask" in given:
        allowed &= given["key_mask"][:, None, None]
    if "document_ids" in given:
        ids = given["document_ids"]
        allowed &= (ids[:, own[:, 0], None] == ids[:, None])[:, None]
    scores = 0.3 * (q @ k.mT) + bias
    if "leading" in given:
        leading = given["leading"]
        more_k, more_v = (t.repeat_interleave(groups, 1) for t in (leading.k, leading.v))
        extra = 0 if leading.bias is None else leading.bias
        scores = torch.cat((scores, 0.3 * (q @ more_k.mT) + extra), -1)
        allowed = torch.cat((allowed, (torch.zeros(*q.shape[:3], more_k.shape[2]) + extra) > -torch.inf), -1)
        v = torch.cat((v, more_v), 2)
    return scores.masked_fill(~allowed, -1e30).softmax(-1).masked_fill(~allowed, 0) @ v


def extras(kind: str, band: Band, queries: int) -> dict:
    hidden = drawn(2, KEYS, seed=4) > -0.5
    if kind == "padding":
        hidden[1, 30:] = False  # whole rows see nothing
        return {"key_mask": hidden}
    if kind == "documents":
        return {"document_ids": torch.arange(KEYS).expand(2, KEYS) // torch.tensor([[33], [50]]), "key_mask": hidden}
    if kind == "leading":
        bias = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
        bias[0, ..., 1] = 1.5
        bias[1, ..., 3:] = -torch.inf
        return {
            "leading": LeadingKeys(drawn(2, 2, 5, 16, seed=5), drawn(2, 2, 5, 16, seed=6), bias),
            "key_mask": hidden,
        }
    if kind == "distance":
        return {"distance_bias": drawn(4, band.width, seed=7)}
    if kind == "random":
        numbers = [[0, 25], [25, 3], [24, 25], [25, 24]]  # blocks of 8 that lie outside most bands
        chosen = torch.tensor(numbers)[:, None, :].repeat(1, queries // band.block, 1)
        own = (torch.arange(queries) + band.first_query)[:: band.block] // band.block
        near = (chosen - own[None, :, None]).abs() <= max(band.back, band.ahead)
        chosen[near] = (chosen[near] + 12) % 26
        return {"random_blocks": chosen, "leading": LeadingKeys(drawn(2, 2, 3, 16, seed=5), drawn(2, 2, 3, 16, seed=6))}
    return {}


CASES = [(name, kind) for name in BANDS for kind in ("plain", "padding", "leading")]
CASES += [("both ways", "documents"), ("blocks", "documents"), ("both ways", "distance"), ("window", "distance")]
CASES += [("blocks", "random"), ("later queries", "random")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_is_the_dense_mask(name: str, kind: str):
    band = BANDS[name]
    queries = 96 if band.first_query else KEYS
    q = drawn(2, 4, queries, 16).requires_grad_()
    k, v = (drawn(2, 2, KEYS, 16, seed=seed).requires_grad_() for seed in (1, 2))
    given = extras(kind, band, queries)
    inputs = [q, k, v]
    if kind == "distance":
        inputs.append(given["distance_bias"].requires_grad_())
    out, want = banded_attention(q, k, v, band, 0.3, **given), dense(q, k, v, band, **given)
    torch.testing.assert_close(out, want)
    above = drawn(*out.shape, seed=9)
    got_grads, want_grads = (torch.autograd.grad(y, inputs, above) for y in (out, want))
    for got, expected in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_band_that_leaks_by_one_would_show():
    q, k = drawn(1, 4, KEYS, 16), drawn(1, 2, KEYS, 16, seed=1)
    for leak in (Band(4, 8), Band(5, 7)):
        assert (banded_attention(q, k, k, leak, 0.3) - dense(q, k, k, Band(4, 7))).abs().max() > 1e-3
