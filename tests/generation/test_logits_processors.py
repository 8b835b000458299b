"""Logits processors equal their public counterparts, always leave a token, and refuse what makes no sense."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import BadSetting
from headwater.generation import penalties, sampling, sampling_params
from headwater.generation.penalties import (
    AllowedTokens,
    ForcedPrefix,
    FrequencyPenalty,
    MinTokens,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    SuppressTokens,
)
from headwater.generation.sampling import Greedy, MinP, Temperature, TokenHistory, TopK, TopP
from headwater.generation.sampling_params import build_processors
from headwater.parts import from_dict, to_dict

VOCAB = 12
PAIRS = {
    "temperature": (Temperature(0.7), transformers.TemperatureLogitsWarper(0.7)),
    "top_k": (TopK(4), transformers.TopKLogitsWarper(4)),
    "top_k of all": (TopK(99), transformers.TopKLogitsWarper(99)),
    "top_p": (TopP(0.6), transformers.TopPLogitsWarper(0.6)),
    "top_p tiny": (TopP(1e-6), transformers.TopPLogitsWarper(1e-6)),
    "min_p": (MinP(0.2), transformers.MinPLogitsWarper(0.2)),
    "repetition": (RepetitionPenalty(1.4), transformers.RepetitionPenaltyLogitsProcessor(1.4)),
    "repetition below 1": (RepetitionPenalty(0.7), transformers.RepetitionPenaltyLogitsProcessor(0.7)),
    "n-gram": (NoRepeatNgram(2), transformers.NoRepeatNGramLogitsProcessor(2)),
    "3-gram": (NoRepeatNgram(3), transformers.NoRepeatNGramLogitsProcessor(3)),
    "1-gram": (NoRepeatNgram(1), transformers.NoRepeatNGramLogitsProcessor(1)),
    "suppress_tokens": (SuppressTokens((3, 5)), transformers.SuppressTokensLogitsProcessor([3, 5])),
    "allowed_tokens": (AllowedTokens((3, 5)), transformers.PrefixConstrainedLogitsProcessor(lambda *_: [3, 5], 1)),
    "forced": (ForcedPrefix((4,)), transformers.ForcedBOSTokenLogitsProcessor(4)),
    "at least": (MinTokens(3, (7,)), transformers.MinNewTokensLengthLogitsProcessor(1, 3, 7, device="cpu")),
}
FAULTS = {
    "temperature": Temperature(0.71),
    "top_k": TopK(5),
    "top_p": TopP(0.9),
    "min_p": MinP(0.4),
    "repetition": RepetitionPenalty(1.5),
    "n-gram": NoRepeatNgram(3),
    "suppress_tokens": SuppressTokens((3,)),
    "forced": ForcedPrefix((5,)),
}


def spread(seed, rows=3):
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def shares(scores):
    return scores.softmax(-1)


def theirs(processor, scores, said):
    """They know only one rectangle of ids, so all rows have one length."""
    return processor(torch.tensor([[*prompt, *new] for prompt, new in said]), scores.clone())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("length", [0, 1, 6])
def test_equal_to_the_public_ones(name, length):
    ours, public = PAIRS[name]
    for seed in range(5):
        tokens = torch.randint(3, (3, length + 1), generator=torch.Generator().manual_seed(seed)).tolist()
        said = [TokenHistory(row[:1], row[1:]) for row in tokens]
        scores = spread(seed)
        torch.testing.assert_close(shares(ours(scores, said)), shares(theirs(public, scores, said)), equal_nan=True)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_setting_shows(name):
    said = (
        [TokenHistory([0], [1, 0, 1, 0]), TokenHistory([1], [0, 1, 2, 0]), TokenHistory([2], [1, 2, 1, 2])]
        if name == "n-gram"
        else [TokenHistory([0], [])] * 3
    )
    different = False
    for seed in range(5):
        scores = spread(seed)
        different |= not torch.allclose(
            shares(FAULTS[name](scores, said)), shares(theirs(PAIRS[name][1], scores, said))
        )
    assert different


def test_penalties_count_the_answer_and_not_the_prompt():
    scores, said = torch.zeros(1, 4), [TokenHistory([0, 0, 3], [1, 1, 2])]
    assert FrequencyPenalty(0.5)(scores, said).tolist() == [[0, -1.0, -0.5, 0]]
    assert PresencePenalty(0.5)(scores, said).tolist() == [[0, -0.5, -0.5, 0]]
    assert torch.equal(scores, torch.zeros(1, 4)), "a processor changes nothing it is given"


def test_rows_are_judged_by_their_own_words():
    said = [TokenHistory([0], [1]), TokenHistory([0, 0, 0, 0], [2, 2, 2]), TokenHistory([], [])]
    together = RepetitionPenalty(2.0)(spread(0), said)
    for row in range(3):
        assert torch.equal(
            together[row : row + 1], RepetitionPenalty(2.0)(spread(0)[row : row + 1], said[row : row + 1])
        )


def test_a_top_p_beyond_the_first_256_is_exact():
    """The short way (a few tokens sorted) and the long way agree."""
    scores = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    for mass in (0.1, 0.3, 0.9, 0.999):
        public = transformers.TopPLogitsWarper(mass)(torch.zeros(2, 1, dtype=torch.long), scores.clone())
        assert torch.equal(TopP(mass)(scores, []).isfinite(), public.isfinite())


def test_greedy_takes_the_lowest_of_equals():
    scores = torch.tensor([[0.0, 2.0, 2.0]])
    assert (
        Greedy()(scores, []).isfinite().tolist()
        == [[False, True, False]]
        == Temperature(0)(scores, []).isfinite().tolist()
    )
    assert Temperature(0).deterministic and Temperature(-0.0).deterministic and not Temperature(1).deterministic


rows = st.lists(st.floats(-(2.0**100), 2.0**100, width=32) | st.just(-math.inf), min_size=2, max_size=9)
values = st.floats(allow_nan=True, allow_infinity=True)


@given(rows, st.sampled_from([Temperature, TopP, MinP, RepetitionPenalty, FrequencyPenalty, PresencePenalty]), values)
def test_any_number_is_refused_in_a_line_or_leaves_a_token(row, kind, value):
    try:
        processor = kind(value)
    except BadSetting as fault:
        assert "\n" not in str(fault) and kind.__name__ in str(fault)
        return
    if max(row) > -math.inf:
        after = processor(torch.tensor([row]), [TokenHistory([0], [1, 1])])
        assert not after.isnan().any() and (after > -math.inf).any()


@given(rows, st.integers(-3, 2**70))
def test_any_count_is_refused_in_a_line_or_leaves_a_token(row, count):
    try:
        processor = TopK(count)
    except BadSetting as fault:
        assert "TopK: k must be" in str(fault)
        return
    assert (processor(torch.tensor([row]), []) > -math.inf).any() == (max(row) > -math.inf)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Temperature(-1), "Temperature: value must be 0 (greedy) or from 0.0001 to 100, got -1.0; 0.7 is"),
        (lambda: Temperature(float("nan")), "Temperature: value must be a finite number"),
        (lambda: Temperature("hot"), "got 'hot'"),
        (lambda: TopK(0), "TopK: k must be at least 1"),
        (lambda: TopK(True), "integer"),
        (lambda: TopP(1.1), "TopP: p must be from 0 to 1"),
        (lambda: SuppressTokens((-1,)), "SuppressTokens: tokens must be integers"),
        (lambda: AllowedTokens(()), "AllowedTokens: tokens must name at least one"),
        (
            lambda: SuppressTokens((9,)).check_vocab(9),
            "SuppressTokens: tokens must be below the vocabulary's size 9, got [9]",
        ),
        (lambda: build_processors(temprature=1), "generation has no setting 'temprature'; did you mean 'temperature'?"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, words):
    with pytest.raises(BadSetting) as fault:
        make()
    assert words in str(fault.value)


def test_by_name_in_the_order_in_which_they_act():
    assert build_processors() == (Greedy(),)
    assert build_processors(repetition_penalty=1.1, temperature=None) == (RepetitionPenalty(1.1), Greedy())
    assert build_processors(top_p=0.9, temperature=0.5, suppress_tokens=[3]) == (
        SuppressTokens((3,)),
        Temperature(0.5),
        TopP(0.9),
    )
    assert list(sampling_params.PROCESSORS)[-4:] == ["temperature", "top_k", "top_p", "min_p"]


@pytest.mark.parametrize("processor", [pair[0] for pair in PAIRS.values()], ids=list(PAIRS))
def test_a_logits_processor_converts_to_json_and_back(processor):
    assert (
        from_dict(to_dict(processor)) == processor
        and eval(repr(processor), {**vars(sampling), **vars(penalties)}) == processor
    )
