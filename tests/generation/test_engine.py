"""The engine: every answer is the one its request gets alone, in order, within bounds, through any trouble."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadInput, BadSetting, CheckFailed, TooLong, Unavailable
from headwater.generation.engine import Engine
from headwater.generation.penalties import RepetitionPenalty, SuppressTokens
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import Request
from headwater.generation.sampling import Greedy, Temperature, TopK, TopP
from headwater.generation.speculative import PromptLookup

WAYS = [
    (Greedy(),),
    (Temperature(1.0),),
    (Temperature(1.5), TopK(7)),
    (RepetitionPenalty(1.3), Temperature(0.9), TopP(0.8)),
]


def asked(rng, count):
    return [
        Request(
            tuple(rng.randrange(40) for _ in range(rng.randint(1, 12))),
            processors=rng.choice(WAYS),
            max_tokens=rng.randint(0, 12),
            stop_token_ids=frozenset({rng.randrange(40)}),
            seed=rng.randrange(1000),
        )
        for _ in range(count)
    ]


def alone(model, request):
    engine = Engine(model)
    row = engine.submit(request)
    engine.run()
    return row


@pytest.mark.parametrize("shape", ["rotary", "learned", "alibi", "relative", "xl"])
def test_greedy_is_the_plainest_decoding(build, slowly, answer, shape):
    model = build(shape)
    for prompt in ([1, 2, 3], [4]):
        assert answer(model, prompt).output_ids == slowly(model, prompt, 10)


def test_greedy_from_a_source(translator, slowly):
    engine, asks = Engine(translator, max_num_seqs=2), [((1,), (5, 6, 7)), ((1,), (8,)), ((1, 2), (9, 9, 9, 9, 9, 9))]
    rows = [engine.submit(Request(prompt, source, max_tokens=8)) for prompt, source in asks]
    engine.run()
    for row, (prompt, source) in zip(rows, asks, strict=True):
        assert row.output_ids == slowly(translator, prompt, 8, source)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 20))
def test_together_is_alone(model, seed, rows, prefill):
    """Any requests, joining at any time, any number of rows, prompts read in any pieces."""
    rng = random.Random(seed)
    engine, requests, got = Engine(model, max_num_seqs=rows, max_prefill_tokens=prefill), asked(rng, 7), []
    for request in requests:
        got.append(engine.submit(request))
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run()
    for request, row in zip(requests, got, strict=True):
        expected = alone(model, request)
        assert (row.output_ids, row.finish_reason) == (expected.output_ids, expected.finish_reason)
        torch.testing.assert_close(
            [e.logprob for e in row.events], [e.logprob for e in expected.events], atol=1e-5, rtol=0
        )
    assert all(row.finish_reason for row in got) and not engine.waiting


def test_another_seed_is_another_text(model, answer):
    texts = {tuple(answer(model, [1], (Temperature(1.5),), seed=seed).output_ids) for seed in range(10)}
    assert len(texts) > 5, "so that the law above says something"


def test_first_come_first_served(model):
    engine = Engine(model, max_num_seqs=2)
    rows = [engine.submit(Request((1, 2), max_tokens=n)) for n in (5, 1, 1, 1, 5)]
    begun = []
    while engine.step():
        begun += [row for row in rows if row.events and row not in begun]
    begun += [row for row in rows if row.events and row not in begun]
    assert begun == rows


def test_a_long_prompt_does_not_hold_up_the_others(model):
    engine = Engine(model, max_num_seqs=4, max_prefill_tokens=4)
    quick = engine.submit(Request((1,), max_tokens=12))
    engine.step()
    long = engine.submit(Request(tuple(i % 40 for i in range(30)), max_tokens=3))
    for step in range(7):
        engine.step()
        assert len(quick.events) == step + 2 and not long.events, "30 tokens in pieces of 4 take 8 steps"
    engine.step()
    assert len(long.events) == 1


def test_a_cancelled_request_frees_its_cache_row_within_one_step(model):
    engine = Engine(model, max_num_seqs=1)
    first, second = (engine.submit(Request((1, 2), max_tokens=50)) for _ in range(2))
    engine.step()
    engine.cancel(first)
    engine.step()
    assert first.finish_reason == "cancelled" and len(first.events) == 1 and len(second.events) == 1
    engine.cancel(second)
    assert not engine.step() and not engine.running and not engine.waiting


def test_cancelled_while_waiting_or_joining(model):
    engine = Engine(model, max_num_seqs=2, max_prefill_tokens=3)
    rows = [engine.submit(Request(tuple(range(9)), max_tokens=2)) for _ in range(3)]
    engine.step()
    engine.cancel(rows[0])
    engine.cancel(rows[2])
    engine.run()
    assert [row.finish_reason for row in rows] == ["cancelled", "length", "cancelled"]
    assert rows[1].output_ids == alone(model, Request(tuple(range(9)), max_tokens=2)).output_ids


def test_the_cache_is_bounded(model):
    engine, rng = Engine(model, max_num_seqs=3, max_seq_len=24), random.Random(0)
    for request in asked(rng, 20):
        engine.submit(request)
    widest = 0
    while engine.step():
        assert len(engine.running) <= 3
        widest = max(widest, engine.cache.nbytes)
    assert 0 < widest <= 3 * 24 * 2 * 2 * 2 * 8 * 8
    with pytest.raises(TooLong, match="a sequence may have 24 tokens, got a request for 25"):
        engine.submit(Request((1,) * 5, max_tokens=20))


def test_the_queue_is_bounded(model):
    engine = Engine(model, max_num_seqs=1, max_queue_size=2)
    for _ in range(2):
        engine.submit(Request((1,)))
    with pytest.raises(Unavailable, match="at most 2 requests may wait"):
        engine.submit(Request((1,)))


# ------------------------------------------------------------------------------------------------------------ trouble


def poisoned(build, token):
    """A model that knows no answer after one of its tokens."""
    model = build()
    with torch.no_grad():
        model.decoder.embed.tokens.weight = torch.nn.Parameter(model.decoder.embed.tokens.weight.clone())
        model.decoder.embed.tokens.weight[token] = torch.nan
    return model


@pytest.mark.parametrize("together", [True, False])
def test_a_fault_ends_its_own_request(build, slowly, together):
    model = poisoned(build, 7)
    engine = Engine(model, max_num_seqs=3)
    good = engine.submit(Request((1, 2), max_tokens=20))
    if not together:
        engine.step()
    bad = engine.submit(Request((1, 7, 2), max_tokens=20))
    banned = engine.submit(Request((1, 2), processors=(SuppressTokens(tuple(range(40))),), max_tokens=20))
    late = engine.submit(Request((3, 4, 5), max_tokens=20))
    engine.run()
    assert bad.finish_reason == banned.finish_reason == "error" and not bad.events
    assert isinstance(
        bad.fault, CheckFailed
    ) and "the model's logits must be numbers, got NaN or inf after token 3" in str(bad.fault)
    assert isinstance(banned.fault, BadSetting) and "at least one token must be left, got none" in str(banned.fault)
    assert good.output_ids == slowly(model, [1, 2], 20) and late.output_ids == slowly(model, [3, 4, 5], 20)


def test_a_fault_while_reading_prompts_ends_its_own_request(build):
    model = build()

    def refuse(module, args):
        if (args[0].ids == 7).any():
            raise BadInput("no sevens")

    hook = model.decoder.register_forward_pre_hook(refuse)
    engine = Engine(model, max_num_seqs=3)
    rows = [engine.submit(Request(prompt, max_tokens=3)) for prompt in ((1, 2), (7,), (3,))]
    engine.run()
    hook.remove()
    assert [row.finish_reason for row in rows] == ["length", "error", "length"]
    assert rows[0].output_ids == alone(model, Request((1, 2), max_tokens=3)).output_ids


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_after_an_interruption_everything_goes_on(build, at):
    """Ctrl-C in the middle of any layer, at any time, ten times over."""
    model = build()
    requests = asked(random.Random(3), 6)
    expected = [alone(model, request).output_ids for request in requests]
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) % 7 == at % 7 and len(calls) > at:
            raise KeyboardInterrupt

    modules = [m for m in model.modules() if not list(m.children())]
    engine = Engine(model, max_num_seqs=3, max_prefill_tokens=6)
    rows = [engine.submit(request) for request in requests]
    hooks = [module.register_forward_hook(interrupt) for module in modules[:: max(1, at)]]
    for _ in range(10):
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    for hook in hooks:
        hook.remove()
    engine.run()
    assert [row.output_ids for row in rows] == expected


@pytest.mark.parametrize("way", ["modules", "compiled step", "speculative"])
def test_interrupted_between_the_lines(build, way):
    """Ctrl-C anywhere in the Python of generation, line by line; modules read double precision, the step float32."""
    import sys

    model, by = (
        build() if way == "modules" else build().float(),
        PromptLookup(max_ngram_size=1) if way == "speculative" else None,
    )
    requests = asked(random.Random(5), 4)
    expected = [(alone(model, request).output_ids, alone(model, request).text) for request in requests]
    for stop_at in range(1, 900, 23):
        engine = Engine(model, max_num_seqs=2, max_prefill_tokens=6, drafter=by)
        rows = [engine.submit(request) for request in requests]
        lines = []

        def trace(frame, event, arg, lines=lines, stop_at=stop_at):
            if "generation" not in frame.f_code.co_filename:
                return None
            lines.append(1) if event == "line" else None
            if event == "line" and len(lines) == stop_at:
                raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            engine.run()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        engine.run()
        assert [(row.output_ids, row.text) for row in rows] == expected, stop_at


def test_events_come_once_and_in_order(model):
    engine = Engine(model, max_num_seqs=2)
    rows = [engine.submit(request) for request in asked(random.Random(9), 5)]
    captured = {id(row): [] for row in rows}
    for row, event in engine.stream():
        captured[id(row)].append(event)
    assert [captured[id(row)] for row in rows] == [row.events for row in rows]


# ------------------------------------------------------------------------------------------------------------- prefix


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5), (1, 2, 9), (7,), (1,)])
def test_a_shared_prefix_changes_no_answer(model, prompt):
    prefix = Prefix(model, (1, 2, 3, 4, 5))
    engine = Engine(model, max_num_seqs=3)
    rows = [engine.submit(Request(prompt, prefix=prefix, max_tokens=8)) for _ in range(2)]
    other = engine.submit(Request((9, 9), max_tokens=8))
    engine.run()
    assert rows[0].output_ids == rows[1].output_ids == alone(model, Request(prompt, max_tokens=8)).output_ids
    assert other.output_ids == alone(model, Request((9, 9), max_tokens=8)).output_ids


def test_a_prefix_is_read_once_and_grows(model):
    read = []
    hook = model.decoder.register_forward_pre_hook(lambda module, args: read.append(args[0].ids.shape[1]))
    prefix = Prefix(model, (1, 2, 3, 4, 5))
    prefix.update((1, 2, 3, 8, 9, 10))
    engine = Engine(model)
    engine.submit(Request((1, 2, 3, 8, 9, 10, 11), prefix=prefix, max_tokens=1))
    engine.run()
    hook.remove()
    assert read == [5, 3, 1]


def test_a_prefix_of_another_model_is_refused(model, build, translator):
    with pytest.raises(BadSetting, match="must be computed by the same model"):
        Engine(model).submit(Request((1, 2), prefix=Prefix(build(seed=1), (1,))))
    with pytest.raises(BadInput, match="depends on its source"):
        Prefix(translator, (1,))
