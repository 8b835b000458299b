"""Public models looked into: what is known of them is found again."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import headwater
from headwater.errors import Unavailable
from headwater.inspection import attention, attribution, heads, lens, next_tokens, token_losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def known():
    def load(name):
        try:
            return headwater.load(name)
        except Unavailable as reason:
            pytest.skip(str(reason))

    return load


def test_smollm2_knows_a_capital_and_has_induction_heads(known):
    model = known("smollm2")
    best = next_tokens(model, "The capital of France is", 3).choices[0]
    assert best.token.text == " Paris" and best.share > 0.5
    said = headwater.generate(model, "The capital of France is", max_tokens=1, alternatives=1)
    assert said.ids[0] == best.token.id
    assert np.exp(said.logprobs[0]) == pytest.approx(best.share, rel=0.05)  # the compiled step rounds activations
    found = heads(model, "zebra copper lantern orbit zebra copper lantern orbit zebra copper")
    assert any("induction" in head.does for head in found.heads)
    assert any(head.does == "looks at the token before" for head in found.heads)
    made = attribution(model, "The capital of France is", by="blanked")
    assert made.tokens[int(made.scores.argmax())].text == " France"
    seen = lens(model, "The capital of France is")
    assert seen.words[-1][-1].text == " Paris" and seen.settled(4) > 15
    assert attention(model, "你好", layers=[0]).tokens[0].label == "你¹"


def test_minilm_has_attention_but_says_no_tokens(known):
    model = known("minilm")
    found = headwater.inspect(model, "A cat sat on the mat.")
    assert {"attention", "heads", "gradients"} <= set(found.results) and {"lens", "losses"} <= set(found.missing)
    for m in found["attention"].maps:
        np.testing.assert_allclose(m.weights.sum(-1), 1, atol=1e-5)


def test_two_thousand_tokens_of_smollm2(known):
    model = known("smollm2")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = model.tokenizer.encode("The cat sat on the mat and looked at the moon. " * 400)[:2000]
    found = attention(model, ids, layers=[3], heads=[0])
    assert found.maps[0].weights.shape == (1, 2000, 2000) and found.kept == "exact"
    assert len(heads(model, ids, layers=[0, 15]).heads) == 18
    assert len(token_losses(model, ids).losses) == 1999
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 1200
