"""Attention as data: the model's own weights, whole or in parts, exact or within a budget; tokens one can read."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwater
from headwater.core import Attention as AttentionPart
from headwater.core import Block, Embeddings, FeedForward, LMHead, Model, RMSNorm, Rotary, SlidingWindow, Stack, pre
from headwater.errors import BadInput, BadSetting, TooLong
from headwater.inspection import alignment, attention, attention_maps
from headwater.inspection.inputs import Token, label_tokens, tokenize_input
from headwater.inspection.results import group_label, group_tokens, pool_by_group
from headwater.variants.soft_cap import SoftCap

TEXT = "你好 world"


def test_rows_sum_to_one_in_every_layer_kind_and_head(any_shape):
    two = bool(any_shape.model.encoder and any_shape.model.decoder)
    result = attention_maps(any_shape, TEXT, "hi there" if two else None)
    kinds = ["encoder.self_attn", "decoder.self_attn", "decoder.cross_attn"] if two else None
    assert kinds is None or sorted(result.kinds) == sorted(kinds)
    assert len(result.maps) == 3 * len(result.kinds) and result.precision == "exact"
    for m in result.maps:
        rows, columns = result.query_key_tokens(m.kind)
        assert m.weights.shape == (4, len(rows), len(columns)) and m.weights.dtype == np.float32
        np.testing.assert_allclose(m.weights.sum(-1), 1, atol=1e-5)
        if m.kind == "decoder.self_attn":
            assert not np.triu(m.weights, 1).any(), "no head may see the future"


STYLES = ["pre", "post", "sandwich", "alibi", "relative", "xl"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_weights_in_chunks_equal_the_tap(make, style, rows, monkeypatch):
    model = make("decoder", style)
    monkeypatch.setattr(attention, "WEIGHTS_PER_CHUNK", rows * 4 * 12)
    result = attention_maps(model, TEXT)
    with torch.no_grad(), headwater.watch(model.model, "decoder.layers.*.self_attn") as seen:
        tokenize_input(model, TEXT).forward()
    for n in range(3):
        exact = seen[f"decoder.layers.{n}.self_attn"][0].numpy()
        np.testing.assert_allclose(result.get_map("decoder.self_attn", n).weights, exact, atol=1e-6)


def test_the_models_own_pass_stays_as_it_is(writer):
    captured = []
    handle = writer.model.decoder.register_forward_hook(lambda m, i, output: captured.append(output))
    with torch.no_grad():
        tokenize_input(writer, TEXT).hidden_states()
        attention_maps(writer, TEXT)
    handle.remove()
    assert torch.equal(*captured), "bit for bit: the weights are computed beside it"
    assert not any(m._forward_hooks for m in writer.model.modules())


def test_a_model_in_training_is_given_back_so(make):
    model = make("decoder")
    model.model.train()
    one, two = (attention_maps(model, TEXT).maps[0].weights for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert model.model.training and model.model.decoder.layers[0].dropout.training


def test_windows_soft_caps_and_shared_layers():
    attn = AttentionPart(2, kv_heads=1, mask=SlidingWindow(3), position=Rotary(), kernel=SoftCap(5.0))
    block = Block((pre(RMSNorm(), self_attn=attn), pre(RMSNorm(), ffn=FeedForward(16))))
    spec = Model(decoder=Stack(8, Embeddings(30), (block,), order=(0, 0)), head=LMHead(30))
    model = spec.build(seed=0)
    result = attention_maps(model, list(range(20)))
    assert [m.layer for m in result.maps] == [0, 1]
    assert np.abs(result.maps[0].weights - result.maps[1].weights).max() > 1e-4, "one module, two runs"
    seen = np.subtract.outer(np.arange(20), np.arange(20))
    for m in result.maps:
        assert not m.weights[:, (seen < 0) | (seen >= 3)].any()
    with headwater.watch(model, "decoder.layers.0.self_attn") as said:
        model(torch.arange(20)[None])
    for m, exact in zip(result.maps, said.history("decoder.layers.0.self_attn"), strict=True):
        np.testing.assert_allclose(m.weights, exact[0].numpy(), atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- budgets


def test_a_smaller_budget_keeps_bytes_then_the_greatest_of_squares(writer, monkeypatch):
    text = "a long text of many bytes, some forty or so"
    exact = attention_maps(writer, text)
    cells = sum(m.weights.size for m in exact.maps)
    coarse = attention_maps(writer, text, max_bytes=cells)
    assert coarse.precision == "in steps of 1/255"
    monkeypatch.setattr(attention, "WEIGHTS_PER_CHUNK", 5 * 4 * len(text))  # parts that do not end where squares do
    pooled = attention_maps(writer, text, max_bytes=cells // 9 + 1)
    assert pooled.precision == "in steps of 1/255, pooled by 3" and pooled.maps[0].pool_size == 3
    for one, two, three in zip(exact.maps, coarse.maps, pooled.maps, strict=True):
        assert two.weights.dtype == np.uint8
        assert np.abs(two.head_weights(1) - one.head_weights(1)).max() <= 0.5 / 255 + 1e-6
        squares = attention.max_pool(torch.from_numpy(one.weights), 3).numpy()
        assert np.abs(three.weights / 255 - squares).max() <= 0.5 / 255 + 1e-6
        np.testing.assert_array_equal(three.tile(1), attention.to_uint8(squares[1]))


def test_tiles_are_parts_in_bytes(writer):
    m = attention_maps(writer, "a text of bytes").get_map("decoder.self_attn", 1)
    np.testing.assert_array_equal(m.tile(2), np.rint(m.weights[2] * 255))
    np.testing.assert_array_equal(m.tile(2, rows=(4, 9), columns=(0, 6)), m.tile(2)[4:9, :6])
    np.testing.assert_array_equal(m.tile(), np.rint(m.weights.mean(0) * 255))
    small = m.tile(2, size=4)
    assert max(small.shape) <= 4 and small.dtype == np.uint8 and small.max() == m.tile(2).max()


def test_only_the_selected_weights_are_stored(translator):
    result = attention_maps(translator, TEXT, "hi", kinds=["decoder.cross_attn"], layers=[2], heads=[1, 3])
    (m,) = result.maps
    assert (m.kind, m.layer, m.heads, m.weights.shape[0]) == ("decoder.cross_attn", 2, (1, 3), 2)
    np.testing.assert_array_equal(m.head_weights(3), m.weights[1])
    with pytest.raises(BadSetting, match=r"head 0 was not kept, \[1, 3\] were"):
        m.head_weights(0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"kinds": ["decoder.cros_attn"]}, "did you mean 'decoder.cross_attn'"),
        ({"layers": [3]}, "layer must be from 0 to 2, got 3"),
        ({"heads": [4]}, "head must be from 0 to 3, got 4"),
    ],
)
def test_what_is_not_there_is_refused(translator, asked, says):
    with pytest.raises(BadSetting, match=says):
        attention_maps(translator, TEXT, "hi", **asked)


LONG = """
import resource, torch, headwater
from headwater.inspection import attention_maps, classify_heads
model = headwater.decoder(50, d_model=64, heads=8, layers=6, d_ff=64).build(seed=0)
ids = torch.randint(0, 50, (2000,)).tolist()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = attention_maps(model, ids, max_bytes=1 << 26)
kept = sum(m.weights.nbytes for m in found.maps)
assert kept <= 1 << 26, kept
assert len(classify_heads(model, ids, layers=[0, 5]).heads) == 16
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_two_thousand_tokens_stay_within_memory():
    """All weights in float32 would be 768 MB; the plain formula would need several times one layer's 128 MB."""
    done = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert int(done.stdout) / 1024 < 300, f"{done.stdout} kB more than before"


