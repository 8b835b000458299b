"""No step is ever wrong: whatever the sizes, ids, places and threads, C agrees with the modules or steps aside."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core import (
    Alibi,
    Attention,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    Learned,
    LMHead,
    Model,
    NoPosition,
    RMSNorm,
    Rotary,
    SlidingWindow,
    Stack,
    pre,
)
from headwater.cpu.build import decode_library, unavailable_reason
from headwater.errors import Fault
from headwater.generation.forward import forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=f"no compiled step here: {unavailable_reason()}")

POSITIONS = {"rotary": Rotary(), "part": Rotary(partial_factor=0.5), "none": NoPosition(), "slopes": Alibi()}


def decoder(attn, ffn, norm, d_model=64, vocab=50, places=0, seed=0):
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)))
    stack = Stack(d_model, Embeddings(vocab, Learned(places)) if places else Embeddings(vocab), (block,) * 2, norm)
    model = Model(decoder=stack, head=LMHead(vocab)).build(seed=seed).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def said(model, fast: bool, rows: int) -> torch.Tensor:
    """Scores of rows that are read whole, go on token by token, share beginnings, and become fewer."""
    slots = BatchKVCache(model, range(rows))
    slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
    scores = [forward_last(model, slots, [[1, 2, 3 + n] for n in range(rows)])]
    scores += [forward_last(model, slots, [[token + n] for n in range(rows)]) for token in (7, 20, 30)]
    slots.reorder([n // 2 for n in range(rows)])
    scores.append(forward_last(model, slots, [[5 + n] for n in range(rows)]))
    slots.remove_row(0)
    if rows > 1:
        scores.append(forward_last(model, slots, [[9 + n] for n in range(rows - 1)]))
    return torch.cat(scores)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_sizes(data):
    """Widths that are no multiple of 32, heads wider than the model, shared keys, any vocabulary, few rows and many."""

    def one(*of):
        return data.draw(st.sampled_from(of))

    d_model, heads, head_dim, d_ff = (
        one(16, 32, 40, 64, 96),
        one(1, 2, 3, 4, 6),
        one(4, 8, 16, 20, 32),
        one(31, 32, 160),
    )
    kv_heads, where, bias = one(*(n for n in range(1, heads + 1) if heads % n == 0)), one(*POSITIONS), one("", "qkvo")
    sees, rows = one(Causal(), SlidingWindow(3)), one(1, 3, 8, 9, 14)
    attn = Attention(heads, head_dim=head_dim, kv_heads=kv_heads, position=POSITIONS[where], mask=sees, bias=bias)
    ffn, norm = one(GatedFeedForward(d_ff), FeedForward(d_ff, "gelu")), one(RMSNorm(), LayerNorm())
    model = decoder(attn, ffn, norm, d_model, one(50, 65), one(0, 30), one(0, 1, 2))
    known = all(width % 32 == 0 for width in (d_model, heads * head_dim, d_ff)) and where != "slopes"
    assert (NativeDecoder.try_build(model) is not None) == known
    torch.testing.assert_close(said(model, known, rows), said(model, False, rows), atol=2e-5, rtol=2e-5)


PLAIN = (Attention(4, mask=Causal()), FeedForward(96, "gelu"), LayerNorm())


@pytest.mark.parametrize("together", [7, 10, 256])
def test_long_texts_are_read_in_parts(together: int, monkeypatch):
    """Rows of different length, and more scores asked for than the last part has tokens."""
    monkeypatch.setattr("headwater.cpu.decode.MAX_BATCHED_TOKENS", together)
    model, texts = decoder(*PLAIN), [[n % 50 for n in range(first, first + 12)] for first in (3, 20, 41)]

    def scores(fast: bool) -> torch.Tensor:
        slots = BatchKVCache(model, range(3))
        slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
        several = [
            forward_last(model, slots, [text[:size] for text, size in zip(texts, (12, 5, 9), strict=True)])
            for _ in "ab"
        ]
        slots = BatchKVCache(model, ["a"])
        slots.native_decoder = (model, NativeDecoder.try_build(model) if fast else None)
        return torch.cat(
            [*several, forward_single(model, slots, texts[0], 9), forward_single(model, slots, texts[1], 12)]
        )

    torch.testing.assert_close(scores(True), scores(False), atol=2e-5, rtol=2e-5)


def test_what_c_could_not_look_up_is_the_modules_to_refuse():
    model = decoder(*PLAIN, places=20)
    slots = BatchKVCache(model, ["a"])
    for _ in range(20):
        forward_last(model, slots, [[1]])
    assert slots.native_decoder[1] is not None
    with pytest.raises((Fault, IndexError)):
        forward_last(model, slots, [[1]])
    for token in (-1, 50):
        with pytest.raises((Fault, IndexError)):
            forward_last(model, BatchKVCache(model, ["a"]), [[token]])


def test_from_any_thread_with_any_number_of_them():
    """C uses as many threads as there is room for, whatever the thread that calls it would use."""
    model, found, had = decoder(*PLAIN), [], torch.get_num_threads()
    want = said(model, False, 14)

    def ask(count: int) -> None:
        torch.set_num_threads(count)
        found.append(said(model, True, 14))

    try:
        for count in (1, 3, 2):
            asker = threading.Thread(target=ask, args=(count,))
            asker.start()
            asker.join()
    finally:
        torch.set_num_threads(had)
    assert len(found) == 3
    for one in found:
        torch.testing.assert_close(one, want, atol=2e-5, rtol=2e-5)


def test_a_cache_that_has_moved_or_grown_is_told_anew():
    """A copy of the cache is where C goes on, and nothing of the old one is read or written any more."""
    model, tokens = decoder(*PLAIN), list(range(1, 12))
    slots, plain = BatchKVCache(model, ["a"], max_columns=8), BatchKVCache(model, ["a"])
    plain.native_decoder = (model, None)
    for i, token in enumerate(tokens):
        if i == 4:
            old = dict(slots.kv)
            slots.kv = {slot: (k.clone(), v.clone()) for slot, (k, v) in old.items()}
            with torch.inference_mode():
                for kept in (kept for pair in old.values() for kept in pair):
                    kept.fill_(torch.nan)
        torch.testing.assert_close(
            forward_last(model, slots, [[token]]), forward_last(model, plain, [[token]]), atol=2e-5, rtol=2e-5
        )
    assert slots.native_decoder[1].c_model.length >= len(tokens) > 8


def test_where_there_is_a_compiler_it_compiles():
    assert unavailable_reason() or decode_library() is not None
