"""Public models inspected: their known properties are reproduced."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import headwater
from headwater.errors import Unavailable
from headwater.inspection import attention_maps, attribute, classify_heads, lens, next_tokens, token_losses

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def load_or_skip():
    def load(name):
        try:
            return headwater.load(name)
        except Unavailable as reason:
            pytest.skip(str(reason))

    return load


def test_smollm2_knows_a_capital_and_has_induction_heads(load_or_skip):
    model = load_or_skip("smollm2")
    best = next_tokens(model, "The capital of France is", 3).candidates[0]
    assert best.token.text == " Paris" and best.prob > 0.5
    completion = headwater.generate(model, "The capital of France is", max_tokens=1, top_logprobs=1)
    assert completion.ids[0] == best.token.id
    assert np.exp(completion.logprobs[0]) == pytest.approx(best.prob, rel=0.05)  # the compiled step rounds activations
    result = classify_heads(model, "zebra copper lantern orbit zebra copper lantern orbit zebra copper")
    assert any("induction" in head.pattern for head in result.heads)
    assert any(head.pattern == "attends to the previous token" for head in result.heads)
    attribution = attribute(model, "The capital of France is", method="occlusion")
    assert attribution.tokens[int(attribution.attributions.argmax())].text == " France"
    logit_lens = lens(model, "The capital of France is")
    assert logit_lens.top_tokens[-1][-1].text == " Paris" and logit_lens.converged_layer(4) > 15
    assert attention_maps(model, "你好", layers=[0]).tokens[0].label == "你¹"


def test_minilm_has_attention_but_no_language_head(load_or_skip):
    model = load_or_skip("minilm")
    result = headwater.inspect(model, "A cat sat on the mat.")
    assert {"attention", "heads", "gradients"} <= set(result.results) and {"lens", "losses"} <= set(result.skipped)
    for m in result["attention"].maps:
        np.testing.assert_allclose(m.weights.sum(-1), 1, atol=1e-5)


def test_two_thousand_tokens_of_smollm2(load_or_skip):
    model = load_or_skip("smollm2")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ids = model.tokenizer.encode("The cat sat on the mat and looked at the moon. " * 400)[:2000]
    result = attention_maps(model, ids, layers=[3], heads=[0])
    assert result.maps[0].weights.shape == (1, 2000, 2000) and result.precision == "exact"
    assert len(classify_heads(model, ids, layers=[0, 15]).heads) == 18
    assert len(token_losses(model, ids).losses) == 1999
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 1200
