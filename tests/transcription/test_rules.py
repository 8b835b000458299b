"""The rules of the output: equal to the public implementation on random outputs, and what they are for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.transcription import rules as module
from headwater.transcription.rules import OutputRules
from headwater.transcription.tokens import speech_tokens

STAMP = 50363  # of an English-only vocabulary


@pytest.fixture(scope="module")
def rules(babbler):
    return OutputRules(babbler.tokens, timestamps=True)


def their_processor():
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    config = GenerationConfig(
        no_timestamps_token_id=50362, eos_token_id=50256, bos_token_id=50256, max_initial_timestamp_index=50
    )
    return WhisperTimeStampLogitsProcessor(config, begin_index=1)


@st.composite
def outputs(draw):
    """Outputs as the rules allow them: text, single stamps and pairs, in rising order."""
    ids = []
    stamp = STAMP + draw(st.integers(0, 50))
    ids.append(stamp)
    for _unused in range(draw(st.integers(0, 3))):
        ids += draw(st.lists(st.integers(300, 400), min_size=1, max_size=3))
        stamp += draw(st.integers(1, 40))
        ids += [stamp] * draw(st.integers(1, 2))
    return ids[: draw(st.integers(0, len(ids)))]


@settings(max_examples=40)
@given(output=outputs(), seed=st.integers(0, 1000), loud=st.sampled_from([0.0, 6.0]))
def test_equal_to_the_public_rules(rules, output, seed, loud):
    logits = torch.randn(1, 51864, generator=torch.Generator().manual_seed(seed))
    logits[:, STAMP:] += loud  # sometimes stamps win together
    suppressed = logits.clone().index_fill_(1, rules.suppressed, -torch.inf)
    if not output:
        suppressed.index_fill_(1, rules.suppressed_first, -torch.inf)
    theirs = their_processor()(torch.tensor([[50257, *output]]), suppressed)
    ours = rules.apply(logits.clone(), [output])
    assert torch.equal(ours.isneginf(), theirs.isneginf())
    assert torch.equal(ours, theirs)


def test_a_later_first_stamp_would_be_seen(rules, monkeypatch):
    monkeypatch.setattr(module, "MAX_FIRST_STAMP", 51)
    theirs = their_processor()(torch.tensor([[50257]]), torch.zeros(1, 51864))
    assert not torch.equal(rules.apply(torch.zeros(1, 51864), [[]]).isneginf(), theirs.isneginf())


def test_without_timestamps_none_is_generated(babbler):
    row = OutputRules(babbler.tokens, timestamps=False).apply(torch.zeros(1, 51864), [[]])[0]
    assert row[STAMP:].isneginf().all()
    assert row[220].isneginf() and row[50256].isneginf()
    assert row[300] == 0


def test_the_computed_suppressions_are_those_of_the_package(babbler, english):
    import json

    packaged = json.loads((english / "config.json").read_text())
    tokens = speech_tokens(babbler.loaded)
    assert sorted(tokens.suppressed) == sorted(packaged["suppress_ids"])
    assert sorted(tokens.suppressed_first) == sorted(packaged["suppress_ids_begin"])


def test_prompts(babbler):
    tokens = babbler.tokens
    assert tokens.prompt() == [50257]
    assert tokens.prompt(timestamps=False) == [50257, 50362]
    assert tokens.prompt([1, 2]) == [50360, 1, 2, 50257]
    assert len(tokens.prompt(list(range(500)))) == 1 + 223 + 1
    assert tokens.text([STAMP, *tokens.encode("so it is"), STAMP + 9, tokens.end]) == " so it is"
    assert math.isclose(tokens.seconds(STAMP + 50), 1.0)


def test_words(babbler):
    tokens = babbler.tokens
    ids = tokens.tokenizer.encode(" Don't stop, Jürgen — 你好!", add_special_tokens=False)
    words = [text for text, _ids in tokens.words(ids, "en")]
    assert "".join(words) == " Don't stop, Jürgen — 你好!"
    assert words[0] == " Don" or words[0] == " Don't"
    assert " Jürgen" in words and "," in words
    assert [text for text, _ids in tokens.words(ids[-3:], "zh")]
    assert sum(len(some) for _text, some in tokens.words(ids, "zh")) == len(ids)
