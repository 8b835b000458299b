"""The cache of a running batch gives what the whole text gives, whatever its rows have been through."""

from __future__ import annotations

import random

import pytest
import torch

from headwater.core import (
    Attention,
    Block,
    FeedForward,
    LanguageHead,
    Model,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    Window,
    encoder,
    pre,
)
from headwater.errors import BadInput
from headwater.generation.reading import listen, read, read_all
from headwater.generation.slots import Slots

SHAPES = ["rotary", "learned", "alibi", "relative", "xl"]


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
    slots = Slots(model, range(3))
    agree(model, read(model, slots, texts), texts)
    for step in range(4):
        texts = [[*text, 10 + step] for text in texts]
        agree(model, read(model, slots, [text[-1:] for text in texts]), texts)


@pytest.mark.parametrize("shape", ["rotary", "alibi"])
def test_a_random_life(build, shape):
    """Rows join, leave, go back, change places and are doubled; each still reads as if alone."""
    model, chance = build(shape), random.Random(0)

    def words(count):
        return [chance.randrange(40) for _ in range(count)]

    slots, texts = Slots(model), []
    for _ in range(60):
        match chance.choice(["join", "join", "leave", "crop", "select", "read", "read"]):
            case "join" if len(texts) < 6:
                fresh = [words(chance.randint(1, 9)) for _ in range(chance.randint(1, 2))]
                other = Slots(model, range(len(fresh)))
                read(model, other, fresh)
                slots.join(other)
                texts += fresh
            case "leave" if texts:
                gone = chance.randrange(len(texts))
                slots.leave(gone)
                texts[gone] = texts[-1]
                texts.pop()
            case "crop" if texts:
                lengths = [chance.randint(1, len(text)) for text in texts]
                slots.crop(lengths)
                texts = [text[:n] for text, n in zip(texts, lengths, strict=True)]
            case "select" if texts:
                rows = [chance.randrange(len(texts)) for _ in range(chance.randint(1, 5))]
                slots.select(rows)
                texts = [list(texts[row]) for row in rows]
            case "read" if texts:
                news = [words(chance.randint(1, 3)) for _ in texts]
                scores = read(model, slots, news)
                texts = [[*text, *new] for text, new in zip(texts, news, strict=True)]
                agree(model, scores, texts)
        assert slots.lengths == [len(text) for text in texts]


def test_sources_of_any_length(translator):
    sources, texts = [[1, 2], [3, 4, 5, 6, 7], [8]], [[1], [1, 2], [3]]
    slots = Slots(translator, range(2))
    listen(translator, slots, sources[:2])
    agree(translator, read(translator, slots, texts[:2]), texts[:2], sources[:2])
    other = Slots(translator, [2])
    listen(translator, other, sources[2:])
    read(translator, other, texts[2:])
    slots.join(other)
    texts = [[*text, 9] for text in texts]
    agree(translator, read(translator, slots, [[9]] * 3), texts, sources)
    slots.leave(0)
    slots.select([1, 0, 1])
    texts, sources = [texts[1], texts[2], texts[1]], [sources[1], sources[2], sources[1]]
    agree(translator, read(translator, slots, [[5]] * 3), [[*text, 5] for text in texts], sources)


def windowed(size):
    block = Block(
        (
            pre(RMSNorm(), self_attn=Attention(4, sees=Window(size), position=Rotary())),
            pre(RMSNorm(), ffn=FeedForward(64)),
        )
    )
    return Model(decoder=Stack(32, Tokens(40), (block,) * 2), head=LanguageHead(40)).build(seed=0).double().eval()


def test_a_window_is_shown_only_what_it_reaches():
    model, text = windowed(4), list(range(20))
    slots = Slots(model, [0, 1])
    read(model, slots, [text, text[:9]])
    agree(model, read(model, slots, [[30], [31]]), [[*text, 30], [*text[:9], 31]])
    slots.begins = slots.lengths
    assert slots._first(0) == 10 - 3, "the shorter row has read 10 tokens, and sees three of them and itself"


def after_poison(model):
    """A row of NaN is let go, and two others take its place."""
    slots, other, texts = Slots(model, [0]), Slots(model, [1, 2]), [[1, 2], [3, 4, 5, 6]]
    read(model, slots, [[1, 2, 3, 4, 5, 6, 7, 8]])
    with torch.inference_mode():
        for pair in slots.room.values():
            for kept in pair:
                kept.fill_(torch.nan)
    slots.leave(0)
    read(model, other, texts)
    slots.join(other)
    return read(model, slots, [[7], [7]]), [[*text, 7] for text in texts]


def test_what_a_poisoned_row_leaves_behind_harms_nobody(model):
    agree(model, *after_poison(model))


def test_it_would_without_the_zeros(model, monkeypatch):
    def careless(room, given, first, last):
        for kept, fresh in zip(room, given, strict=True):
            width = min(kept.shape[2], fresh.shape[2], 4)
            kept[first:last, :, :width] = fresh[: last - first, :, :width]

    monkeypatch.setattr("headwater.generation.slots._fill", careless)
    assert after_poison(model)[0].isnan().any()


@pytest.mark.parametrize("when", range(4))
def test_an_interrupted_reading_leaves_no_trace(model, when):
    slots = Slots(model, [0, 1])
    read(model, slots, [[1, 2, 3], [4, 5]])
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
        read(model, slots, [[6], [7]])
    for hook in hooks:
        hook.remove()
    assert slots.lengths == [3, 2]
    agree(model, read(model, slots, [[6], [7]]), [[1, 2, 3, 6], [4, 5, 7]])


def test_dropout_is_at_rest_and_afterwards_as_it_was(build):
    model = build(dropout=0.5)
    model.train()
    model.decoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    first, second = (read(model, Slots(model, [0]), [[1, 2, 3]]) for _ in range(2))
    assert torch.equal(first, second) and before == [module.training for module in model.modules()]


def test_scores_after_each_of_the_last_tokens(model):
    slots = Slots(model, [0])
    scores = read_all(model, slots, [1, 2, 3, 4], 2)
    assert scores.shape == (2, 40)
    agree(model, scores, [[1, 2, 3], [1, 2, 3, 4]])


def test_who_looks_ahead_can_not_generate():
    with pytest.raises(BadInput, match="every token may only see what came before it"):
        Slots(encoder(10, d_model=8, heads=2, layers=1).build(seed=0))


def test_the_number_of_rows_is_checked(model):
    slots = Slots(model, [0])
    with pytest.raises(BadInput, match="it holds 1 rows, got 2"):
        model.decode(torch.tensor([[1], [2]]), cache=slots)


def test_room_stays_below_most(model):
    slots = Slots(model, [0], most=12)
    for _ in range(12):
        read(model, slots, [[1]])
    assert {k.shape[2] for k, _ in slots.room.values()} == {12}
    assert slots.bytes == 2 * 2 * 2 * 12 * 8 * 8, "two layers, k and v, two heads, 12 columns, width 8, 8 bytes"
