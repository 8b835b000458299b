"""Attention weights as data: complete or selected, exact or within a memory budget; readable token labels."""

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
from headwater.inspection import alignment, attention, attention_maps, attention_weights
from headwater.inspection.inputs import Token, label_tokens, tokenize_input
from headwater.inspection.results import group_label, group_tokens, pool_by_group
from headwater.variants.soft_cap import SoftCap

TEXT = "你好 world"


def test_rows_sum_to_one_in_every_layer_kind_and_head(any_model):
    two = bool(any_model.model.encoder and any_model.model.decoder)
    result = attention_maps(any_model, TEXT, "hi there" if two else None)
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
def test_weights_in_chunks_equal_the_tap(make_model, style, rows, monkeypatch):
    model = make_model("decoder", style)
    monkeypatch.setattr(attention_weights, "WEIGHTS_PER_CHUNK", rows * 4 * 12)
    result = attention_maps(model, TEXT)
    with torch.no_grad(), headwater.watch(model.model, "decoder.layers.*.self_attn") as activations:
        tokenize_input(model, TEXT).forward()
    for n in range(3):
        exact = activations[f"decoder.layers.{n}.self_attn"][0].numpy()
        np.testing.assert_allclose(result.get_map("decoder.self_attn", n).weights, exact, atol=1e-6)


def test_the_forward_pass_is_unchanged(causal_lm):
    captured = []
    handle = causal_lm.model.decoder.register_forward_hook(lambda m, i, output: captured.append(output))
    with torch.no_grad():
        tokenize_input(causal_lm, TEXT).hidden_states()
        attention_maps(causal_lm, TEXT)
    handle.remove()
    assert torch.equal(*captured), "bit-identical: the weights are computed separately"
    assert not any(m._forward_hooks for m in causal_lm.model.modules())


def test_training_mode_is_restored(make_model):
    model = make_model("decoder")
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
    assert np.abs(result.maps[0].weights - result.maps[1].weights).max() > 1e-4, "one module, called twice"
    offsets = np.subtract.outer(np.arange(20), np.arange(20))
    for m in result.maps:
        assert not m.weights[:, (offsets < 0) | (offsets >= 3)].any()
    with headwater.watch(model, "decoder.layers.0.self_attn") as activations:
        model(torch.arange(20)[None])
    for m, exact in zip(result.maps, activations.history("decoder.layers.0.self_attn"), strict=True):
        np.testing.assert_allclose(m.weights, exact[0].numpy(), atol=1e-6)


# ------------------------------------------------------------------------------------------------------------- budgets


def test_a_smaller_budget_stores_uint8_then_pools(causal_lm, monkeypatch):
    text = "a long text of many bytes, some forty or so"
    exact = attention_maps(causal_lm, text)
    cells = sum(m.weights.size for m in exact.maps)
    coarse = attention_maps(causal_lm, text, max_bytes=cells)
    assert coarse.precision == "in steps of 1/255"
    chunk = 5 * 4 * len(text)  # does not end at a pooling window
    monkeypatch.setattr(attention_weights, "WEIGHTS_PER_CHUNK", chunk)
    pooled = attention_maps(causal_lm, text, max_bytes=cells // 9 + 1)
    assert pooled.precision == "in steps of 1/255, pooled by 3" and pooled.maps[0].pool_size == 3
    for one, two, three in zip(exact.maps, coarse.maps, pooled.maps, strict=True):
        assert two.weights.dtype == np.uint8
        assert np.abs(two.head_weights(1) - one.head_weights(1)).max() <= 0.5 / 255 + 1e-6
        squares = attention.max_pool(torch.from_numpy(one.weights), 3).numpy()
        assert np.abs(three.weights / 255 - squares).max() <= 0.5 / 255 + 1e-6
        np.testing.assert_array_equal(three.tile(1), attention.to_uint8(squares[1]))


def test_tiles_are_uint8_slices(causal_lm):
    m = attention_maps(causal_lm, "a text of bytes").get_map("decoder.self_attn", 1)
    np.testing.assert_array_equal(m.tile(2), np.rint(m.weights[2] * 255))
    np.testing.assert_array_equal(m.tile(2, rows=(4, 9), columns=(0, 6)), m.tile(2)[4:9, :6])
    np.testing.assert_array_equal(m.tile(), np.rint(m.weights.mean(0) * 255))
    small = m.tile(2, size=4)
    assert max(small.shape) <= 4 and small.dtype == np.uint8 and small.max() == m.tile(2).max()


def test_only_the_selected_weights_are_stored(encoder_decoder):
    result = attention_maps(encoder_decoder, TEXT, "hi", kinds=["decoder.cross_attn"], layers=[2], heads=[1, 3])
    (m,) = result.maps
    assert (m.kind, m.layer, m.heads, m.weights.shape[0]) == ("decoder.cross_attn", 2, (1, 3), 2)
    np.testing.assert_array_equal(m.head_weights(3), m.weights[1])
    with pytest.raises(BadSetting, match=r"head 0 was not stored, only \[1, 3\]"):
        m.head_weights(0)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ({"kinds": ["decoder.cros_attn"]}, "did you mean 'decoder.cross_attn'"),
        ({"layers": [3]}, "layer must be from 0 to 2, got 3"),
        ({"heads": [4]}, "head must be from 0 to 3, got 4"),
    ],
)
def test_an_unknown_kind_layer_or_head_is_rejected(encoder_decoder, selection, message):
    with pytest.raises(BadSetting, match=message):
        attention_maps(encoder_decoder, TEXT, "hi", **selection)


