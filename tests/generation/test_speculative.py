"""Guessing changes how soon an answer comes, never the answer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from headwater.errors import BadSetting, CheckFailed
from headwater.generation.choosers import Greedy, NoRepeatNgram, RepetitionPenalty, Temperature, TopK, TopP
from headwater.generation.prefix import Prefix
from headwater.generation.requests import Request
from headwater.generation.speculative import Draft, LookUp, Speculation

WAYS = [
    (Greedy(),),
    (Temperature(1.0),),
    (Temperature(0.7), TopK(10)),
    (RepetitionPenalty(1.3), NoRepeatNgram(2), Temperature(1.5), TopP(0.9)),
]


@pytest.fixture(scope="module")
def small(build):
    return build(d_model=16, layers=1, seed=3)


def speculate(model, request, drafter, **more):
    speculation = Speculation(model, request, drafter, **more)
    events = list(speculation.stream())
    assert events == speculation.row.events
    return speculation


@pytest.mark.parametrize("choosers", WAYS, ids=lambda ways: type(ways[0]).__name__)
@pytest.mark.parametrize("guesses", [1, 5])
def test_the_text_is_the_same(model, small, answer, choosers, guesses):
    for seed in range(4):
        request = Request((1, 2, 3, 1, 2), choosers=choosers, max_tokens=25, seed=seed, end=frozenset({seed}))
        want = answer(model, request.prompt, choosers, 25, seed=seed, end=frozenset({seed}))
        for drafter in (LookUp(), Draft(small), Draft(model)):
            made = speculate(model, request, drafter, guesses=guesses)
            assert (made.row.new, made.row.stopped) == (want.new, want.stopped)


def test_a_perfect_draft_is_always_right_and_saves_readings(model, small):
    request = Request((1, 2), choosers=(Temperature(1.0),), max_tokens=24)
    perfect, poor = speculate(model, request, Draft(model)), speculate(model, request, Draft(small))
    assert perfect.acceptance == 1 and perfect.steps == 4, "five guesses and one token of its own a reading"
    assert poor.acceptance < 1 and perfect.steps < poor.steps <= 24


def test_acceptance_is_what_was_counted(model):
    class Always:
        def guess(self, row, count):
            return [7] * count

    made = speculate(model, Request((1, 2), choosers=(Temperature(2.0),), max_tokens=40, seed=1), Always(), guesses=2)
    runs = [len(list(group)) for token, group in itertools.groupby(made.row.new) if token == 7]
    assert sum(runs) == made.row.new.count(7) and made.accepted <= made.row.new.count(7)
    assert made.acceptance == made.accepted / made.drafted and len(made.row.new) == made.accepted + made.steps


def test_the_distribution_is_the_model_s(build, small):
    """Of every text of two tokens, its share over many seeds: chi-square against the exact probabilities."""
    vocab, many = 3, 500
    model, draft = build(vocab=vocab, seed=1), Draft(build(vocab=vocab, seed=5, d_model=16, layers=1))
    counts = np.zeros((vocab, vocab))
    for seed in range(many):
        request = Request((1, 2), choosers=(Temperature(1.3),), max_tokens=2, seed=seed)
        counts[tuple(speculate(model, request, draft, guesses=2).row.new)] += 1
    expected = np.zeros((vocab, vocab))
    with torch.no_grad():
        first = (model(torch.tensor([[1, 2]]))[0, -1] / 1.3).softmax(-1)
        for a in range(vocab):
            expected[a] = (first[a] * (model(torch.tensor([[1, 2, a]]))[0, -1] / 1.3).softmax(-1)).numpy() * many
    square = ((counts - expected) ** 2 / expected).sum()
    free = vocab * vocab - 1
    assert (square - free) / (2 * free) ** 0.5 < 4
    wrong = expected.mean(1, keepdims=True).repeat(vocab, 1)
    assert (((counts - wrong) ** 2 / wrong).sum() - free) / (2 * free) ** 0.5 > 4, "the test can fail"


def test_look_up_finds_the_longest_and_latest():
    from headwater.generation.requests import Row

    def guess(text, count=3, **more):
        return list(LookUp(**more).guess(Row(Request(tuple(text)), 9), count))

    assert guess([1, 2, 3, 4, 9, 2, 3]) == [4, 9, 2]
    assert guess([1, 2, 5, 1, 2, 6, 1, 2]) == [6, 1, 2], "the latest of two"
    assert guess([7, 1, 2, 5, 8, 2, 6, 7, 1, 2], longest=3) == [5, 8, 2], "the longest before the latest"
    assert guess([7, 1, 2, 5, 8, 2, 6, 7, 1, 2], longest=1) == [6, 7, 1]
    assert guess([1, 2, 3]) == [] and guess([1]) == [] and guess([1, 1]) == [1]


def test_a_draft_serves_one_row_after_another(model, small, answer):
    draft = Draft(small)
    for prompt in ((1, 2, 3), (1, 2, 4, 4), (9,)):
        assert speculate(model, Request(prompt, max_tokens=9), draft).row.new == answer(model, prompt, max_tokens=9).new


def test_from_a_source_and_after_a_prefix(model, translator, slowly, answer):
    made = speculate(translator, Request((1,), (5, 6, 7), max_tokens=9), LookUp())
    assert made.row.new == slowly(translator, (1,), 9, (5, 6, 7))
    prefix = Prefix(model, (1, 2, 3))
    made = speculate(model, Request((1, 2, 3, 4), max_tokens=9, prefix=prefix), LookUp())
    assert made.row.new == answer(model, (1, 2, 3, 4), max_tokens=9).new


def test_a_draft_that_ends_sooner_guesses_less(build, answer):
    model, short = build("rotary"), build("learned", longest=8, seed=5)
    assert (
        speculate(model, Request((1, 2, 3), max_tokens=12), Draft(short)).row.new
        == answer(model, (1, 2, 3), max_tokens=12).new
    )


def test_faults(model, translator, build):
    with pytest.raises(BadSetting, match="both models must have one vocabulary, got 30 and 40"):
        Speculation(model, Request((1,)), Draft(build(vocab=30)))
    with pytest.raises(BadSetting, match="must have one stack"):
        Draft(translator)
    with pytest.raises(BadSetting, match="guesses must be from 1 to 64"):
        Speculation(model, Request((1,)), LookUp(), guesses=0)
    broken = build()
    with torch.no_grad():
        broken.decoder.final_norm.weight.fill_(torch.nan)
    with pytest.raises(CheckFailed):
        list(Speculation(broken, Request((1,)), LookUp()).stream())