# -------------------------------------------------------------------------------------------------------------- tokens


def test_bytes_of_one_character_are_joined(tokenizer):
    tokens = label_tokens(tokenizer.encode("a你\n"), tokenizer)
    assert [token.label for token in tokens] == ["a", "你¹", "你²", "你³", "⏎"]
    made = group_tokens(tokens)
    assert [group_label(tokens, group) for group in made] == ["a", "你", "⏎"]
    weights = np.eye(5, dtype=np.float32)
    np.testing.assert_allclose(pool_by_group(weights, made, made), np.eye(3), atol=1e-6)


def test_half_a_character_and_a_control_token_can_be_read(tokenizer):
    half = tokenizer.encode("你")[:2]
    assert [t.label for t in label_tokens([256, *half, 259], tokenizer)] == ["<s>", "\\xe4", "\\xbd", "<mask>"]
    assert Token(1, "\x1b[31m\u202e").label == "\\x1b[31m\\u202e"


def test_words_begin_at_spaces_and_chinese():
    tokens = [Token(0, text) for text in ("The", " cat", "s", " ", "你", "好", "!")]
    assert [group_label(tokens, group) for group in group_tokens(tokens, "word")] == [
        "The",
        "cats",
        "␣",
        "你",
        "好",
        "!",
    ]
    with pytest.raises(BadSetting, match="did you mean 'word'"):
        group_tokens(tokens, "wrod")


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_joining_keeps_rows_distributions(rows, columns):
    def ranges(sizes):
        ends = np.cumsum(sizes)
        return [range(int(b) - n, int(b)) for n, b in zip(sizes, ends, strict=True)]

    weights = np.random.default_rng(0).dirichlet(np.ones(sum(columns)), sum(rows))
    np.testing.assert_allclose(pool_by_group(weights, ranges(rows), ranges(columns)).sum(1), 1)


def test_alignment_is_the_mean_of_cross_attention(translator):
    result = alignment(translator, "你好", "ok")
    assert result.source == ("你", "好") and result.target == ("o", "k", "</s>") and not result.generated
    np.testing.assert_allclose(result.weights.sum(1), 1, atol=1e-5)
    exact = attention_maps(translator, "你好", "ok", kinds=["decoder.cross_attn"])
    mean = np.mean([m.weights.mean(0) for m in exact.maps], 0)
    np.testing.assert_allclose(result.weights, mean.reshape(3, 2, 3).sum(2), atol=1e-6)


def test_without_a_target_it_aligns_what_it_writes_itself(translator):
    reading = tokenize_input(translator, "ab", max_new_tokens=5)
    said = headwater.generate(translator, "ab", max_tokens=5)
    assert tuple(token.id for token in reading.next_tokens) == said.ids and reading.generated
    assert [token.id for token in reading.tokens] == [256, *said.ids[:-1]]
    assert alignment(translator, reading).weights.shape[1] == 2


def test_texts_that_cannot_be_read_are_refused(writer, translator):
    with pytest.raises(BadInput, match="only an encoder-decoder has a target"):
        tokenize_input(writer, "a", "b")
    with pytest.raises(BadInput, match="only an encoder-decoder has one"):
        alignment(writer, "a")
    with pytest.raises(BadInput, match="a model alone reads token ids, got 'abc'"):
        attention_maps(writer.model, "abc")
    with pytest.raises(BadInput, match="a model of ours must be given, got Linear"):
        attention_maps(torch.nn.Linear(1, 1), "abc")
    writer.config["max_position_embeddings"] = 4
    with pytest.raises(TooLong, match="reads 4 tokens, got 5"):
        tokenize_input(writer, "abcde")
    del writer.config["max_position_embeddings"]