LONG = """
import resource, torch, headwater
from headwater.inspection import attention_maps, classify_heads
model = headwater.decoder(50, d_model=64, heads=8, layers=6, d_ff=64).build(seed=0)
ids = torch.randint(0, 50, (2000,)).tolist()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
maps = attention_maps(model, ids, max_bytes=1 << 26).maps
stored = sum(m.weights.nbytes for m in maps)
assert stored <= 1 << 26, stored
assert len(classify_heads(model, ids, layers=[0, 5]).heads) == 16
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_of_two_thousand_tokens_is_bounded():
    """All weights in float32 would be 768 MB; the eager formula needs several times the 128 MB of one layer."""
    process = subprocess.run([sys.executable, "-c", LONG], capture_output=True, text=True, check=True)
    assert int(process.stdout) / 1024 < 300, f"{process.stdout} kB more than before"


# -------------------------------------------------------------------------------------------------------------- tokens


def test_bytes_of_one_character_are_joined(tokenizer):
    tokens = label_tokens(tokenizer.encode("a你\n"), tokenizer)
    assert [token.label for token in tokens] == ["a", "你¹", "你²", "你³", "⏎"]
    groups = group_tokens(tokens)
    assert [group_label(tokens, group) for group in groups] == ["a", "你", "⏎"]
    weights = np.eye(5, dtype=np.float32)
    np.testing.assert_allclose(pool_by_group(weights, groups, groups), np.eye(3), atol=1e-6)


def test_labels_of_partial_characters_and_control_tokens(tokenizer):
    half = tokenizer.encode("你")[:2]
    assert [t.label for t in label_tokens([256, *half, 259], tokenizer)] == ["<s>", "\\xe4", "\\xbd", "<mask>"]
    assert Token(1, "\x1b[31m\u202e").label == "\\x1b[31m\\u202e"


def test_words_start_at_spaces_and_chinese_characters():
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
def test_pooling_by_group_keeps_rows_distributions(rows, columns):
    def ranges(sizes):
        ends = np.cumsum(sizes)
        return [range(int(b) - n, int(b)) for n, b in zip(sizes, ends, strict=True)]

    weights = np.random.default_rng(0).dirichlet(np.ones(sum(columns)), sum(rows))
    np.testing.assert_allclose(pool_by_group(weights, ranges(rows), ranges(columns)).sum(1), 1)


def test_alignment_is_the_mean_of_cross_attention(encoder_decoder):
    result = alignment(encoder_decoder, "你好", "ok")
    assert result.source == ("你", "好") and result.target == ("o", "k", "</s>") and not result.generated
    np.testing.assert_allclose(result.weights.sum(1), 1, atol=1e-5)
    exact = attention_maps(encoder_decoder, "你好", "ok", kinds=["decoder.cross_attn"])
    mean = np.mean([m.weights.mean(0) for m in exact.maps], 0)
    np.testing.assert_allclose(result.weights, mean.reshape(3, 2, 3).sum(2), atol=1e-6)


def test_without_a_target_the_generated_text_is_aligned(encoder_decoder):
    inputs = tokenize_input(encoder_decoder, "ab", max_new_tokens=5)
    completion = headwater.generate(encoder_decoder, "ab", max_tokens=5)
    assert tuple(token.id for token in inputs.next_tokens) == completion.ids and inputs.generated
    assert [token.id for token in inputs.tokens] == [256, *completion.ids[:-1]]
    assert alignment(encoder_decoder, inputs).weights.shape[1] == 2


def test_invalid_inputs_are_rejected(causal_lm, encoder_decoder):
    with pytest.raises(BadInput, match="only an encoder-decoder has a target"):
        tokenize_input(causal_lm, "a", "b")
    with pytest.raises(BadInput, match="must be an encoder-decoder"):
        alignment(causal_lm, "a")
    with pytest.raises(BadInput, match="a model without tokenizer takes token ids, got 'abc'"):
        attention_maps(causal_lm.model, "abc")
    with pytest.raises(BadInput, match="must be a headwater model, got Linear"):
        attention_maps(torch.nn.Linear(1, 1), "abc")
    causal_lm.config["max_position_embeddings"] = 4
    with pytest.raises(TooLong, match="at most 4 tokens, got 5"):
        tokenize_input(causal_lm, "abcde")
    del causal_lm.config["max_position_embeddings"]
