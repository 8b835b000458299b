"""Legal but odd models: the compiled step gives what the modules give, or steps aside; with one thread and with two.

The models are drawn from a seed: layers of unequal width, heads wider than the model or of odd width, shared keys, any
vocabulary, windows, partial rotations, biases here and there, layers packed and not. Run alone under a sanitiser, this
file is also the proof that no such model makes C touch memory that is not its own.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from headwater.core import (
    Alibi,
    Attention,
    Block,
    Causal,
    CrossAttention,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoNorm,
    NoPosition,
    OffsetRMSNorm,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SlidingWindow,
    Stack,
    Transformer,
    post,
    pre,
)
from headwater.cpu.build import decode_library, unavailable_reason
from headwater.generation.beam import Beam, beam_search
from headwater.generation.engine import Engine
from headwater.generation.forward import encode_sources, forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder, NativeEncoder
from headwater.generation.request import Request
from headwater.quantization.layers import quantize

pytestmark = pytest.mark.skipif(decode_library() is None, reason=f"no compiled step here: {unavailable_reason()}")
CASES, LONGEST = 32, 60


def attention(draw: random.Random, part: type[Attention], shape: dict, **more) -> Attention:
    bias = draw.choice(["", "qkv", "qkvo", "q", "o"])
    return part(**shape, bias=bias, **more)


def feed_forward(draw: random.Random, d_ff: int, gated: bool, act: str):
    return (GatedFeedForward if gated else FeedForward)(d_ff, act, bias=draw.random() < 0.5)


def odd_spec(seed: int) -> Model:
    """Half of the models have sizes that decode_step.c may take; the other half have whatever comes."""
    draw = random.Random(seed)
    even = draw.random() < 0.6
    d_model = draw.choice([32, 64, 96] if even else [2, 8, 30, 32, 40, 64])
    heads = draw.choice([1, 2, 3, 4, 6, 8])
    head_dim = draw.choice(
        [k for k in (4, 8, 16, 20, 32, 64) if heads * k % 32 == 0 or not even] if even else [2, 6, 10, 15, 32]
    )
    kv_heads = draw.choice([n for n in range(1, heads + 1) if heads % n == 0])
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    turned = [Rotary(), Rotary(partial_factor=0.5)] if head_dim % 4 == 0 else [Rotary()] if head_dim % 2 == 0 else []
    position = draw.choice([NoPosition(), *turned, *turned, *([] if even else [Alibi()])])
    qk_norm = draw.choice([NoNorm(), NoNorm(), RMSNorm(), LayerNorm()])
    norm, place = (
        draw.choice([RMSNorm(), LayerNorm(), LayerNorm(bias=False), OffsetRMSNorm()]),
        draw.choice([pre, pre, post]),
    )
    gated, act = draw.random() < 0.5, draw.choice(["silu", "gelu", "gelu_tanh", "relu", "quick_gelu"])
    d_ff = draw.choice([32, 64, 160] if even else [1, 31, 64, 200])
    count, unequal = draw.choice([1, 2, 3]), draw.random() < 0.25
    translates = draw.random() < 0.35

    def block(crosses: bool, sees) -> Block:
        wide = draw.choice([d_ff, 4 * d_ff, 32]) if unequal else d_ff
        branches = [
            place(norm, self_attn=attention(draw, Attention, shape, position=position, qk_norm=qk_norm, **sees))
        ]
        if crosses:
            branches.append(place(norm, cross_attn=attention(draw, CrossAttention, shape)))
        return Block((*branches, place(norm, ffn=feed_forward(draw, wide, gated, act))))

    vocab = draw.choice([5, 17, 33, 50, 101])
    added = [NoPosition(), Learned(LONGEST), *([Sinusoidal()] if d_model % 2 == 0 else [])]
    embed = Embeddings(vocab, draw.choice(added), scale=draw.choice([1.0, 3.0]))
    sees = [{"mask": draw.choice([Causal(), Causal(), SlidingWindow(draw.choice([1, 3, 7]))])} for _ in range(count)]
    decoder = Stack(d_model, embed, tuple(block(translates, one) for one in sees), norm)
    encoder = Stack(d_model, embed, tuple(block(False, {}) for _ in range(count)), norm) if translates else None
    head = LMHead(vocab, bias=draw.random() < 0.5, scale=draw.choice([1.0, 0.5]))
    tied = (("head.out", "decoder.embed.tokens"),) if draw.random() < 0.5 else ()
    return Model(encoder=encoder, decoder=decoder, head=head, tied=tied)


def odd_model(seed: int) -> Transformer:
    model = odd_spec(seed).build(seed=seed).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def packed(model: Transformer, seed: int) -> bool:
    """Some of its layers, in 8 bits or 4; whether there were any."""
    draw = random.Random(seed)
    where = draw.choice([["*"], ["*.ffn.*"], ["decoder.layers.0.*"], ["*.self_attn.*", "head.*"]])
    return bool(quantize(model, draw.choice(["int8", "int4"]), where))


def scores(model: Transformer, fast: bool, seed: int) -> torch.Tensor:
    """A prompt read whole, a row more, many rows token by token, branches, fewer rows, and one long text."""
    draw, vocab = random.Random(seed), model.head.out.out_features

    def text(size: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(size)]

    def fresh(rows: int) -> BatchKVCache:
        slots = BatchKVCache(model, range(rows))
        slots.native_decoder = (model, stepper)
        if model.encoder is not None:
            encode_sources(model, slots, [tuple(text(1 + n % 5)) for n in range(rows)])
        return slots

    stepper = NativeDecoder.try_build(model) if fast else None
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(NativeEncoder, "try_build", lambda model: None)
        slots = fresh(1)
        found = [forward_last(model, slots, [text(draw.choice([1, 3, 9]))]), forward_last(model, slots, [text(1)])]
        for rows in (1, 6, 9):  # room made for few rows is used by more
            slots = fresh(rows)
            found.append(forward_last(model, slots, [text(1 + n % 3) for n in range(rows)]))
            found += [forward_last(model, slots, [text(1) for _ in range(rows)]) for _ in range(2)]
            slots.reorder([n // 2 for n in range(rows)])
            found.append(forward_last(model, slots, [text(1) for _ in range(rows)]))
            slots.remove_row(0)
            if rows > 1:
                found.append(forward_last(model, slots, [text(2) for _ in range(rows - 1)]))
        found.append(forward_single(model, fresh(1), text(33), 7))
    return torch.cat(found)


@pytest.fixture
def threads():
    had = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(had)


@pytest.mark.parametrize("seed", range(CASES))
def test_the_step_gives_what_the_modules_give(seed: int, threads):
    model = odd_model(seed)
    threads(1)
    want = scores(model, False, seed)
    close = 1e-4 * max(1.0, float(want.abs().max()))
    for count in (1, 2):
        threads(count)
        torch.testing.assert_close(scores(model, True, seed), want, atol=close, rtol=1e-4)


@pytest.mark.parametrize("seed", range(0, CASES, 2))
def test_packed_layers_among_plain_ones(seed: int, threads):
    """Activations that meet packed weights are rounded to 7 or 8 bits; nothing else may differ, and in C no thread."""
    model = odd_model(seed)
    if not packed(model, seed):
        return
    threads(1)
    one, want = scores(model, True, seed), scores(model, False, seed)
    assert (one - want).square().mean() < 0.05 * want.var() + 1e-6
    threads(2)
    torch.testing.assert_close(
        scores(model, True, seed), one, **({"atol": 0, "rtol": 0} if NativeDecoder.try_build(model) else {})
    )


@pytest.mark.parametrize("seed", range(1, CASES, 4))
def test_generated_texts_are_the_same(seed: int, threads, monkeypatch):
    model = odd_model(seed)
    source = (1, 2, 3) if model.encoder is not None else None
    asked = [Request((n % 5, 1), source, max_tokens=8) for n in range(7)]

    def texts() -> list[list[int]]:
        engine = Engine(model)
        rows = [engine.submit(request) for request in asked]
        engine.run()
        assert all(row.fault is None for row in rows)
        return [row.output_ids for row in rows]

    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "try_build", lambda model: None)
        patch.setattr(NativeEncoder, "try_build", lambda model: None)
        want = texts()
    for count in (1, 2):
        threads(count)
        assert texts() == want


def test_both_kinds_were_drawn():
    """The draw is of no use if C never serves, or always."""
    kinds = Counter(NativeDecoder.try_build(odd_model(seed)) is not None for seed in range(CASES))
    assert kinds[True] >= CASES // 5 and kinds[False] >= CASES // 5


def test_beams_of_prompts_that_differ_in_length(monkeypatch):
    """Rows that change places must not write over what a longer row still sees there."""
    spec = Attention(4, kv_heads=2, position=Rotary(), mask=Causal())
    block = Block((pre(RMSNorm(), self_attn=spec), pre(RMSNorm(), ffn=GatedFeedForward(96))))
    model = Model(decoder=Stack(64, Embeddings(50), (block,) * 2, RMSNorm()), head=LMHead(50)).build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    asked = [Request(tuple(range(n + 1)), max_tokens=6, stop_token_ids=frozenset({7})) for n in (1, 9, 4, 12)]

    def found() -> list[tuple[list[int], float]]:
        return [
            (row.output_ids, round(score, 3))
            for one in beam_search(model, asked, Beam(4, num_return_sequences=4))
            for row, score in one
        ]

    with monkeypatch.context() as patch:
        patch.setattr(NativeDecoder, "try_build", lambda model: None)
        want = found()
    assert NativeDecoder.try_build(model) is not None
    assert found() == want
