"""Linear attention: the formula token by token, a state of constant size, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import headwater
from headwater import core as hw
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder, encoder, transformer
from headwater.generation.forward import forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.parts import swap
from headwater.variants.linear_attention import EPS, LinearAttention, feature_map, linear_attention

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "norm_position": "pre", "position": "rotary", "dropout": 0.0}


def model(**sizes) -> hw.Transformer:
    return decoder(40, **{**SIZES, "attention": "linear", **sizes}).build(seed=0).double().eval()


def qkv(length=150, heads=4, kv_heads=2):
    draw = torch.Generator().manual_seed(0)
    shapes = (heads, length, 8), (kv_heads, length, 8), (kv_heads, length, 5)
    return [torch.randn(2, *shape, generator=draw, dtype=torch.double) for shape in shapes]


def one_by_one(q, k, v, leak=0):
    """The recurrence: S += φ(k) vᵀ, z += φ(k), out = φ(q) S / (φ(q) z + ε). leak: keys ahead that are seen."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    outputs = []
    for i in range(q.shape[2]):
        features = feature_map(k[:, :, : i + 1 + leak])
        query = feature_map(q[:, :, i])[..., None, :]  # [B, H, 1, K]
        numerator = query @ (features.mT @ v[:, :, : i + 1 + leak])
        outputs.append(numerator / (query @ features.sum(2)[..., None] + EPS))
    return torch.cat(outputs, 2)


def test_chunks_give_the_recurrence():
    q, k, v = qkv()
    out, _state = linear_attention(q, k, v, causal=True)
    torch.testing.assert_close(out, one_by_one(q, k, v))
    assert (out - one_by_one(q, k, v, leak=1)).abs().max() > 1e-2, "a leak of one token would be seen"


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 149])
def test_a_state_stands_for_all_earlier_tokens(cut):
    q, k, v = qkv()
    whole, last = linear_attention(q, k, v, causal=True)
    first, state = linear_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], causal=True)
    rest, end = linear_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], causal=True, state=state)
    torch.testing.assert_close(torch.cat((first, rest), 2), whole)
    torch.testing.assert_close(end, last)
    lacking, _state = linear_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], causal=True)
    assert (lacking - whole[:, :, cut:]).abs().max() > 1e-2, "a lost state would be seen"


def test_every_law_of_a_decoder_and_an_encoder_holds():
    """Future, padding on both sides, batch, documents in one row, cache, hooks = the eager formula, gradients."""
    assert headwater.check(model()).ok
    assert headwater.check(model(kv_heads=2, position="none")).ok
    assert headwater.check(encoder(40, **SIZES, attention="linear").build(seed=0).double().eval()).ok


def test_memory_in_decoding_does_not_grow():
    linear = model()
    cache = BatchKVCache(linear, [0])
    forward_last(linear, cache, [[1, 2, 3]])
    after_three = cache.nbytes
    forward_last(linear, cache, [[4] * 500])
    assert cache.nbytes == after_three == 2 * 4 * (8 * 8 + 8) * 8  # layers, heads, (S and z), bytes
    assert cache.lengths == [503]


def test_a_cropped_row_is_computed_again():
    linear, text = model(), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    cache = BatchKVCache(linear, [0])
    forward_last(linear, cache, [text[:5]])
    forward_last(linear, cache, [text[5:]])
    cache.crop([7])
    assert cache.lengths == [5], "the state before the last step"
    cache.crop([2])
    assert cache.lengths == [0], "no state"
    again = forward_last(linear, cache, [text])
    torch.testing.assert_close(again[0], linear(torch.tensor([text]))[0, -1])


def test_cross_attention_can_be_linear():
    spec = transformer(20, 40, **SIZES)
    spec = swap(spec, hw.CrossAttention, lambda layer: replace(layer, kernel=LinearAttention()))
    both = spec.build(seed=0).double().eval()
    ids, source = torch.randint(0, 20, (2, 9)), torch.randint(0, 20, (2, 7))
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    padded = both(ids, source=source, source_attention_mask=real)
    torch.testing.assert_close(padded[1:], both(ids[1:], source=source[1:, :4]))
    assert (padded[1] - both(ids, source=source)[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"position": "alibi"}, "LinearAttention cannot be used with a position encoding that adds a bias"),
        ({"position": "xl"}, "use position rotary, sinusoidal or learned"),
        ({"attention_dropout": 0.1}, "attention dropout must be 0"),
        ({"attention": "linear:size=3"}, "attention linear has no size 'size', its sizes are none"),
        ({"attention": "lineal"}, "did you mean 'linear'?"),
        ({"attention": "window:sise=3"}, "did you mean 'size'?"),
        ({"attention": "window:size=-3"}, "size must be an integer, got '-3'; write window:size=256"),
        ({"attention": "window:size=0"}, "size must be at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_when_built(sizes, words):
    with pytest.raises(BadSetting) as fault:
        decoder(40, **{**SIZES, "attention": "linear", **sizes}).build()
    assert words in str(fault.value) and "\n" not in str(fault.value)


def test_a_window_is_refused():
    windowed = hw.Attention(4, mask=hw.SlidingWindow(4), kernel=LinearAttention())
    with pytest.raises(BadSetting, match=r"the mask of Attention must be Causal or Bidirectional, got 'SlidingWindow'"):
        windowed.build(32)


def test_a_state_cannot_be_cropped_in_the_core():
    linear = model()
    cache = hw.dynamic_cache(linear)
    linear.decode(torch.tensor([[1, 2, 3]]), cache=cache)
    cache.crop(3)
    with pytest.raises(BadInput, match="the state of a recurrent layer cannot be cropped"):
        cache.crop(2)


def test_one_stack_may_mix_attentions():
    spec = decoder(40, **SIZES)
    linear = decoder(40, **SIZES, attention="linear")
    stack = replace(spec.decoder, layers=(spec.decoder.layers[0], linear.decoder.layers[0]))
    mixed = replace(spec, decoder=stack).build(seed=0).double().eval()
    assert headwater.check(mixed).ok
    cache, texts = BatchKVCache(mixed, range(2)), [[1, 2, 3], [4]]
    forward_last(mixed, cache, texts)
    scores = forward_last(mixed, cache, [[7], [8, 9]])
    torch.testing.assert_close(scores[1], mixed(torch.tensor([[4, 8, 9]]))[0, -1])


@pytest.mark.parametrize("attention", ["linear", "performer:features=8", "window:size=4"])
def test_it_may_be_chosen_for_training_by_name(tmp_path, attention):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log\n" * 40)
    sizes = {"layers": 1, "d_model": 16, "heads": 2, "d_ff": 16, "context_length": 16, "tokenizer": "char"}
    trained = headwater.train(text, out=tmp_path / "run", max_steps=3, attention=attention, **sizes)
    name = type(trained.model.decoder.layers[0].self_attn.spec.kernel).__name__
    assert name == {"linear": "LinearAttention", "window:size=4": "SDPA"}.get(attention, "Performer")


def test_each_stack_may_have_another_attention():
    spec = transformer(20, 30, **SIZES, encoder_attention="linformer:features=8", decoder_attention="linear")
    kernels = [type(stack.layers[0].branches[0].layer.kernel).__name__ for stack in (spec.encoder, spec.decoder)]
    assert kernels == ["Linformer", "LinearAttention"]
    assert headwater.check(spec.build(seed=0).double()).ok
    with pytest.raises(BadSetting, match="attention linformer reads both directions"):
        transformer(20, 30, **SIZES, attention="linformer").build()
