"""What a head does: each measure on a matrix made by hand, the words, and heads of a model measured in parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater.inspection import attention, heads, maps
from headwater.inspection.maps import Spot
from headwater.inspection.patterns import Sums, words
from headwater.inspection.subjects import Reading, Token


def measured(weights, ids=None, kind="decoder.self_attn", source=(), parts=1):
    """The one head whose weights [Q, S] are these."""
    weights = torch.as_tensor(weights, dtype=torch.float32)
    tokens = tuple(Token(n, str(n)) for n in (ids or range(len(weights))))
    reading = Reading(None, None, tokens, tuple(Token(n, str(n)) for n in source))
    sums, size = Sums(reading, Spot(kind, 0, "", 1)), math.ceil(len(weights) / parts)
    for first in range(0, len(weights), size):
        sums.add(first, weights[None, first : first + size])
    return sums.heads()[0]


def shifted(n, by):
    """Each row looks at the place `by` away; where there is none, at the first."""
    weights = np.zeros((n, n))
    for i in range(n):
        weights[i, i + by if 0 <= i + by < n else 0] = 1
    return weights


def test_each_measure_of_a_matrix_made_by_hand():
    own = measured(np.eye(6))
    assert (own.self, own.previous, own.next, own.entropy, own.distance, own.peak) == (1, 0, 0, 0, 0, 1)
    assert own.does == "looks at itself"
    before = measured(shifted(6, -1))
    assert before.previous == 1 and before.distance == 1 and before.does == "looks at the token before"
    after = measured(shifted(6, 1), kind="encoder.self_attn")
    assert after.next == 1 and after.does == "looks at the token after"
    first = measured(np.eye(6)[[0] * 6])
    assert first.first == 1 and first.column == 1 and first.distance == 3 and first.does == "rests on the first token"
    last = measured(np.eye(6)[[5] * 6], kind="encoder.self_attn")
    assert last.last == 1 and last.does == "rests on the last token"
    one = measured(np.eye(6)[[2] * 6], kind="encoder.self_attn")
    assert one.column == 1 and one.does == "rests on one token"


def test_an_even_head_has_the_greatest_entropy():
    even = measured(np.full((8, 8), 1 / 8), kind="encoder.self_attn")
    assert even.entropy == pytest.approx(math.log(8), rel=1e-5) and even.spread == pytest.approx(1, rel=1e-5)
    assert even.does == "spreads over all it sees"
    causal = measured(np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None])
    assert causal.spread == pytest.approx(1, rel=1e-5), "of what it sees, not of the whole row"


def test_induction_is_told_from_resting_on_a_column():
    ids = [7, 3, 9, 5, 7, 3, 9, 5]
    induction = np.eye(8)[[0, 0, 0, 0, 1, 2, 3, 4]]  # row 4 has token 7 again, and looks at what came after the first 7
    found = measured(induction, ids)
    assert found.repeat > 0.6 and "induction" in found.does
    sink = measured(np.eye(8)[[1] * 8], ids)
    assert sink.repeat < 0.1, "the column is looked at from everywhere, not because a token came again"
    same = measured(np.eye(8)[[0, 1, 2, 3, 0, 1, 2, 3]], ids)
    assert same.same > 0.5 and same.does == "looks at the same token elsewhere"
    assert math.isnan(measured(np.eye(4)).repeat), "nothing comes twice, so there is nothing to measure"


def test_cross_attention_knows_order_and_no_places():
    walks = measured(np.eye(5), kind="decoder.cross_attn", source=range(5))
    assert walks.order == pytest.approx(1) and math.isnan(walks.previous)
    back = measured(np.eye(5)[::-1].copy(), kind="decoder.cross_attn", source=range(5))
    assert back.order == pytest.approx(-1)


def test_the_rest_is_told_by_distance():
    nothing = dict.fromkeys(("previous", "next", "self", "repeat", "same", "first", "last", "column", "order"), 0.0)
    assert words({**nothing, "spread": 0.5, "peak": 0.3, "distance": 2.3}) == "looks nearby, 2.3 tokens away"
    assert words({**nothing, "spread": 0.5, "peak": 0.3, "distance": 9.0}) == "mixes several tokens"


def test_in_parts_it_is_the_same():
    weights = torch.rand(9, 9).tril().softmax(-1).tril()
    weights = (weights / weights.sum(-1, keepdim=True)).numpy()
    ids = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    whole, parts = measured(weights, ids), measured(weights, ids, parts=4)
    for name in ("self", "previous", "first", "same", "repeat", "entropy", "spread", "distance", "peak", "column"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-5)


def test_heads_of_a_model_are_those_of_its_maps(translator, monkeypatch):
    monkeypatch.setattr(maps, "TOGETHER", 64)
    found = heads(translator, "hello you", "hi there")
    kept = attention(translator, "hello you", "hi there")
    assert len(found.heads) == sum(len(m.heads) for m in kept.maps) == 36
    for head in found.heads[::5]:
        weights = kept.map(head.kind, head.layer).of(head.head)
        assert head.peak == pytest.approx(float(weights[1:].max(1).mean()), rel=1e-4)
        assert head.first == pytest.approx(float(weights[1:, 0].mean()), rel=1e-3, abs=1e-6)
    assert sum(found.counts().values()) == 36
    assert len(found.worth()) <= 6 and "heads worth a look" in str(found)
    assert found.of("decoder.cross_attn", 2, 1).name == "decoder.cross_attn 2.1"


def test_a_single_token_has_heads_too(writer):
    assert len(heads(writer, "a").heads) == 12
