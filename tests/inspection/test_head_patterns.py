"""What a head does: each measure on a matrix made by hand, the words, and heads of a model measured in parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater.inspection import attention, attention_maps, classify_heads
from headwater.inspection.attention import AttentionSite
from headwater.inspection.head_patterns import MEASURES, PatternStats, describe_pattern
from headwater.inspection.inputs import Token, TokenizedInput


def measured(weights, ids=None, kind="decoder.self_attn", source=(), parts=1):
    """The one head whose weights [Q, S] are these."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tokens = tuple(Token(n, str(n)) for n in (ids or range(len(weights))))
    reading = TokenizedInput(None, None, tokens, tuple(Token(n, str(n)) for n in source))
    sums, size = PatternStats(reading, AttentionSite(kind, 0, "", 1)), math.ceil(len(weights) / parts)
    for first in range(0, len(weights), size):
        sums.update(first, weights[None, first : first + size])
    return sums.compute()[0]


def shifted(n, by):
    """Each row looks at the place `by` away; where there is none, at the first."""
    weights = np.zeros((n, n))
    for i in range(n):
        weights[i, i + by if 0 <= i + by < n else 0] = 1
    return weights


def test_each_measure_of_a_known_matrix():
    own = measured(np.eye(6))
    assert (own.diagonal, own.previous, own.next, own.entropy, own.distance, own.max_weight) == (1, 0, 0, 0, 0, 1)
    assert own.pattern == "looks at itself"
    before = measured(shifted(6, -1))
    assert before.previous == 1 and before.distance == 1 and before.pattern == "looks at the token before"
    after = measured(shifted(6, 1), kind="encoder.self_attn")
    assert after.next == 1 and after.pattern == "looks at the token after"
    first = measured(np.eye(6)[[0] * 6])
    assert (
        first.first == 1
        and first.max_column == 1
        and first.distance == 3
        and first.pattern == "rests on the first token"
    )
    last = measured(np.eye(6)[[5] * 6], kind="encoder.self_attn")
    assert last.last == 1 and last.pattern == "rests on the last token"
    one = measured(np.eye(6)[[2] * 6], kind="encoder.self_attn")
    assert one.max_column == 1 and one.pattern == "rests on one token"


def test_an_even_head_has_the_greatest_entropy():
    even = measured(np.full((8, 8), 1 / 8), kind="encoder.self_attn")
    assert even.entropy == pytest.approx(math.log(8), rel=1e-5) and even.normalized_entropy == pytest.approx(
        1, rel=1e-5
    )
    assert even.pattern == "spreads over all it sees"
    causal = measured(np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None])
    assert causal.normalized_entropy == pytest.approx(1, rel=1e-5), "of what it sees, not of the whole row"


def test_induction_differs_from_a_constant_column():
    ids = [7, 3, 9, 5, 7, 3, 9, 5]
    induction = np.eye(8)[[0, 0, 0, 0, 1, 2, 3, 4]]  # row 4 has token 7 again, and looks at what came after the first 7
    result = measured(induction, ids)
    assert result.induction > 0.6 and "induction" in result.pattern
    sink = measured(np.eye(8)[[1] * 8], ids)
    assert sink.induction < 0.1, "the column is looked at from everywhere, not because a token came again"
    same = measured(np.eye(8)[[0, 1, 2, 3, 0, 1, 2, 3]], ids)
    assert same.duplicate > 0.5 and same.pattern == "looks at the same token elsewhere"
    assert math.isnan(measured(np.eye(4)).induction), "nothing comes twice, so there is nothing to measure"


def test_cross_attention_measures_monotonicity_and_no_positions():
    walks = measured(np.eye(5), kind="decoder.cross_attn", source=range(5))
    assert walks.monotonicity == pytest.approx(1) and math.isnan(walks.previous)
    back = measured(np.eye(5)[::-1].copy(), kind="decoder.cross_attn", source=range(5))
    assert back.monotonicity == pytest.approx(-1)


def test_other_heads_are_described_by_distance():
    measures = dict.fromkeys(MEASURES, 0.0) | {"normalized_entropy": 0.5, "max_weight": 0.3}
    assert describe_pattern({**measures, "distance": 2.3}) == "looks nearby, 2.3 tokens away"
    assert describe_pattern({**measures, "distance": 9.0}) == "mixes several tokens"


def test_in_parts_it_is_the_same():
    weights = torch.rand(9, 9).tril().softmax(-1).tril()
    weights = (weights / weights.sum(-1, keepdim=True)).numpy()
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    whole, parts = measured(weights, ids), measured(weights, ids, parts=4)
    for name in set(MEASURES) - {"next", "last", "monotonicity"}:
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5)


def test_heads_of_a_model_are_those_of_its_maps(translator, monkeypatch):
    monkeypatch.setattr(attention, "WEIGHTS_PER_CHUNK", 64)
    result = classify_heads(translator, "hello you", "hi there")
    kept = attention_maps(translator, "hello you", "hi there")
    assert len(result.heads) == sum(len(m.heads) for m in kept.maps) == 36
    for head in result.heads[::5]:
        weights = kept.get_map(head.kind, head.layer).head_weights(head.head)
        assert head.max_weight == pytest.approx(float(weights[1:].max(1).mean()), rel=1e-4)
        assert head.first == pytest.approx(float(weights[1:, 0].mean()), rel=1e-3, abs=1e-6)
    assert sum(result.pattern_counts().values()) == 36
    assert len(result.notable_heads()) <= 6 and "heads worth a look" in str(result)
    assert result.find("decoder.cross_attn", 2, 1).name == "decoder.cross_attn 2.1"


def test_a_single_token_has_heads_too(writer):
    assert len(classify_heads(writer, "a").heads) == 12
