"""The lens ends with what the model says, wherever its norms stand; surprise is the loss it learns from."""

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
def test_the_last_lens_row_equals_the_model_output(make, shape, style):
    model = make(shape, style)
    reading = tokenize_input(model, TEXT, "hi" if shape == "both" else None)
    result = lens(model, reading, top_k=3)
    with torch.no_grad():
        shares = reading.forward()[0].softmax(-1)
    best = shares.topk(3)
    np.testing.assert_array_equal(result.top_ids[-1], best.indices.numpy())
    np.testing.assert_allclose(result.top_probs[-1], best.values.numpy(), rtol=1e-4)
    np.testing.assert_array_equal(result.prediction_ranks[-1], 0)
    entropy = -(shares * shares.log()).sum(-1)
    np.testing.assert_allclose(result.entropy[-1], entropy.numpy(), rtol=1e-4)
    assert result.layers == ("embedding", "layer 0", "layer 1", "layer 2")
    assert [token.id for token in result.prediction] == best.indices[:, 0].tolist()


def test_a_lens_without_the_last_norm_would_be_seen(make, monkeypatch):
    model = make("decoder", "pre")
    right = lens(model, TEXT).top_probs
    monkeypatch.setattr(model.model.decoder, "final_norm", nn.Identity())
    assert np.abs(lens(model, TEXT).top_probs - right).max() > 1e-3


def test_a_middle_row_is_the_model_cut_off_there(make):
    model, cut = make("decoder", "pre"), make("decoder", "pre")
    cut.model.decoder.order = (0, 1)
    reading = tokenize_input(cut, TEXT)
    with torch.no_grad():
        shares = reading.forward()[0].softmax(-1).max(-1)
    result = lens(model, TEXT)
    np.testing.assert_allclose(result.top_probs[2, :, 0], shares.values.numpy(), rtol=1e-5)


def test_lens_at_selected_positions_and_in_chunks(writer, monkeypatch):
    whole = lens(writer, TEXT)
    monkeypatch.setattr(logit_lens, "LOGITS_PER_CHUNK", 5 * 260)
    some = lens(writer, TEXT, positions=[3, -1])
    assert some.positions == (3, 11)
    np.testing.assert_allclose(some.top_probs, whole.top_probs[:, [3, 11]], rtol=1e-5)
    np.testing.assert_array_equal(some.prediction_ranks, whole.prediction_ranks[:, [3, 11]])


def test_settled_is_the_first_row_from_which_the_answer_stays(writer):
    result = lens(writer, TEXT)
    for column in range(len(result.positions)):
        row = result.converged_layer(column)
        assert not result.prediction_ranks[row:, column].any()
        assert row == 0 or result.prediction_ranks[row - 1, column] > 0
    assert str(result).count("\n") == 4


def test_a_model_without_language_head_has_no_lens(make):
    model = make("encoder", head=NoHead())
    for look in (lens, token_losses):
        with pytest.raises(BadInput, match="needs a head that says tokens, the model has HiddenStates"):
            look(model, TEXT)
    with pytest.raises(BadSetting, match="top_k must be at least 1"):
        lens(model, TEXT, top_k=0)


# ------------------------------------------------------------------------------------------------------------ surprise


@pytest.mark.parametrize("shape", ["decoder", "both"])
def test_losses_sum_to_the_loss_it_learns_from(make, shape, monkeypatch):
    monkeypatch.setattr(logit_lens, "LOGITS_PER_CHUNK", 4 * 260)  # four places at a time
    model = make(shape)
    reading = tokenize_input(model, TEXT, "hi you" if shape == "both" else None)
    result = token_losses(model, reading)
    ids = torch.tensor([[token.id for token in reading.next_tokens]])
    with torch.no_grad():
        total = cross_entropy(reading.forward()[:, : ids.shape[1]], ids)
    assert result.losses.sum() == pytest.approx(float(total), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(float(total) / ids.shape[1]), rel=1e-4)
    assert [t.id for t in result.tokens] == ids[0].tolist()
    assert (result.losses >= -np.log(result.top_probs) - 1e-6).all()
    expected = [best.id == token.id for best, token in zip(result.top_tokens, result.tokens, strict=True)]
    np.testing.assert_array_equal(result.ranks == 0, expected)


def test_a_model_that_looks_both_ways_has_each_token_hidden_in_turn(filler):
    result = token_losses(filler, "abc")
    ids = tokenize_input(filler, "abc").ids
    for n, token in enumerate(result.tokens):
        hidden = ids.clone()
        hidden[0, n] = 259
        with torch.no_grad():
            own = -filler.model(hidden)[0, n].log_softmax(-1)[token.id]
        assert result.losses[n] == pytest.approx(float(own), rel=1e-4)
    assert result.method == "each hidden in turn"


def test_next_tokens_are_the_models_shares(writer, filler, translator):
    result = next_tokens(writer, "abc", 4)
    with torch.no_grad():
        shares = writer.model(tokenize_input(writer, "abc").ids)[0, -1].softmax(-1).topk(4)
    assert [choice.token.id for choice in result.candidates] == shares.indices.tolist()
    assert [choice.prob for choice in result.candidates] == pytest.approx(shares.values.tolist(), rel=1e-5)
    gap = next_tokens(filler, "a<mask>c", 300)
    assert gap.position == 1 and sum(choice.prob for choice in gap.candidates) == pytest.approx(1, rel=1e-5)
    start = next_tokens(translator, "abc")
    assert [token.id for token in start.context] == [256], "nothing is written yet"
    later = next_tokens(translator, "abc", target="xy")
    assert [token.text for token in later.context] == ["<s>", "x", "y"]
    early = next_tokens(writer, "abcd", 4, position=2)
    assert early.candidates == result.candidates and [token.text for token in early.context] == ["a", "b", "c"]


def test_next_tokens_needs_a_language_head(filler, writer):
    with pytest.raises(BadInput, match="fills gaps, got none; put <mask> into the text"):
        next_tokens(filler, "abc")
    with pytest.raises(BadInput, match="must have two tokens or more, got one"):
        token_losses(writer, "a")
    with pytest.raises(BadSetting, match="top_k must be at least 1, got 0"):
        next_tokens(writer, "abc", 0)
