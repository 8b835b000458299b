"""The last row of the logit lens is the model output for every norm position; token losses sum to the training loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from headwater.core import NoHead
from headwater.errors import BadInput, BadSetting
from headwater.inspection import lens, logit_lens, next_tokens, token_losses
from headwater.inspection.inputs import tokenize_input
from headwater.tasks.losses import cross_entropy

TEXT = "你好 world"
SHAPES = [("decoder", "pre"), ("decoder", "post"), ("decoder", "sandwich"), ("encoder", "post"), ("encoder", "pre"),
          ("both", "post"), ("both", "pre")]  # fmt: skip


@pytest.mark.parametrize(("shape", "style"), SHAPES)
def test_the_last_lens_row_equals_the_model_output(make_model, shape, style):
    model = make_model(shape, style)
    inputs = tokenize_input(model, TEXT, "hi" if shape == "both" else None)
    result = lens(model, inputs, top_k=3)
    with torch.no_grad():
        probs = inputs.forward()[0].softmax(-1)
    best = probs.topk(3)
    np.testing.assert_array_equal(result.top_ids[-1], best.indices.numpy())
    np.testing.assert_allclose(result.top_probs[-1], best.values.numpy(), rtol=1e-4)
    np.testing.assert_array_equal(result.prediction_ranks[-1], 0)
    entropy = -(probs * probs.log()).sum(-1)
    np.testing.assert_allclose(result.entropy[-1], entropy.numpy(), rtol=1e-4)
    assert result.layers == ("embedding", "layer 0", "layer 1", "layer 2")
    assert [token.id for token in result.prediction] == best.indices[:, 0].tolist()


def test_a_lens_without_the_final_norm_would_be_detected(make_model, monkeypatch):
    model = make_model("decoder", "pre")
    right = lens(model, TEXT).top_probs
    monkeypatch.setattr(model.model.decoder, "final_norm", nn.Identity())
    assert np.abs(lens(model, TEXT).top_probs - right).max() > 1e-3


def test_a_middle_row_equals_the_truncated_model(make_model):
    model, truncated = make_model("decoder", "pre"), make_model("decoder", "pre")
    truncated.model.decoder.order = (0, 1)
    inputs = tokenize_input(truncated, TEXT)
    with torch.no_grad():
        probs = inputs.forward()[0].softmax(-1).max(-1)
    result = lens(model, TEXT)
    np.testing.assert_allclose(result.top_probs[2, :, 0], probs.values.numpy(), rtol=1e-5)


def test_lens_at_selected_positions_and_in_chunks(causal_lm, monkeypatch):
    full = lens(causal_lm, TEXT)
    monkeypatch.setattr(logit_lens, "LOGITS_PER_CHUNK", 5 * 260)
    some = lens(causal_lm, TEXT, positions=[3, -1])
    assert some.positions == (3, 11)
    np.testing.assert_allclose(some.top_probs, full.top_probs[:, [3, 11]], rtol=1e-5)
    np.testing.assert_array_equal(some.prediction_ranks, full.prediction_ranks[:, [3, 11]])


def test_the_converged_layer_is_the_first_from_which_the_prediction_stays(causal_lm):
    result = lens(causal_lm, TEXT)
    for column in range(len(result.positions)):
        row = result.converged_layer(column)
        assert not result.prediction_ranks[row:, column].any()
        assert row == 0 or result.prediction_ranks[row - 1, column] > 0
    assert str(result).count("\n") == 4


def test_a_model_without_language_head_has_no_lens(make_model):
    model = make_model("encoder", head=NoHead())
    for analysis in (lens, token_losses):
        with pytest.raises(BadInput, match="needs a language-modeling head, the model has HiddenStates"):
            analysis(model, TEXT)
    with pytest.raises(BadSetting, match="top_k must be at least 1"):
        lens(model, TEXT, top_k=0)


# -------------------------------------------------------------------------------------------------------- token losses


@pytest.mark.parametrize("shape", ["decoder", "both"])
def test_token_losses_sum_to_the_training_loss(make_model, shape, monkeypatch):
    monkeypatch.setattr(logit_lens, "LOGITS_PER_CHUNK", 4 * 260)  # four positions at a time
    model = make_model(shape)
    inputs = tokenize_input(model, TEXT, "hi you" if shape == "both" else None)
    result = token_losses(model, inputs)
    ids = torch.tensor([[token.id for token in inputs.next_tokens]])
    with torch.no_grad():
        total = cross_entropy(inputs.forward()[:, : ids.shape[1]], ids)
    assert result.losses.sum() == pytest.approx(float(total), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(float(total) / ids.shape[1]), rel=1e-4)
    assert [t.id for t in result.tokens] == ids[0].tolist()
    assert (result.losses >= -np.log(result.top_probs) - 1e-6).all()
    expected = [best.id == token.id for best, token in zip(result.top_tokens, result.tokens, strict=True)]
    np.testing.assert_array_equal(result.ranks == 0, expected)


def test_a_bidirectional_model_has_each_token_masked_in_turn(masked_lm):
    result = token_losses(masked_lm, "abc")
    ids = tokenize_input(masked_lm, "abc").ids
    for n, token in enumerate(result.tokens):
        hidden = ids.clone()
        hidden[0, n] = 259
        with torch.no_grad():
            loss = -masked_lm.model(hidden)[0, n].log_softmax(-1)[token.id]
        assert result.losses[n] == pytest.approx(float(loss), rel=1e-4)
    assert result.method == "each token masked in turn"


def test_next_token_probabilities_equal_the_model(causal_lm, masked_lm, encoder_decoder):
    result = next_tokens(causal_lm, "abc", 4)
    with torch.no_grad():
        probs = causal_lm.model(tokenize_input(causal_lm, "abc").ids)[0, -1].softmax(-1).topk(4)
    assert [candidate.token.id for candidate in result.candidates] == probs.indices.tolist()
    assert [candidate.prob for candidate in result.candidates] == pytest.approx(probs.values.tolist(), rel=1e-5)
    masked = next_tokens(masked_lm, "a<mask>c", 300)
    assert masked.position == 1 and sum(candidate.prob for candidate in masked.candidates) == pytest.approx(1, rel=1e-5)
    first = next_tokens(encoder_decoder, "abc")
    assert [token.id for token in first.context] == [256], "nothing is generated yet"
    later = next_tokens(encoder_decoder, "abc", target="xy")
    assert [token.text for token in later.context] == ["<s>", "x", "y"]
    early = next_tokens(causal_lm, "abcd", 4, position=2)
    assert early.candidates == result.candidates and [token.text for token in early.context] == ["a", "b", "c"]


def test_next_tokens_needs_a_language_head(masked_lm, causal_lm):
    with pytest.raises(BadInput, match="predicts masked tokens, the text has none; put <mask> into the text"):
        next_tokens(masked_lm, "abc")
    with pytest.raises(BadInput, match="must have at least two tokens, got one"):
        token_losses(causal_lm, "a")
    with pytest.raises(BadSetting, match="top_k must be at least 1, got 0"):
        next_tokens(causal_lm, "abc", 0)
