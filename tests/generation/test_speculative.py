"""Guessing changes how soon an answer comes, never the answer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headwater.errors import BadSetting, CheckFailed
from headwater.generation.choosers import Allow, Ban, Greedy, NoRepeatNgram, RepetitionPenalty, Temperature, TopK, TopP
from headwater.generation.engine import Engine
from headwater.generation.prefix import Prefix
from headwater.generation.requests import Request
from headwater.generation.speculative import Draft, LookUp
from headwater.generation.trust import Trust
from headwater.machine.build import missing

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
    """The row of a request alone on an engine that guesses, and how many steps it took."""
    engine, steps = Engine(model, rows=1, by=drafter, **more), 1
    row = engine.submit(request)
    while engine.step():
        steps += 1
    return row, steps


@pytest.mark.parametrize("choosers", WAYS, ids=lambda ways: type(ways[0]).__name__)
@pytest.mark.parametrize("guesses", [1, 5])
def test_the_text_is_the_same(model, small, answer, choosers, guesses):
    for seed in range(4):
        request = Request((1, 2, 3, 1, 2), choosers=choosers, max_tokens=25, seed=seed, end=frozenset({seed}))
        want = answer(model, request.prompt, choosers, 25, seed=seed, end=frozenset({seed}))
        for drafter in (LookUp(), Draft(small), Draft(model)):
            row, _ = speculate(model, request, drafter, guesses=guesses)
            assert (row.new, row.stopped) == (want.new, want.stopped)


def test_a_perfect_draft_is_always_right_and_saves_readings(model, small):
    request = Request((1, 2), choosers=(Temperature(1.0),), max_tokens=24)
    (perfect, quick), (poor, slow) = speculate(model, request, Draft(model)), speculate(model, request, Draft(small))
    assert perfect.trust.acceptance == 1 and quick == 1 + 4, (
        "the prompt, then five guesses and one token of its own a step"
    )
    assert poor.trust.acceptance < 1 and quick < slow <= 24


def test_acceptance_is_what_was_counted(model):
    class Always:
        def guess(self, row, count):
            return [7] * count

    request = Request((1, 2), choosers=(Allow((7, 8)), Temperature(2.0)), max_tokens=40, seed=1)
    row, steps = speculate(model, request, Always(), guesses=2)
    trust = row.trust
    assert 0 < trust.accepted <= row.new.count(7) and len(row.new) == trust.accepted + steps
    assert trust.acceptance == trust.accepted / trust.drafted


def test_the_distribution_is_the_model_s(build, small):
    """Of every text of two tokens, its share over many seeds: chi-square against the exact probabilities."""
    vocab, many = 3, 500
    model, draft = build(vocab=vocab, seed=1), Draft(build(vocab=vocab, seed=5, d_model=16, layers=1))
    counts = np.zeros((vocab, vocab))
    for seed in range(many):
        request = Request((1, 2), choosers=(Temperature(1.3),), max_tokens=2, seed=seed)
        counts[tuple(speculate(model, request, draft, guesses=2)[0].new)] += 1
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


def test_who_guesses_wrong_is_asked_less_and_less():
    trust, asked = Trust(), []
    for step in range(100):
        if trust.granted():
            asked.append(step)
            trust.learn(5, 1)
    assert asked == [0, 2, 5, 10, 19, 36, 69], "after 1, 2, 4, 8, 16, 32 steps without"
    trust.learn(5, 2)
    assert trust.granted() and not trust.learn(5, 3) and trust.granted(), "two that come true pay"
    trust.learn(1, 1)
    assert trust.granted() and trust.acceptance == (7 + 2 + 3 + 1) / (35 + 5 + 5 + 1)


def test_a_text_that_can_not_be_guessed_costs_little(model):
    class Wrong:
        asked = 0

        def guess(self, row, count):
            self.asked += 1
            return [39] * count

    wrong = Wrong()
    row, steps = speculate(model, Request((1, 2), max_tokens=40, choosers=(Ban((39,)), Greedy())), wrong)
    assert steps == len(row.new) == 40 and wrong.asked == 6 and row.trust.accepted == 0


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
        assert speculate(model, Request(prompt, max_tokens=9), draft)[0].new == answer(model, prompt, max_tokens=9).new


def test_from_a_source_and_after_a_prefix(model, translator, slowly, answer):
    row, _ = speculate(translator, Request((1,), (5, 6, 7), max_tokens=9), LookUp())
    assert row.new == slowly(translator, (1,), 9, (5, 6, 7))
    prefix = Prefix(model, (1, 2, 3))
    row, _ = speculate(model, Request((1, 2, 3, 4), max_tokens=9, prefix=prefix), LookUp())
    assert row.new == answer(model, (1, 2, 3, 4), max_tokens=9).new


def test_a_draft_that_ends_sooner_guesses_less(build, answer):
    model, short = build("rotary"), build("learned", longest=8, seed=5)
    assert (
        speculate(model, Request((1, 2, 3), max_tokens=12), Draft(short))[0].new
        == answer(model, (1, 2, 3), max_tokens=12).new
    )


@pytest.mark.parametrize("choosers", WAYS, ids=lambda ways: type(ways[0]).__name__)
def test_many_rows_guess_together(model, answer, choosers):
    """Rows join and leave a batch that guesses, and every text is the one there would have been alone."""
    rng = random.Random(0)
    asked = [
        Request(
            tuple(rng.choices(range(6), k=rng.randint(1, 12))),
            choosers=choosers,
            max_tokens=rng.randint(1, 20),
            seed=seed,
        )
        for seed in range(12)
    ]
    for rows in (1, 2, 3, 4, 8):
        engine = Engine(model, rows=rows, prefill=10, by=LookUp())
        made = [engine.submit(request) for request in asked]
        engine.run()
        wanted = [answer(model, r.prompt, choosers, r.max_tokens, seed=r.seed).new for r in asked]
        assert [row.new for row in made] == wanted
        assert all(row.trust.accepted <= row.trust.drafted for row in made)
        assert sum(row.trust.drafted for row in made) > 0


def test_the_compiled_step_guesses_as_modules_do(build):
    """In float32 the compiled step reads the guesses; where someone listens, the modules do."""
    model = build().float()
    asked = [Request((1, 2, 1, 2, seed), choosers=(Temperature(0.5),), max_tokens=15, seed=seed) for seed in range(3)]

    def told():
        engine = Engine(model, rows=3, by=LookUp(longest=1))
        rows = [engine.submit(request) for request in asked]
        engine.run()
        return [(row.new, row.trust.drafted, row.trust.accepted) for row in rows], engine.slots.stepper[1]

    by_step, stepper = told()
    hook = model.decoder.register_forward_hook(lambda *_: None)
    by_modules, nobody = told()
    hook.remove()
    assert by_step == by_modules and sum(drafted for _, drafted, _ in by_step) > 0
    assert nobody is None and (stepper is not None or missing())


def test_a_step_reads_no_more_than_eight_tokens(model):
    read = []
    hook = model.decoder.register_forward_pre_hook(lambda module, args: read.append(args[0].ids.numel()))
    engine = Engine(model, rows=3, by=LookUp(longest=1))
    rows = [engine.submit(Request((1, 1, 1), max_tokens=12, seed=seed)) for seed in range(3)]
    engine.run()
    hook.remove()
    assert read[0] == 9 and max(read[1:]) <= 8 and all(row.trust.drafted for row in rows)


def test_after_an_interruption_guesses_leave_no_trace(build, answer):
    """Ctrl-C in any layer of a step that reads guesses: the next step begins with what the rows have said."""
    model = build()
    asked = [Request((1, 2, 1, 2, 1), choosers=(Temperature(0.5),), max_tokens=15, seed=seed) for seed in range(4)]
    wanted = [answer(model, r.prompt, r.choosers, 15, seed=r.seed).new for r in asked]
    layer, calls = model.decoder.layers[1].ffn, []

    def interrupt(*_):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt

    engine = Engine(model, rows=4, by=LookUp())
    rows = [engine.submit(request) for request in asked]
    hook, more = layer.register_forward_hook(interrupt), True
    while more:
        try:
            more = engine.step()
        except KeyboardInterrupt:
            continue
    hook.remove()
    assert [row.new for row in rows] == wanted and len(calls) > 3


def test_faults(model, translator, build):
    with pytest.raises(BadSetting, match="both models must have one vocabulary, got 30 and 40"):
        Engine(model, by=Draft(build(vocab=30)))
    with pytest.raises(BadSetting, match="must have one stack"):
        Draft(translator)
    with pytest.raises(BadSetting, match="guesses must be from 1 to 64"):
        Engine(model, by=LookUp(), guesses=0)
    broken = build()
    with torch.no_grad():
        broken.decoder.final_norm.weight.fill_(torch.nan)
    assert isinstance(speculate(broken, Request((1,)), LookUp())[0].fault, CheckFailed)
