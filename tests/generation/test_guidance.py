"""Classifier-free guidance: the formula, and the laws of a batch."""

from __future__ import annotations

import pytest
import torch

import headwater
from headwater.errors import BadInput, BadSetting
from headwater.generation.guidance import Guidance, run_guided, stream_guided
from headwater.generation.request import Request
from headwater.generation.sampling import Temperature, TopK

VOCAB = 24
EMPTY = (1,)


@pytest.fixture(scope="module")
def decoder():
    return headwater.decoder(VOCAB, d_model=32, heads=4, layers=2).build(seed=0).double().eval()


@pytest.fixture(scope="module")
def seq2seq():
    return headwater.transformer(VOCAB, d_model=32, heads=4, layers=2).build(seed=0).double().eval()


@torch.no_grad()
def expected_tokens(model, request, scale, count):
    """Greedy tokens of the guided logits, without any cache."""
    tokens = []
    for _ in range(count):
        if request.source_ids is None:
            rows = [torch.tensor([[*ids, *tokens]]) for ids in (request.prompt_ids, EMPTY)]
            with_prompt, without = (model(ids)[0, -1] for ids in rows)
        else:
            ids = torch.tensor([[*request.prompt_ids, *tokens]])
            sources = [torch.tensor([source]) for source in (request.source_ids, EMPTY)]
            with_prompt, without = (model(ids, source=source)[0, -1] for source in sources)
        tokens.append(int((without + scale * (with_prompt - without)).argmax()))
    return tokens


@pytest.mark.parametrize("scale", [0.0, 1.0, 3.0, 16.0])
@pytest.mark.parametrize("kind", ["decoder", "seq2seq"])
def test_the_tokens_are_those_of_the_formula(kind, scale, request):
    model = request.getfixturevalue(kind)
    source = (5, 6, 7) if kind == "seq2seq" else None
    prompts = [(2, 9), (3,), (4, 8, 8, 15)]  # of several lengths in one batch
    requests = [Request(prompt, source, max_tokens=6) for prompt in prompts]
    states = run_guided(model, requests, Guidance(EMPTY, scale))
    for state, one in zip(states, requests, strict=True):
        assert state.output_ids == expected_tokens(model, one, scale, 6)


def test_scale_one_is_the_model_itself(decoder):
    sampling = {"temperature": 1.0, "top_k": 7, "seed": 3, "max_tokens": 9}
    plain = headwater.generate(decoder, [4, 5, 6], **sampling)
    guided = headwater.generate(decoder, [4, 5, 6], strategy=Guidance(EMPTY, 1.0), **sampling)
    assert guided.ids == plain.ids
    assert headwater.generate(decoder, [4, 5, 6], strategy=Guidance(EMPTY, 9.0), **sampling).ids != plain.ids


def test_a_sequence_does_not_depend_on_the_others(decoder):
    processors = (Temperature(1.0), TopK(5))
    requests = [
        Request((2 + i,), processors=processors, max_tokens=3 + i % 5, stop_token_ids=frozenset(range(i % 12)), seed=i)
        for i in range(20)
    ]
    together = run_guided(decoder, requests, Guidance(EMPTY, 2.0))
    alone = [run_guided(decoder, [one], Guidance(EMPTY, 2.0))[0] for one in requests]
    assert [s.output_ids for s in together] == [s.output_ids for s in alone]
    assert [s.finish_reason for s in together] == [s.finish_reason for s in alone]
    assert {s.finish_reason for s in together} == {"eos", "length"}


def test_each_step_adds_one_token(decoder):
    lengths = [
        len(states[0].output_ids) for states in stream_guided(decoder, [Request((2,), max_tokens=4)], Guidance(EMPTY))
    ]
    assert lengths == [0, 1, 2, 3, 4]
    assert [len(s[0].output_ids) for s in stream_guided(decoder, [Request((2,), max_tokens=0)], Guidance(EMPTY))] == [0]


def test_what_guidance_refuses(decoder):
    with pytest.raises(BadSetting, match="scale must be from 0 to 1000"):
        Guidance(EMPTY, 1001.0)
    with pytest.raises(BadSetting, match="empty must have at least one token"):
        Guidance(())
    with pytest.raises(BadInput, match="prompt ids must be from 0 to 23, got 99"):
        headwater.generate(decoder, [1], strategy=Guidance((99,)))


def test_a_token_that_is_suppressed_everywhere_ends_in_words(decoder):
    with pytest.raises(BadSetting, match="at least one token must be left"):
        headwater.generate(decoder, [1], strategy=Guidance(EMPTY), suppress_tokens=list(range(VOCAB)), max_tokens=2)
