"""The lens ends with what the model says, wherever its norms stand; surprise is the loss it learns from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from headwater.core import NoHead
from headwater.errors import BadInput, BadSetting
from headwater.inspection import lens, next_tokens, scores, token_losses
from headwater.inspection.subjects import read
from headwater.training.losses import cross_entropy

TEXT = "你好 world"
SHAPES = [("decoder", "pre"), ("decoder", "post"), ("decoder", "sandwich"), ("encoder", "post"), ("encoder", "pre"),
          ("both", "post"), ("both", "pre")]  # fmt: skip


@pytest.mark.parametrize(("shape", "style"), SHAPES)
def test_the_last_row_is_what_the_model_says(make, shape, style):
    model = make(shape, style)
    reading = read(model, TEXT, "hi" if shape == "both" else None)
    found = lens(model, reading, top=3)
    with torch.no_grad():
        shares = reading.answer()[0].softmax(-1)
    best = shares.topk(3)
    np.testing.assert_array_equal(found.ids[-1], best.indices.numpy())
    np.testing.assert_allclose(found.shares[-1], best.values.numpy(), rtol=1e-4)
    np.testing.assert_array_equal(found.answer_ranks[-1], 0)
    entropy = -(shares * shares.log()).sum(-1)
    np.testing.assert_allclose(found.entropy[-1], entropy.numpy(), rtol=1e-4)
    assert found.layers == ("embedding", "layer 0", "layer 1", "layer 2")
    assert [token.id for token in found.answer] == best.indices[:, 0].tolist()


def test_a_lens_without_the_last_norm_would_be_seen(make, monkeypatch):
    model = make("decoder", "pre")
    right = lens(model, TEXT).shares
    monkeypatch.setattr(model.model.decoder, "final_norm", nn.Identity())
    assert np.abs(lens(model, TEXT).shares - right).max() > 1e-3


def test_a_middle_row_is_the_model_cut_off_there(make):
    model, cut = make("decoder", "pre"), make("decoder", "pre")
    cut.model.decoder.order = (0, 1)
    reading = read(cut, TEXT)
    with torch.no_grad():
        shares = reading.answer()[0].softmax(-1).max(-1)
    found = lens(model, TEXT)
    np.testing.assert_allclose(found.shares[2, :, 0], shares.values.numpy(), rtol=1e-5)


def test_some_places_and_in_parts(writer, monkeypatch):
    whole = lens(writer, TEXT)
    monkeypatch.setattr(scores, "TOGETHER", 5 * 260)
    some = lens(writer, TEXT, places=[3, -1])
    assert some.places == (3, 11)
    np.testing.assert_allclose(some.shares, whole.shares[:, [3, 11]], rtol=1e-5)
    np.testing.assert_array_equal(some.answer_ranks, whole.answer_ranks[:, [3, 11]])


def test_settled_is_the_first_row_from_which_the_answer_stays(writer):
    found = lens(writer, TEXT)
    for column in range(len(found.places)):
        row = found.settled(column)
        assert not found.answer_ranks[row:, column].any()
        assert row == 0 or found.answer_ranks[row - 1, column] > 0
    assert str(found).count("\n") == 4


def test_a_model_that_says_no_tokens_has_no_lens(make):
    model = make("encoder", head=NoHead())
    for look in (lens, token_losses):
        with pytest.raises(BadInput, match="needs a head that says tokens, the model has States"):
            look(model, TEXT)
    with pytest.raises(BadSetting, match="top must be at least 1"):
        lens(model, TEXT, top=0)


# ------------------------------------------------------------------------------------------------------------ surprise


@pytest.mark.parametrize("shape", ["decoder", "both"])
def test_losses_sum_to_the_loss_it_learns_from(make, shape, monkeypatch):
    monkeypatch.setattr(scores, "TOGETHER", 4 * 260)  # four places at a time
    model = make(shape)
    reading = read(model, TEXT, "hi you" if shape == "both" else None)
    found = token_losses(model, reading)
    ids = torch.tensor([[token.id for token in reading.follows]])
    with torch.no_grad():
        total = cross_entropy(reading.answer()[:, : ids.shape[1]], ids)
    assert found.losses.sum() == pytest.approx(float(total), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(float(total) / ids.shape[1]), rel=1e-4)
    assert [t.id for t in found.tokens] == ids[0].tolist()
    assert (found.losses >= -np.log(found.best_shares) - 1e-6).all()
    expected = [best.id == token.id for best, token in zip(found.best, found.tokens, strict=True)]
    np.testing.assert_array_equal(found.ranks == 0, expected)


def test_a_model_that_looks_both_ways_has_each_token_hidden_in_turn(filler):
    found = token_losses(filler, "abc")
    ids = read(filler, "abc").ids
    for n, token in enumerate(found.tokens):
        hidden = ids.clone()
        hidden[0, n] = 259
        with torch.no_grad():
            own = -filler.model(hidden)[0, n].log_softmax(-1)[token.id]
        assert found.losses[n] == pytest.approx(float(own), rel=1e-4)
    assert found.how == "each hidden in turn"


def test_next_tokens_are_the_models_shares(writer, filler, translator):
    found = next_tokens(writer, "abc", 4)
    with torch.no_grad():
        shares = writer.model(read(writer, "abc").ids)[0, -1].softmax(-1).topk(4)
    assert [choice.token.id for choice in found.choices] == shares.indices.tolist()
    assert [choice.share for choice in found.choices] == pytest.approx(shares.values.tolist(), rel=1e-5)
    gap = next_tokens(filler, "a<mask>c", 300)
    assert gap.place == 1 and sum(choice.share for choice in gap.choices) == pytest.approx(1, rel=1e-5)
    start = next_tokens(translator, "abc")
    assert [token.id for token in start.after] == [256], "nothing is written yet"
    later = next_tokens(translator, "abc", target="xy")
    assert [token.text for token in later.after] == ["<s>", "x", "y"]
    early = next_tokens(writer, "abcd", 4, place=2)
    assert early.choices == found.choices and [token.text for token in early.after] == ["a", "b", "c"]


def test_what_has_no_next_token_says_so(filler, writer):
    with pytest.raises(BadInput, match="fills gaps, got none; put <mask> into the text"):
        next_tokens(filler, "abc")
    with pytest.raises(BadInput, match="must have two tokens or more, got one"):
        token_losses(writer, "a")
    with pytest.raises(BadSetting, match="n must be at least 1, got 0"):
        next_tokens(writer, "abc", 0)
