"""Guessing changes how soon an answer comes, never the answer."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from headwater.cpu.build import unavailable_reason
from headwater.errors import BadSetting, CheckFailed
from headwater.generation.engine import Engine
from headwater.generation.penalties import AllowedTokens, NoRepeatNgram, RepetitionPenalty, SuppressTokens
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import AcceptanceTracker, Request
from headwater.generation.sampling import Greedy, Temperature, TopK, TopP
from headwater.generation.speculative import Draft, PromptLookup

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
    engine, steps = Engine(model, max_num_seqs=1, drafter=drafter, **more), 1
    row = engine.submit(request)
    while engine.step():
        steps += 1
    return row, steps


@pytest.mark.parametrize("processors", WAYS, ids=lambda ways: type(ways[0]).__name__)
@pytest.mark.parametrize("guesses", [1, 5])
def test_the_text_is_the_same(model, small, answer, processors, guesses):
    for seed in range(4):
        request = Request(
            (1, 2, 3, 1, 2), processors=processors, max_tokens=25, seed=seed, stop_token_ids=frozenset({seed})
        )
        expected = answer(model, request.prompt_ids, processors, 25, seed=seed, stop_token_ids=frozenset({seed}))
        for drafter in (PromptLookup(), Draft(small), Draft(model)):
            row, _ = speculate(model, request, drafter, num_draft_tokens=guesses)
            assert (row.output_ids, row.finish_reason) == (expected.output_ids, expected.finish_reason)


def test_a_perfect_draft_is_always_right_and_saves_readings(model, small):
    request = Request((1, 2), processors=(Temperature(1.0),), max_tokens=24)
    (perfect, quick), (poor, slow) = speculate(model, request, Draft(model)), speculate(model, request, Draft(small))
    assert perfect.acceptance_tracker.acceptance_rate == 1 and quick == 1 + 4, (
        "the prompt, then five guesses and one token of its own a step"
    )
    assert poor.acceptance_tracker.acceptance_rate < 1 and quick < slow <= 24


def test_acceptance_is_what_was_counted(model):
    class Always:
        def propose(self, sequence, max_tokens):
            return [7] * max_tokens

    request = Request((1, 2), processors=(AllowedTokens((7, 8)), Temperature(2.0)), max_tokens=40, seed=1)
    row, steps = speculate(model, request, Always(), num_draft_tokens=2)
    trust = row.acceptance_tracker
    assert 0 < trust.accepted <= row.output_ids.count(7) and len(row.output_ids) == trust.accepted + steps
    assert trust.acceptance_rate == trust.accepted / trust.drafted


def test_the_distribution_is_the_model_s(build, small):
    """Of every text of two tokens, its share over many seeds: chi-square against the exact probabilities."""
    vocab, many = 3, 500
    model, draft = build(vocab=vocab, seed=1), Draft(build(vocab=vocab, seed=5, d_model=16, layers=1))
    counts = np.zeros((vocab, vocab))
    for seed in range(many):
        request = Request((1, 2), processors=(Temperature(1.3),), max_tokens=2, seed=seed)
        counts[tuple(speculate(model, request, draft, num_draft_tokens=2)[0].output_ids)] += 1
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


def test_rejected_drafts_back_off_exponentially():
    trust, asked = AcceptanceTracker(), []
    for step in range(100):
        if trust.should_draft():
            asked.append(step)
            trust.update(5, 1)
    assert asked == [0, 2, 5, 10, 19, 36, 69], "after 1, 2, 4, 8, 16, 32 steps without"
    trust.update(5, 2)
    assert trust.should_draft() and not trust.update(5, 3) and trust.should_draft(), "two that come true pay"
    trust.update(1, 1)
    assert trust.should_draft() and trust.acceptance_rate == (7 + 2 + 3 + 1) / (35 + 5 + 5 + 1)


def test_unpredictable_text_costs_little_drafting(model):
    class Wrong:
        asked = 0

        def propose(self, sequence, max_tokens):
            self.asked += 1
            return [39] * max_tokens

    wrong = Wrong()
    row, steps = speculate(model, Request((1, 2), max_tokens=40, processors=(SuppressTokens((39,)), Greedy())), wrong)
    assert steps == len(row.output_ids) == 40 and wrong.asked == 6 and row.acceptance_tracker.accepted == 0


def test_look_up_finds_the_longest_and_latest():
    from headwater.generation.request import SequenceState

    def guess(text, count=3, **more):
        return list(PromptLookup(**more).propose(SequenceState(Request(tuple(text)), 9), count))

    assert guess([1, 2, 3, 4, 9, 2, 3]) == [4, 9, 2]
    assert guess([1, 2, 5, 1, 2, 6, 1, 2]) == [6, 1, 2], "the latest of two"
    assert guess([7, 1, 2, 5, 8, 2, 6, 7, 1, 2], max_ngram_size=3) == [5, 8, 2], "the longest before the latest"
    assert guess([7, 1, 2, 5, 8, 2, 6, 7, 1, 2], max_ngram_size=1) == [6, 7, 1]
    assert guess([1, 2, 3]) == [] and guess([1]) == [] and guess([1, 1]) == [1]


def test_a_draft_serves_one_row_after_another(model, small, answer):
    draft = Draft(small)
    for prompt in ((1, 2, 3), (1, 2, 4, 4), (9,)):
        assert (
            speculate(model, Request(prompt, max_tokens=9), draft)[0].output_ids
            == answer(model, prompt, max_tokens=9).output_ids
        )


def test_from_a_source_and_after_a_prefix(model, translator, slowly, answer):
    row, _ = speculate(translator, Request((1,), (5, 6, 7), max_tokens=9), PromptLookup())
    assert row.output_ids == slowly(translator, (1,), 9, (5, 6, 7))
    prefix = Prefix(model, (1, 2, 3))
    row, _ = speculate(model, Request((1, 2, 3, 4), max_tokens=9, prefix=prefix), PromptLookup())
    assert row.output_ids == answer(model, (1, 2, 3, 4), max_tokens=9).output_ids


def test_a_draft_model_with_fewer_positions_drafts_fewer_tokens(build, answer):
    model, short = build("rotary"), build("learned", max_positions=8, seed=5)
    assert (
        speculate(model, Request((1, 2, 3), max_tokens=12), Draft(short))[0].output_ids
        == answer(model, (1, 2, 3), max_tokens=12).output_ids
    )


@pytest.mark.parametrize("processors", WAYS, ids=lambda ways: type(ways[0]).__name__)
def test_several_sequences_are_drafted_in_one_step(model, answer, processors):
    """Rows join and leave a batch that guesses, and every text is the one there would have been alone."""
    rng = random.Random(0)
    asked = [
        Request(
            tuple(rng.choices(range(6), k=rng.randint(1, 12))),
            processors=processors,
            max_tokens=rng.randint(1, 20),
            seed=seed,
        )
        for seed in range(12)
    ]
    expected = [answer(model, r.prompt_ids, processors, r.max_tokens, seed=r.seed).output_ids for r in asked]
    for rows in (1, 2, 3, 4, 8):
        engine = Engine(model, max_num_seqs=rows, max_prefill_tokens=10, drafter=PromptLookup())
        made = [engine.submit(request) for request in asked]
        engine.run()
        assert [row.output_ids for row in made] == expected
        assert all(row.acceptance_tracker.accepted <= row.acceptance_tracker.drafted for row in made)
        assert sum(row.acceptance_tracker.drafted for row in made) > 0


def test_speculation_with_the_native_decoder_equals_the_modules(build):
    """In float32 the compiled step reads the guesses; where someone listens, the modules do."""
    model = build().float()
    asked = [Request((1, 2, 1, 2, seed), processors=(Temperature(0.5),), max_tokens=15, seed=seed) for seed in range(3)]

    def message_of():
        engine = Engine(model, max_num_seqs=3, drafter=PromptLookup(max_ngram_size=1))
        rows = [engine.submit(request) for request in asked]
        engine.run()
        return [
            (row.output_ids, row.acceptance_tracker.drafted, row.acceptance_tracker.accepted) for row in rows
        ], engine.cache.native_decoder[1]

    by_step, stepper = message_of()
    hook = model.decoder.register_forward_hook(lambda *_: None)
    by_modules, nobody = message_of()
    hook.remove()
    assert by_step == by_modules and sum(drafted for _, drafted, _ in by_step) > 0
    assert nobody is None and (stepper is not None or unavailable_reason())


def test_a_step_reads_no_more_than_eight_tokens(model):
    read = []
    hook = model.decoder.register_forward_pre_hook(lambda module, args: read.append(args[0].ids.numel()))
    engine = Engine(model, max_num_seqs=3, drafter=PromptLookup(max_ngram_size=1))
    rows = [engine.submit(Request((1, 1, 1), max_tokens=12, seed=seed)) for seed in range(3)]
    engine.run()
    hook.remove()
    assert read[0] == 9 and max(read[1:]) <= 8 and all(row.acceptance_tracker.drafted for row in rows)


def test_after_an_interruption_drafts_leave_no_trace(build, answer):
    """Ctrl-C in any layer of a step that reads guesses: the next step begins with what the rows have said."""
    model = build()
    asked = [Request((1, 2, 1, 2, 1), processors=(Temperature(0.5),), max_tokens=15, seed=seed) for seed in range(4)]
    expected = [answer(model, r.prompt_ids, r.processors, 15, seed=r.seed).output_ids for r in asked]
    layer, calls = model.decoder.layers[1].ffn, []

    def interrupt(*_):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt

    engine = Engine(model, max_num_seqs=4, drafter=PromptLookup())
    rows = [engine.submit(request) for request in asked]
    hook, more = layer.register_forward_hook(interrupt), True
    while more:
        try:
            more = engine.step()
        except KeyboardInterrupt:
            continue
    hook.remove()
    assert [row.output_ids for row in rows] == expected and len(calls) > 3


def test_faults(model, translator, build):
    with pytest.raises(BadSetting, match="both models must have one vocabulary, got 30 and 40"):
        Engine(model, drafter=Draft(build(vocab=30)))
    with pytest.raises(BadSetting, match="must have one stack"):
        Draft(translator)
    with pytest.raises(BadSetting, match="num_draft_tokens must be from 1 to 64"):
        Engine(model, drafter=PromptLookup(), num_draft_tokens=0)
    broken = build()
    with torch.no_grad():
        broken.decoder.final_norm.weight.fill_(torch.nan)
    assert isinstance(speculate(broken, Request((1,)), PromptLookup())[0].fault, CheckFailed)
