"""headwater.generate: what a user asks, what he gets, and one line for everything that cannot be answered."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.errors import BadInput, BadSetting, CheckFailed, Fault, TooLong
from headwater.generation.api import TextModel, build_requests, generate, stream
from headwater.generation.beam import Beam
from headwater.generation.prefix_cache import Prefix
from headwater.generation.sampling_params import PROCESSORS, SamplingParams
from headwater.generation.speculative import Draft, PromptLookup
from headwater.text.train import train_tokenizer


def message_of(fault):
    text = str(fault.value)
    assert "\n" not in text and len(text) < 300
    return text


# --------------------------------------------------------------------------------------------------------- answers


def test_an_answer_prints_as_its_text(loaded):
    answer = generate(loaded, "Hello", max_tokens=9, temperature=1.2, seed=4)
    assert str(answer) == answer.text == loaded.tokenizer.decode([i for i in answer.ids if i != 3])
    assert answer.finish_reason == "length" and len(answer.ids) == len(answer.logprobs) == 9
    assert answer.prompt_ids == tuple(b"Hello") and all(p <= 0 for p in answer.logprobs)


def test_log_probabilities_are_the_model_s_own(loaded):
    answer = generate(loaded, "Hello", max_tokens=5, temperature=0.3, top_k=4, repetition_penalty=1.5, top_logprobs=3)
    ids = torch.tensor([[*b"Hello", *answer.ids]])
    with torch.no_grad():
        logprobs = loaded.model(ids)[0, 4:-1].log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(answer.logprobs), logprobs.gather(1, ids[0, 5:, None])[:, 0].float(), atol=1e-5, rtol=0
    )
    top, best = logprobs.topk(3)
    assert [[i for i, _ in step] for step in answer.top_logprobs] == best.tolist()
    torch.testing.assert_close(
        torch.tensor([[p for _, p in step] for step in answer.top_logprobs]), top.float(), atol=1e-5, rtol=0
    )


def test_the_trace_has_every_logits_processor(loaded):
    answer = generate(loaded, "Hi", max_tokens=3, temperature=0.5, top_k=5, trace=True)
    for token, stages in zip(answer.ids, answer.trace, strict=True):
        assert [stage.name for stage in stages] == ["the model", "Temperature(value=0.5)", "TopK(k=5)"]
        assert all(float(stage.probs.sum()) == pytest.approx(1) for stage in stages)
        model, warm, few = (stage.probs for stage in stages)
        torch.testing.assert_close(warm, (model.log() / 0.5).softmax(-1))
        assert (few > 0).sum() == 5 and few[token] > 0 and stages[2].top(9)[0][0] == int(model.argmax())
    why = answer.explain(loaded.tokenizer)
    assert why.count("\n") == 11 and "TopK(k=5)" in why and "5 left" in why
    with pytest.raises(BadInput, match="needs a trace"):
        generate(loaded, "Hi", max_tokens=3).explain()


def test_the_stream_equals_the_completion(loaded):
    for seed in range(5):
        settings_ = {"max_tokens": 40, "temperature": 1.3, "seed": seed, "stop": "e"}
        events = list(stream(loaded, "Héllo", **settings_))
        answer = generate(loaded, "Héllo", **settings_)
        assert "".join(event.text for event in events) == answer.text and "e" not in answer.text
        assert [event.finish_reason for event in events][-1] == answer.finish_reason and all(
            e.finish_reason is None for e in events[:-1]
        )
        by = list(stream(loaded, "Héllo", strategy=PromptLookup(), **settings_))
        assert [e.token for e in by] == [e.token for e in events]


def test_stop_strings_and_stop_tokens(loaded):
    whole = generate(loaded, "a", max_tokens=60, temperature=1.5, seed=2)
    mark = whole.text[10:12]
    cut = generate(loaded, "a", max_tokens=60, temperature=1.5, seed=2, stop=[mark, "nowhere"])
    assert cut.text == whole.text[: whole.text.index(mark)] and cut.finish_reason == "stop"
    token = whole.ids[5]
    ended = generate(loaded, "a", max_tokens=60, temperature=1.5, seed=2, stop=token)
    assert ended.finish_reason == "eos" and ended.ids == whole.ids[: whole.ids.index(token) + 1]
    assert ended.text == loaded.tokenizer.decode(ended.ids[:-1]), "an end token is not shown"


def test_one_many_and_several_of_each(loaded):
    prompts = ["a", "bcd", "ef"]
    texts = [str(generate(loaded, prompt, max_tokens=6, temperature=1, seed=3)) for prompt in prompts]
    assert [str(a) for a in generate(loaded, prompts, max_tokens=6, temperature=1, seed=3)] == texts
    three = generate(loaded, "bcd", n=3, max_tokens=6, temperature=1, seed=3)
    assert str(three[0]) == texts[1] and len({a.ids for a in three}) == 3
    assert [[str(a) for a in one] for one in generate(loaded, prompts, n=2, max_tokens=6, temperature=1, seed=3)][
        1
    ] == [str(a) for a in three[:2]]
    seeded = generate(loaded, ["a"] * 3, max_tokens=6, temperature=1, seed=[3, 4, 3])
    assert str(seeded[0]) == str(seeded[2]) == texts[0] != str(seeded[1])
    with pytest.raises(BadSetting, match="one seed, or one for each of 2 prompts, got 3"):
        generate(loaded, ["a", "b"], seed=[1, 2, 3])


def test_beam_search_and_speculative_decoding(loaded, build):
    best = generate(loaded, "ab", strategy=Beam(4, num_return_sequences=3), max_tokens=5)
    assert len(best) == 3 and best[0].score >= best[1].score >= best[2].score
    assert generate(loaded, ["ab"], strategy=Beam(4), max_tokens=5)[0].ids == best[0].ids
    plain = generate(loaded, "ab", max_tokens=9, temperature=1)
    for by in (PromptLookup(), Draft(build(vocab=256, layers=1, seed=1))):
        guessed = generate(loaded, "ab", strategy=by, max_tokens=9, temperature=1)
        assert guessed.ids == plain.ids and 0 <= guessed.acceptance_rate <= 1


def test_a_model_without_tokenizer_takes_and_gives_ids(model, translator):
    answer = generate(model, [1, 2, 3], max_tokens=4)
    assert (
        len(answer.ids) == 4 and answer.text == "" and generate(model, [[1, 2, 3]], max_tokens=4)[0].ids == answer.ids
    )
    with pytest.raises(BadInput) as fault:
        generate(model, "text")
    assert "a model alone reads token ids" in message_of(fault)
    with pytest.raises(BadSetting, match="stop strings need a tokenizer"):
        generate(model, [1], stop="x")
    assert len(generate(translator, [5, 6], decoder_start_ids=[1], max_tokens=4).ids) == 4
    with pytest.raises(BadInput, match="a decoder needs a token to begin with"):
        generate(translator, [5, 6])


def test_a_source_is_the_prompt(translator, letters, make_loaded, slowly):
    class Few(letters):
        def encode(self, text):
            return [ord(c) % 30 for c in text]

    both = make_loaded(translator, Few(), eos_ids=(), decoder_start_id=1)
    assert list(generate(both, "hello", max_tokens=5).ids) == slowly(translator, [1], 5, [ord(c) % 30 for c in "hello"])


def test_the_generation_config_is_applied(build, letters, make_loaded):
    model = build(vocab=256)
    free = generate(make_loaded(model, letters()), "a", max_tokens=4)
    bad = [[free.ids[0]], [1, 2]]
    ruled = generate(make_loaded(model, letters(), bad_words_ids=bad, forced_bos_token_id=66), "a", max_tokens=4)
    assert ruled.ids[0] == 66 and free.ids[0] not in ruled.ids
    assert TextModel.wrap(make_loaded(model, letters())).processors == ()


def test_a_prefix(loaded):
    prefix = Prefix(loaded.model, list(b"Once upon"))
    assert generate(loaded, "Once upon a", prefix=prefix, max_tokens=5) == generate(loaded, "Once upon a", max_tokens=5)


# ----------------------------------------------------------------------------------- every fault in a line (I1 to I20)


@pytest.mark.parametrize("over", [-1, 0, 1, 10**7])
def test_a_prompt_longer_than_the_context(build, over):
    """I1: places 64, one of them for the answer."""
    model, prompt = build("learned"), [1] * (63 + over)
    if over <= 0:
        assert generate(model, prompt).finish_reason == "length"
        return
    with pytest.raises(TooLong) as fault:
        generate(model, prompt)
    assert f"there are 64 positions, got a prompt of {63 + over} tokens" in message_of(fault)


@pytest.mark.parametrize("tokens", [0, 1, 54, 55, 10**5])
def test_prompt_and_answer_longer_than_the_context(build, tokens, loaded):
    """I2: refused before the first step; where max_tokens is not given, what fits is given."""
    model, read = build("learned"), []
    hook = model.decoder.register_forward_pre_hook(lambda *_: read.append(1))
    if tokens <= 54:
        assert len(generate(model, [1] * 10, max_tokens=tokens).ids) == tokens
    else:
        with pytest.raises(TooLong) as fault:
            generate(model, [1] * 10, max_tokens=tokens)
        assert "64 positions, got a prompt of 10 tokens and" in message_of(fault) and not read
    hook.remove()
    assert len(generate(model, [1] * 10).ids) == 54
    with pytest.raises(TooLong, match="there are 200 positions"):
        generate(loaded, "x" * 150, max_tokens=51)


def test_an_enormous_prompt_is_refused_before_it_is_read(loaded):
    with pytest.raises(TooLong, match="a prompt may have 204800 characters, got 1000000"):
        generate(loaded, "x" * 10**6)


def test_a_source_longer_than_its_positions():
    from headwater.families.builders import transformer

    model = transformer(30, 40, d_model=16, heads=2, layers=1, position="learned", max_positions=8).build(seed=0)
    with pytest.raises(TooLong, match="there are 8 positions for the source, got 9"):
        generate(model, [1] * 9, decoder_start_ids=[1])


def test_an_empty_prompt(loaded, build, letters, make_loaded):
    """I3: the token that begins a text, or a fault."""
    assert generate(loaded, "", max_tokens=3).prompt_ids == (2,)
    for none in (make_loaded(loaded.model, letters()), loaded.model):
        with pytest.raises(BadInput) as fault:
            generate(none, "" if none is not loaded.model else [])
        assert "must have at least one token, got none" in message_of(fault)


def test_a_lone_surrogate_is_refused(loaded):
    """I4; NUL is a character like any other."""
    with pytest.raises(BadInput) as fault:
        generate(loaded, "ab\ud83d")
    assert "must be whole text, got half a character at 2" in message_of(fault)
    assert len(generate(loaded, "a\0b", max_tokens=2).ids) == 2


@given(st.lists(st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none(), min_size=1, max_size=4))
@settings(max_examples=60)
def test_ids_of_any_kind(model, ids):
    """I5."""
    if all(type(i) is int and 0 <= i < 40 for i in ids):
        assert len(generate(model, ids, max_tokens=1).ids) == 1
        return
    with pytest.raises(BadInput) as fault:
        generate(model, ids, max_tokens=1)
    assert "prompt ids must be from 0 to 39" in message_of(fault)


numbers = st.floats(allow_nan=True) | st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.just("1")


NAMES = [*PROCESSORS, "max_tokens", "seed", "n", "top_logprobs", "timeout"]


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(NAMES), numbers, max_size=3))
def test_settings_of_any_kind(model, given_):
    """I7, I8, I11: a defined result or a fault of one line."""
    given_ = {"max_tokens": 2, **given_}
    if given_["max_tokens"] is None or (type(given_["max_tokens"]) is int and given_["max_tokens"] > 9):
        given_["max_tokens"] = 9 if given_["max_tokens"] is None else 10**7
    try:
        answers = generate(model, [1, 2], **given_)
    except Fault as fault:
        assert "\n" not in str(fault) and len(str(fault)) < 300
        return
    for answer in answers if isinstance(answers, list) else [answers]:
        assert len(answer.ids) <= given_["max_tokens"] and all(map(math.isfinite, answer.logprobs))


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"temperature": float("nan")}, "Temperature: value must be a finite number"),
        ({"max_tokens": -1}, "max_tokens must be from 0 to 1000000, got -1"),
        ({"max_tokens": 2**63}, "max_tokens must be from 0 to 1000000"),
        ({"n": 10**6}, "n must be from 1 to 256, got 1000000"),
        ({"stop": ["x"] * 10**4}, "stop must be at most 64 strings, got 10000"),
        ({"stop": "x" * 10**6}, "a stop string must have 1 to 1000 characters, got 1000000"),
        ({"stop": 256}, "stop tokens must be from 0 to 255, got [256]"),
        ({"suppress_tokens": list(range(256))}, "at least one token must be left, got none"),
        ({"allowed_tokens": [256]}, "AllowedTokens: tokens must be below the vocabulary's size 256"),
        ({"top_logprobs": 257}, "top_logprobs must be from 0 to 256"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"tempreature": 1}, "generation has no setting 'tempreature'; did you mean 'temperature'?"),
        ({"trace": True, "max_tokens": 10**6}, "there are 200 positions"),
    ],
)
def test_errors_say_what_to_do(loaded, settings_, words):
    with pytest.raises(Fault) as fault:
        generate(loaded, "abc", **settings_)
    assert words in message_of(fault)


def test_a_trace_too_large_for_memory_is_refused(build):
    with pytest.raises(BadSetting, match="a trace may take 536870912 bytes"):
        generate(build(vocab=4000), [1], trace=True, max_tokens=10**5)


def test_an_empty_prompt_of_a_real_tokenizer_begins_with_bos(build, make_loaded):
    tokenizer = train_tokenizer(["once upon a time"], "char", add_bos_eos=False)
    model = build(vocab=len(tokenizer))
    completion = generate(make_loaded(model, tokenizer), "", max_tokens=3)
    assert completion.prompt_ids == (tokenizer.bos_id,)


def test_max_tokens_0_is_an_empty_completion(loaded):
    answer = generate(loaded, "abc", max_tokens=0)
    assert answer.ids == () and answer.text == "" and answer.finish_reason == "length"
    assert list(stream(loaded, "abc", max_tokens=0)) == []


def test_broken_weights(build, letters, make_loaded):
    """I9."""
    model = build(vocab=256)
    with torch.no_grad():
        model.decoder.final_norm.weight.fill_(torch.nan)
    for by in (None, Beam(2), PromptLookup()):
        with pytest.raises(CheckFailed, match="its weights are broken"):
            generate(make_loaded(model, letters()), "abc", strategy=by)
    with pytest.raises(CheckFailed):
        list(stream(make_loaded(model, letters()), "abc"))


def test_a_model_without_language_head_is_refused():
    from headwater.core import ClassificationHead
    from headwater.families.builders import decoder

    with pytest.raises(BadInput, match="must have a language head"):
        generate(decoder(10, head=ClassificationHead(3), d_model=8, heads=2, layers=1).build(seed=0), [1])


def test_json_has_no_nan(loaded):
    """I16."""
    with torch.no_grad():
        answer = generate(loaded, "abc", max_tokens=3, top_logprobs=256)
    plain = answer.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False))["ids"] == list(answer.ids)
    impossible = type(answer)(
        text="", ids=(1,), logprobs=(-math.inf,), finish_reason="eos", top_logprobs=(((2, -math.inf),),)
    )
    assert json.loads(json.dumps(impossible.to_dict(), allow_nan=False))["logprobs"] == [None]


def test_it_ends_in_time(loaded):
    """I17."""
    answer = generate(loaded, "abc", max_tokens=190, timeout=1e-6)
    assert answer.finish_reason == "timeout" and len(answer.ids) == 1


def test_the_same_seed_the_same_text(loaded):
    """I14: 40 prompts, alone and 40 together (and see test_engine)."""
    prompts = [chr(97 + i % 26) * (1 + i % 7) for i in range(40)]
    together = generate(loaded, prompts, max_tokens=6, temperature=0.2, seed=11)
    alone = [generate(loaded, prompt, max_tokens=6, temperature=0.2, seed=11) for prompt in prompts]
    assert [a.ids for a in together] == [a.ids for a in alone] and len({a.ids for a in alone}) > 20


def test_after_ctrl_c_the_next_call_is_a_fresh_one(loaded):
    """I19."""
    expected = generate(loaded, "abc", max_tokens=8, temperature=1)
    events = stream(loaded, "abc", max_tokens=8, temperature=1)
    next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt)
    assert generate(loaded, "abc", max_tokens=8, temperature=1) == expected
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()


def test_requests_are_values(loaded):
    first, second = (build_requests(loaded, ["ab"], SamplingParams(temperature=0.5, stop=["x"]))[0] for _ in range(2))
    assert first == second and first.processors == second.processors


def test_a_model_without_weights_is_refused_in_words(model):
    skeleton = model.spec.on_meta()
    for asked in (lambda: generate(skeleton, [1, 2, 3]), lambda: list(stream(skeleton, [1, 2, 3]))):
        with pytest.raises(BadInput, match="the model must have weights, this one is on the meta device"):
            asked()
