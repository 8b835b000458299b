"""Beam search: wide enough it is exhaustive, it equals the public one, and groups differ as the paper says."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from headwater.errors import BadSetting, CheckFailed
from headwater.generation.beam import Beam, beam_search
from headwater.generation.penalties import NoRepeatNgram, SuppressTokens
from headwater.generation.request import Request

END = frozenset({0})
ENDS = [0, 11, 12, 13]  # several, so that any model ends now and then


def every_answer(model, prompt, limit, penalty, vocab, source=None):
    """All answers there are, with their scores, best first."""
    result, more = [], {} if source is None else {"source": torch.tensor([source])}
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if 0 in tokens[:-1] or (length < limit and tokens[-1] != 0):
                continue
            with torch.no_grad():
                logprobs = model(torch.tensor([[*prompt, *tokens]]), **more)[0].log_softmax(-1)
            total = sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens))
            result.append((total / length**penalty, list(tokens)))
    return sorted(result, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_wide_enough_it_is_exhaustive(build, penalty):
    vocab, limit = 4, 3
    model = build(vocab=vocab)
    beam = Beam(width=vocab**limit, length_penalty=penalty, num_return_sequences=5)
    (result,) = beam_search(model, [Request((1, 2), max_tokens=limit, stop_token_ids=END)], beam)
    expected = every_answer(model, (1, 2), limit, penalty, vocab)
    assert [row.output_ids for row, _ in result] == [tokens for _, tokens in expected[:5]]
    assert [score for _, score in result] == pytest.approx([score for score, _ in expected[:5]])
    for row, score in result:
        assert sum(e.logprob for e in row.events) / len(row.output_ids) ** penalty == pytest.approx(score)
        assert row.finish_reason == ("eos" if row.output_ids[-1] == 0 else "length")


def public(model_ours, **settings):
    """The same weights in a public GPT-2."""
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 24, "activation_function": "relu"}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    t, o = theirs.transformer, model_ours.decoder
    with torch.no_grad():
        t.wte.weight.copy_(o.embed.tokens.weight * o.embed.scale)
        t.wpe.weight.copy_(o.embed.position.table.weight)
        theirs.lm_head.weight = torch.nn.Parameter(model_ours.head.out.weight.clone())
        for a, b in [(t.ln_f, o.final_norm)] + [
            pair
            for h, l in zip(t.h, o.layers, strict=True)
            for pair in ((h.ln_1, l.self_attn_norm), (h.ln_2, l.ffn_norm))
        ]:
            a.weight.copy_(b.weight), a.bias.copy_(b.bias)
        for h, l in zip(t.h, o.layers, strict=True):
            qkv = [l.self_attn.q, l.self_attn.k, l.self_attn.v]
            h.attn.c_attn.weight.copy_(torch.cat([m.weight.T for m in qkv], 1))
            h.attn.c_attn.bias.copy_(torch.cat([m.bias for m in qkv]))
            for a, b in ((h.attn.c_proj, l.self_attn.out), (h.mlp.c_fc, l.ffn.up), (h.mlp.c_proj, l.ffn.down)):
                a.weight.copy_(b.weight.T), a.bias.copy_(b.bias)
    return theirs


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5])
def pair(build, request):
    ours = build("learned", vocab=24, norm_position="pre", seed=request.param)
    return ours, public(ours)


# One beam is plain greedy there and ends with the first end; ours, if it must be sure, goes on while length can pay.
COMPARABLE = [
    (width, penalty, over)
    for width, penalty, over in itertools.product([1, 3, 5], [0.0, 1.0, 1.7], [False, True])
    if width > 1 or over or penalty <= 0
]


@pytest.mark.parametrize(("width", "penalty", "over"), COMPARABLE)
def test_equal_to_the_public_one(pair, width, penalty, over):
    ours, theirs = pair
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 10, 10)]
    requests = [Request(prompt, max_tokens=8, stop_token_ids=frozenset(ENDS)) for prompt in prompts]
    beam = Beam(width, penalty, num_return_sequences=min(width, 2), early_stopping=over)
    result = beam_search(ours, requests, beam)
    public = theirs.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(4, 3, dtype=torch.long),
        num_beams=width,
        length_penalty=penalty,
        num_return_sequences=beam.num_return_sequences,
        max_new_tokens=8,
        early_stopping=(True if over else "never") if width > 1 else False,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ENDS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = iter(public.sequences[:, 3:].tolist())
    for one in result:
        for row, _ in one:
            expected = next(texts)
            ends = [i for i, token in enumerate(expected) if token in ENDS]
            assert row.output_ids == (expected[: ends[0] + 1] if ends else expected)
    if width > 1:
        scores = [score for one in result for _, score in one]
        assert scores == pytest.approx(public.sequences_scores.tolist(), abs=1e-5)  # theirs are float32


def test_the_penalty_matters(pair):
    """So that the equality above could fail."""
    lengths = set()
    for penalty in (-3.0, 0.0, 3.0):
        asked = [Request((i, i + 1), max_tokens=8, stop_token_ids=frozenset(ENDS)) for i in range(1, 9)]
        rows = beam_search(pair[0], asked, Beam(5, penalty))
        lengths.add(tuple(len(one[0][0].output_ids) for one in rows))
    assert len(lengths) > 1


def test_prompts_of_any_length_together_and_alone(model):
    requests = [Request(tuple(range(1, n)), max_tokens=6, stop_token_ids=END) for n in (3, 2, 7)]
    together = beam_search(model, requests, Beam(3, num_return_sequences=3))
    for request, result in zip(requests, together, strict=True):
        (alone,) = beam_search(model, [request], Beam(3, num_return_sequences=3))
        assert [row.output_ids for row, _ in alone] == [row.output_ids for row, _ in result]


def test_from_a_source(translator):
    sources = [(3, 4), (5, 6, 7, 8, 9)]
    result = beam_search(
        translator, [Request((1,), source, max_tokens=7, stop_token_ids=END) for source in sources], Beam(4)
    )
    for source, one in zip(sources, result, strict=True):
        (alone,) = beam_search(translator, [Request((1,), source, max_tokens=7, stop_token_ids=END)], Beam(4))
        assert one[0][0].output_ids == alone[0][0].output_ids
        with torch.no_grad():
            logprobs = translator(torch.tensor([[1, *one[0][0].output_ids]]), source=torch.tensor([source]))[
                0
            ].log_softmax(-1)
        total = sum(float(logprobs[i, token]) for i, token in enumerate(one[0][0].output_ids))
        assert one[0][1] == pytest.approx(total / len(one[0][0].output_ids))


def groups_slowly(model, prompt, limit, width, groups, diversity):
    """Diverse beam search as its paper has it, on whole texts: chosen by log p - diversity · uses, scored by log p."""
    beams, done = [[(0.0, [])] for _ in range(groups)], [[] for _ in range(groups)]
    for step in range(limit):
        used = {}
        for g in range(groups):
            options = []
            for total, tokens in beams[g]:
                with torch.no_grad():
                    logprobs = model(torch.tensor([[*prompt, *tokens]]))[0, -1].log_softmax(-1)
                for token, gain in enumerate(logprobs.tolist()):
                    options.append((total + gain - diversity * used.get(token, 0), total + gain, [*tokens, token]))
            options.sort(key=lambda option: -option[0])
            ranked = list(enumerate(options))
            done[g] += [
                (t / len(x), x) for r, (_, t, x) in ranked if (x[-1] == 0 or step == limit - 1) and r < width // groups
            ]
            beams[g] = [(t, x) for _, (_, t, x) in ranked if x[-1] != 0][: width // groups] if step < limit - 1 else []
            for _, tokens in beams[g]:
                used[tokens[-1]] = used.get(tokens[-1], 0) + 1
    return sorted((one for d in done for one in sorted(d, reverse=True)[: width // groups]), reverse=True)


@pytest.mark.parametrize("diversity", [0.0, 0.7, 5.0])
def test_groups_are_those_of_the_paper(build, diversity):
    model = build(vocab=9, seed=2)
    beam = Beam(6, num_groups=3, diversity_penalty=diversity, num_return_sequences=6)
    (result,) = beam_search(model, [Request((1, 2), max_tokens=4, stop_token_ids=END)], beam)
    expected = groups_slowly(model, (1, 2), 4, 6, 3, diversity)
    assert [score for _, score in result] == pytest.approx([score for score, _ in expected[: len(result)]])
    assert len({tuple(row.output_ids[:1]) for row, _ in result}) >= (3 if diversity == 5 else 1)


def test_logits_processors_act_in_beam_search(model):
    plain, banned, unrepeated = (
        beam_search(model, [Request((1, 2), processors=processors, max_tokens=8)], Beam(3))[0][0][0].output_ids
        for processors in ((), (SuppressTokens((7,)),), (NoRepeatNgram(1),))
    )
    assert (
        7
        not in beam_search(model, [Request((1, 2), processors=(SuppressTokens(tuple(plain)),), max_tokens=8)], Beam(3))[
            0
        ][0][0].output_ids
    )
    assert len(set(unrepeated)) == 8 and not set(unrepeated) & {1, 2} and len(banned) == 8


def test_beam_search_of_zero_tokens_and_without_allowed_tokens(model, build):
    (result,) = beam_search(model, [Request((1, 2), max_tokens=0)], Beam(3))
    assert result[0][0].output_ids == [] and result[0][0].finish_reason == "length"
    with pytest.raises(BadSetting, match="at least one token must be left"):
        beam_search(model, [Request((1, 2), processors=(SuppressTokens(tuple(range(40))),), max_tokens=3)], Beam(3))
    broken = build()
    with torch.no_grad():
        broken.decoder.final_norm.weight.fill_(torch.nan)
    with pytest.raises(CheckFailed, match="logits must be numbers"):
        beam_search(broken, [Request((1,), max_tokens=3)], Beam(2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 0}, "width must be from 1 to 1024, got 0"),
        ({"width": 10**6}, "width must be from 1 to 1024"),
        ({"width": 4, "num_return_sequences": 5}, r"num_return_sequences must be from 1 to the width \(4\)"),
        ({"width": 4, "num_groups": 3}, r"num_groups must divide the width \(4\)"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"diversity_penalty": -1.0}, "diversity_penalty must be from 0 to 100"),
        ({"early_stopping": "soon"}, "early_stopping must be"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, words):
    with pytest.raises(BadSetting, match=words):
        Beam(**settings)
