"""Beam search: wide enough it is exhaustive, it equals the public one, and groups differ as the paper says."""

from __future__ import annotations

import itertools

import pytest
import torch
import transformers

from headwater.errors import BadSetting, CheckFailed
from headwater.generation.beam import Beam, search
from headwater.generation.choosers import Ban, NoRepeatNgram
from headwater.generation.requests import Request

END = frozenset({0})
ENDS = [0, 11, 12, 13]  # several, so that any model ends now and then


def every_answer(model, prompt, limit, penalty, vocab, source=None):
    """All answers there are, with their scores, best first."""
    found, more = [], {} if source is None else {"source": torch.tensor([source])}
    for length in range(1, limit + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if 0 in tokens[:-1] or (length < limit and tokens[-1] != 0):
                continue
            with torch.no_grad():
                logprobs = model(torch.tensor([[*prompt, *tokens]]), **more)[0].log_softmax(-1)
            total = sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(tokens))
            found.append((total / length**penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_wide_enough_it_is_exhaustive(build, penalty):
    vocab, limit = 4, 3
    model = build(vocab=vocab)
    beam = Beam(width=vocab**limit, length_penalty=penalty, answers=5)
    (found,) = search(model, [Request((1, 2), max_tokens=limit, end=END)], beam)
    want = every_answer(model, (1, 2), limit, penalty, vocab)
    assert [row.new for row, _ in found] == [tokens for _, tokens in want[:5]]
    assert [score for _, score in found] == pytest.approx([score for score, _ in want[:5]])
    for row, score in found:
        assert sum(e.logprob for e in row.events) / len(row.new) ** penalty == pytest.approx(score)
        assert row.stopped == ("end" if row.new[-1] == 0 else "length")


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
    ours = build("learned", vocab=24, placement="pre", seed=request.param)
    return ours, public(ours)


# One beam is plain greedy there and ends with the first end; ours, if it must be sure, goes on while length can pay.
COMPARABLE = [
    (width, penalty, over)
    for width, penalty, over in itertools.product([1, 3, 5], [0.0, 1.0, 1.7], ["sure", "full"])
    if width > 1 or over == "full" or penalty <= 0
]


@pytest.mark.parametrize(("width", "penalty", "over"), COMPARABLE)
def test_equal_to_the_public_one(pair, width, penalty, over):
    ours, theirs = pair
    prompts = [(1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 10, 10)]
    requests = [Request(prompt, max_tokens=8, end=frozenset(ENDS)) for prompt in prompts]
    beam = Beam(width, penalty, answers=min(width, 2), over=over)
    found = search(ours, requests, beam)
    told = theirs.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(4, 3, dtype=torch.long),
        num_beams=width,
        length_penalty=penalty,
        num_return_sequences=beam.answers,
        max_new_tokens=8,
        early_stopping={"sure": "never", "full": True}[over] if width > 1 else False,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ENDS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = iter(told.sequences[:, 3:].tolist())
    for one in found:
        for row, _ in one:
            want = next(texts)
            ends = [i for i, token in enumerate(want) if token in ENDS]
            assert row.new == (want[: ends[0] + 1] if ends else want)
    if width > 1:
        scores = [score for one in found for _, score in one]
        assert scores == pytest.approx(told.sequences_scores.tolist(), abs=1e-5)  # theirs are float32


def test_the_penalty_matters(pair):
    """So that the equality above could fail."""
    lengths = set()
    for penalty in (-3.0, 0.0, 3.0):
        asked = [Request((i, i + 1), max_tokens=8, end=frozenset(ENDS)) for i in range(1, 9)]
        rows = search(pair[0], asked, Beam(5, penalty))
        lengths.add(tuple(len(one[0][0].new) for one in rows))
    assert len(lengths) > 1


def test_prompts_of_any_length_together_and_alone(model):
    requests = [Request(tuple(range(1, n)), max_tokens=6, end=END) for n in (3, 2, 7)]
    together = search(model, requests, Beam(3, answers=3))
    for request, found in zip(requests, together, strict=True):
        (alone,) = search(model, [request], Beam(3, answers=3))
        assert [row.new for row, _ in alone] == [row.new for row, _ in found]


def test_from_a_source(translator):
    sources = [(3, 4), (5, 6, 7, 8, 9)]
    found = search(translator, [Request((1,), source, max_tokens=7, end=END) for source in sources], Beam(4))
    for source, one in zip(sources, found, strict=True):
        (alone,) = search(translator, [Request((1,), source, max_tokens=7, end=END)], Beam(4))
        assert one[0][0].new == alone[0][0].new
        with torch.no_grad():
            logprobs = translator(torch.tensor([[1, *one[0][0].new]]), source=torch.tensor([source]))[0].log_softmax(-1)
        total = sum(float(logprobs[i, token]) for i, token in enumerate(one[0][0].new))
        assert one[0][1] == pytest.approx(total / len(one[0][0].new))


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
    beam = Beam(6, groups=3, diversity=diversity, answers=6)
    (found,) = search(model, [Request((1, 2), max_tokens=4, end=END)], beam)
    want = groups_slowly(model, (1, 2), 4, 6, 3, diversity)
    assert [score for _, score in found] == pytest.approx([score for score, _ in want[: len(found)]])
    assert len({tuple(row.new[:1]) for row, _ in found}) >= (3 if diversity == 5 else 1)


def test_choosers_act_in_a_beam(model):
    plain, banned, unrepeated = (
        search(model, [Request((1, 2), choosers=choosers, max_tokens=8)], Beam(3))[0][0][0].new
        for choosers in ((), (Ban((7,)),), (NoRepeatNgram(1),))
    )
    assert 7 not in search(model, [Request((1, 2), choosers=(Ban(tuple(plain)),), max_tokens=8)], Beam(3))[0][0][0].new
    assert len(set(unrepeated)) == 8 and not set(unrepeated) & {1, 2} and len(banned) == 8


def test_nothing_asked_and_nothing_left(model, build):
    (found,) = search(model, [Request((1, 2), max_tokens=0)], Beam(3))
    assert found[0][0].new == [] and found[0][0].stopped == "length"
    with pytest.raises(BadSetting, match="at least one token must be left"):
        search(model, [Request((1, 2), choosers=(Ban(tuple(range(40))),), max_tokens=3)], Beam(3))
    broken = build()
    with torch.no_grad():
        broken.decoder.final_norm.weight.fill_(torch.nan)
    with pytest.raises(CheckFailed, match="scores must be numbers"):
        search(broken, [Request((1,), max_tokens=3)], Beam(2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"width": 0}, "width must be from 1 to 1024, got 0"),
        ({"width": 10**6}, "width must be from 1 to 1024"),
        ({"width": 4, "answers": 5}, r"answers must be from 1 to the width \(4\)"),
        ({"width": 4, "groups": 3}, r"groups must divide the width \(4\)"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"diversity": -1.0}, "diversity must be from 0 to 100"),
        ({"over": "soon"}, "over must be one of sure, full"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, words):
    with pytest.raises(BadSetting, match=words):
        Beam(**settings)
