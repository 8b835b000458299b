"""Head patterns: each measure on a constructed matrix, its description, and the heads of a model in chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater.inspection import attention_maps, attention_weights, classify_heads
from headwater.inspection.attention_weights import AttentionSite
from headwater.inspection.head_patterns import MEASURES, PatternStats, describe_pattern
from headwater.inspection.inputs import Token, TokenizedInput


def measure_head(weights, ids=None, kind="decoder.self_attn", source=(), num_chunks=1):
    """The measures of a head with the weights [Q, S]."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tokens = tuple(Token(n, str(n)) for n in (ids or range(len(weights))))
    inputs = TokenizedInput(None, None, tokens, tuple(Token(n, str(n)) for n in source))
    stats, size = PatternStats(inputs, AttentionSite(kind, 0, "", 1)), math.ceil(len(weights) / num_chunks)
    for first in range(0, len(weights), size):
        stats.update(first, weights[None, first : first + size])
    return stats.compute()[0]


def shifted(n, by):
    """Each row attends to the position `by` away; where there is none, to the first."""
    weights = np.zeros((n, n))
    for i in range(n):
        weights[i, i + by if 0 <= i + by < n else 0] = 1
    return weights


def test_each_measure_of_a_known_matrix():
    diagonal = measure_head(np.eye(6))
    assert (
        diagonal.diagonal,
        diagonal.previous,
        diagonal.next,
        diagonal.entropy,
        diagonal.distance,
        diagonal.max_weight,
    ) == (1, 0, 0, 0, 0, 1)
    assert diagonal.pattern == "attends to itself"
    before = measure_head(shifted(6, -1))
    assert before.previous == 1 and before.distance == 1 and before.pattern == "attends to the previous token"
    after = measure_head(shifted(6, 1), kind="encoder.self_attn")
    assert after.next == 1 and after.pattern == "attends to the next token"
    first = measure_head(np.eye(6)[[0] * 6])
    assert (
        first.first == 1
        and first.max_column == 1
        and first.distance == 3
        and first.pattern == "attention sink on the first token"
    )
    last = measure_head(np.eye(6)[[5] * 6], kind="encoder.self_attn")
    assert last.last == 1 and last.pattern == "attention sink on the last token"
    one = measure_head(np.eye(6)[[2] * 6], kind="encoder.self_attn")
    assert one.max_column == 1 and one.pattern == "attention sink on one token"


def test_a_uniform_head_has_the_maximum_entropy():
    uniform = measure_head(np.full((8, 8), 1 / 8), kind="encoder.self_attn")
    assert uniform.entropy == pytest.approx(math.log(8), rel=1e-5) and uniform.normalized_entropy == pytest.approx(
        1, rel=1e-5
    )
    assert uniform.pattern == "uniform attention"
    causal = measure_head(np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None])
    assert causal.normalized_entropy == pytest.approx(1, rel=1e-5), "relative to the visible keys, not to all keys"


def test_induction_differs_from_a_constant_column():
    ids = [7, 3, 9, 5, 7, 3, 9, 5]
    induction = np.eye(8)[
        [0, 0, 0, 0, 1, 2, 3, 4]
    ]  # row 4 has token 7 again, and attends to the token after the first 7
    result = measure_head(induction, ids)
    assert result.induction > 0.6 and "induction" in result.pattern
    sink = measure_head(np.eye(8)[[1] * 8], ids)
    assert sink.induction < 0.1, "every row attends to the column, not only those of a repeated token"
    same = measure_head(np.eye(8)[[0, 1, 2, 3, 0, 1, 2, 3]], ids)
    assert same.duplicate > 0.5 and same.pattern == "attends to the same token elsewhere"
    assert math.isnan(measure_head(np.eye(4)).induction), "undefined without repeated tokens"


def test_cross_attention_measures_monotonicity_and_no_positions():
    monotonic = measure_head(np.eye(5), kind="decoder.cross_attn", source=range(5))
    assert monotonic.monotonicity == pytest.approx(1) and math.isnan(monotonic.previous)
    reversed_ = measure_head(np.eye(5)[::-1].copy(), kind="decoder.cross_attn", source=range(5))
    assert reversed_.monotonicity == pytest.approx(-1)


def test_other_heads_are_described_by_distance():
    measures = dict.fromkeys(MEASURES, 0.0) | {"normalized_entropy": 0.5, "max_weight": 0.3}
    assert describe_pattern({**measures, "distance": 2.3}) == "local attention, 2.3 tokens away on average"
    assert describe_pattern({**measures, "distance": 9.0}) == "mixed attention"


def test_chunks_give_the_same_measures():
    weights = torch.rand(9, 9).tril().softmax(-1).tril()
    weights = (weights / weights.sum(-1, keepdim=True)).numpy()
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    full, chunked = measure_head(weights, ids), measure_head(weights, ids, num_chunks=4)
    for name in set(MEASURES) - {"next", "last", "monotonicity"}:
        assert getattr(chunked, name) == pytest.approx(getattr(full, name), rel=1e-5)


def test_heads_of_a_model_are_those_of_its_maps(encoder_decoder, monkeypatch):
    monkeypatch.setattr(attention_weights, "WEIGHTS_PER_CHUNK", 64)
    result = classify_heads(encoder_decoder, "hello you", "hi there")
    maps = attention_maps(encoder_decoder, "hello you", "hi there")
    assert len(result.heads) == sum(len(m.heads) for m in maps.maps) == 36
    for head in result.heads[::5]:
        weights = maps.get_map(head.kind, head.layer).head_weights(head.head)
        assert head.max_weight == pytest.approx(float(weights[1:].max(1).mean()), rel=1e-4)
        assert head.first == pytest.approx(float(weights[1:, 0].mean()), rel=1e-3, abs=1e-6)
    assert sum(result.pattern_counts().values()) == 36
    assert len(result.notable_heads()) <= 6 and "notable heads" in str(result)
    assert result.find("decoder.cross_attn", 2, 1).name == "decoder.cross_attn 2.1"


def test_a_single_token_has_patterns(causal_lm):
    assert len(classify_heads(causal_lm, "a").heads) == 12
