"""The cache of a running batch gives what the whole text gives, whatever its rows have been through."""

from __future__ import annotations

import random

import pytest
import torch

from headwater.core import (
    Attention,
    Block,
    Embeddings,
    FeedForward,
    LMHead,
    Model,
    RMSNorm,
    Rotary,
    SlidingWindow,
    Stack,
    pre,
)
from headwater.errors import BadInput
from headwater.families.builders import encoder
from headwater.generation.forward import encode_sources, forward_last, forward_single
from headwater.generation.kv_cache import BatchKVCache

SHAPES = ["rotary", "learned", "alibi", "relative", "xl", "linear"]


def whole(model, text, source=None):
    more = {} if source is None else {"source": torch.tensor([source])}
    with torch.no_grad():
        return model(torch.tensor([text]), **more)[0, -1]


def agree(model, scores, texts, sources=None):
    for score, text, source in zip(scores, texts, sources or [None] * len(texts), strict=True):
        torch.testing.assert_close(score, whole(model, text, source), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_any_length_read_as_if_alone(build, shape):
    model, texts = build(shape), [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    cache = BatchKVCache(model, range(3))
    agree(model, forward_last(model, cache, texts), texts)
    for step in range(4):
        texts = [[*text, 10 + step] for text in texts]
        agree(model, forward_last(model, cache, [text[-1:] for text in texts]), texts)


@pytest.mark.parametrize("shape", ["rotary", "alibi"])
def test_a_random_life(build, shape):
    """Rows join, leave, go back, change places and are doubled; each still reads as if alone."""
    model, rng = build(shape), random.Random(0)

    def words(count):
        return [rng.randrange(40) for _ in range(count)]

    cache, texts = BatchKVCache(model), []
    for _ in range(60):
        match rng.choice(["join", "join", "leave", "crop", "select", "read", "read"]):
            case "join" if len(texts) < 6:
                fresh = [words(rng.randint(1, 9)) for _ in range(rng.randint(1, 2))]
                other = BatchKVCache(model, range(len(fresh)))
                forward_last(model, other, fresh)
                cache.append_rows(other)
                texts += fresh
            case "leave" if texts:
                gone = rng.randrange(len(texts))
                cache.remove_row(gone)
                texts[gone] = texts[-1]
                texts.pop()
            case "crop" if texts:
                lengths = [rng.randint(1, len(text)) for text in texts]
                cache.crop(lengths)
                texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
            case "select" if texts:
                rows = [rng.randrange(len(texts)) for _ in range(rng.randint(1, 5))]
                cache.reorder(rows)
                texts = [list(texts[row]) for row in rows]
            case "read" if texts:
                news = [words(rng.randint(1, 3)) for _ in texts]
                scores = forward_last(model, cache, news)
                texts = [[*text, *new] for text, new in zip(texts, news, strict=True)]
                agree(model, scores, texts)
        assert cache.lengths == [len(text) for text in texts]


def test_sources_of_any_length(translator):
    sources, texts = [[1, 2], [3, 4, 5, 6, 7], [8]], [[1], [1, 2], [3]]
    cache = BatchKVCache(translator, range(2))
    encode_sources(translator, cache, sources[:2])
    agree(translator, forward_last(translator, cache, texts[:2]), texts[:2], sources[:2])
    other = BatchKVCache(translator, [2])
    encode_sources(translator, other, sources[2:])
    forward_last(translator, other, texts[2:])
    cache.append_rows(other)
    texts = [[*text, 9] for text in texts]
    agree(translator, forward_last(translator, cache, [[9]] * 3), texts, sources)
    cache.remove_row(0)
    cache.reorder([1, 0, 1])
    texts, sources = [texts[1], texts[2], texts[1]], [sources[1], sources[2], sources[1]]
    agree(translator, forward_last(translator, cache, [[5]] * 3), [[*text, 5] for text in texts], sources)


def windowed(size):
    block = Block(
        (
            pre(RMSNorm(), self_attn=Attention(4, mask=SlidingWindow(size), position=Rotary())),
            pre(RMSNorm(), ffn=FeedForward(64)),
        )
    )
    return Model(decoder=Stack(32, Embeddings(40), (block,) * 2), head=LMHead(40)).build(seed=0).double().eval()


def test_a_window_reads_only_the_keys_it_reaches():
    model, text = windowed(4), list(range(20))
    cache = BatchKVCache(model, [0, 1])
    forward_last(model, cache, [text, text[:9]])
    agree(model, forward_last(model, cache, [[30], [31]]), [[*text, 30], [*text[:9], 31]])
    cache.start_positions = cache.lengths
    assert cache._first_visible(0) == 10 - 3, "the shorter row has read 10 tokens, and sees three of them and itself"


def after_poison(model):
    """A row of NaN is let go, and two others take its place."""
    cache, other, texts = BatchKVCache(model, [0]), BatchKVCache(model, [1, 2]), [[1, 2], [3, 4, 5, 6]]
    forward_last(model, cache, [[1, 2, 3, 4, 5, 6, 7, 8]])
    with torch.inference_mode():
        for pair in cache.kv.values():
            for kept in pair:
                kept.fill_(torch.nan)
    cache.remove_row(0)
    forward_last(model, other, texts)
    cache.append_rows(other)
    return forward_last(model, cache, [[7], [7]]), [[*text, 7] for text in texts]


def test_nan_of_a_removed_row_does_not_spread(model):
    agree(model, *after_poison(model))


def test_it_would_without_the_zeros(model, monkeypatch):
    def careless(room, given, first, last):
        for kept, fresh in zip(room, given, strict=True):
            width = min(kept.shape[2], fresh.shape[2], 4)
            kept[first:last, :, :width] = fresh[: last - first, :, :width]

    monkeypatch.setattr("headwater.generation.kv_cache._copy_rows", careless)
    assert after_poison(model)[0].isnan().any()


@pytest.mark.parametrize("when", range(4))
def test_an_interrupted_reading_leaves_no_trace(model, when):
    cache = BatchKVCache(model, [0, 1])
    forward_last(model, cache, [[1, 2, 3], [4, 5]])
    calls = []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == when + 1:
            raise KeyboardInterrupt

    hooks = [
        m.register_forward_hook(interrupt)
        for m in (model.decoder.embed, *model.decoder.layers, model.decoder.final_norm)
    ]
    with pytest.raises(KeyboardInterrupt):
        forward_last(model, cache, [[6], [7]])
    for hook in hooks:
        hook.remove()
    assert cache.lengths == [3, 2]
    agree(model, forward_last(model, cache, [[6], [7]]), [[1, 2, 3, 6], [4, 5, 7]])


def test_dropout_is_at_rest_and_afterwards_as_it_was(build):
    model = build(dropout=0.5)
    model.train()
    model.decoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    first, second = (forward_last(model, BatchKVCache(model, [0]), [[1, 2, 3]]) for _ in range(2))
    assert torch.equal(first, second) and before == [module.training for module in model.modules()]


def test_scores_after_each_of_the_last_tokens(model):
    cache = BatchKVCache(model, [0])
    scores = forward_single(model, cache, [1, 2, 3, 4], 2)
    assert scores.shape == (2, 40)
    agree(model, scores, [[1, 2, 3], [1, 2, 3, 4]])


def test_who_looks_ahead_can_not_generate():
    with pytest.raises(BadInput, match="every token may only see what came before it"):
        BatchKVCache(encoder(10, d_model=8, heads=2, layers=1).build(seed=0))


def test_the_number_of_rows_is_checked(model):
    cache = BatchKVCache(model, [0])
    with pytest.raises(BadInput, match="it has 1 rows, got 2"):
        model.decode(torch.tensor([[1], [2]]), cache=cache)


def test_the_cache_does_not_grow_beyond_max_columns(model):
    cache = BatchKVCache(model, [0], max_columns=12)
    for _ in range(12):
        forward_last(model, cache, [[1]])
    assert {k.shape[2] for k, _ in cache.kv.values()} == {12}
    assert cache.nbytes == 2 * 2 * 2 * 12 * 8 * 8, "two layers, k and v, two heads, 12 columns, width 8, 8 bytes"
