"""watch: any module by its path, and the model answers as if nobody listened."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import headwater
from headwater.core import Attention, Block, Causal, Embeddings, FeedForward, LMHead, Model, RMSNorm, Stack, pre
from headwater.errors import BadSetting
from headwater.inspection.hooks import matches_pattern
from headwater.inspection.inputs import tokenize_input

TEXT = "你好 world"


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_answer_does_not_change(any_shape):
    reading = tokenize_input(any_shape, TEXT, "hi" if any_shape.model.encoder and any_shape.model.decoder else None)
    with torch.no_grad():
        alone = reading.forward()
        with headwater.watch(any_shape.model, "**.self_attn") as seen:
            watched = reading.forward()
        with headwater.watch(any_shape.model, "**.layers.*", "**.ffn.up"):
            beside = reading.forward()
    assert torch.equal(alone, beside), "only a watched attention may take another way to the same numbers"
    assert (alone - watched).abs().max() <= 1e-6 * alone.abs().max()
    assert all(weights.shape[1] == 4 for weights in seen.values())
    assert hooks(any_shape.model) == 0


def test_a_fault_in_the_spelled_out_formula_would_be_seen(writer, monkeypatch):
    """The law above can fail: a scale that only the plain formula forgets changes the watched answer."""
    from headwater.core.kernels import Kernel

    monkeypatch.setattr(Kernel, "transform_scores", lambda self, scores: scores * 1.1)
    reading = tokenize_input(writer, TEXT)
    with torch.no_grad():
        alone = reading.forward()
        with headwater.watch(writer.model, "**.self_attn"):
            watched = reading.forward()
    assert (alone - watched).abs().max() > 1e-4 * alone.abs().max()


def test_weights_of_cross_attention_are_a_distribution(translator):
    reading = tokenize_input(translator, TEXT, "hi")
    with headwater.watch(translator, "decoder.layers.*.cross_attn") as seen:
        reading.forward()
    assert list(seen) == [f"decoder.layers.{n}.cross_attn" for n in range(3)]
    for weights in seen.values():
        assert weights.shape == (1, 4, len(reading.tokens), len(reading.source))
        assert torch.allclose(weights.sum(-1), torch.ones(()))
        assert not weights.requires_grad


def test_a_block_gives_the_stream_and_a_tap_its_value(writer):
    reading = tokenize_input(writer, TEXT)
    with torch.no_grad(), headwater.watch(writer.model, "decoder.layers.2", "decoder.layers.2.**.weights") as seen:
        states, _ = reading.hidden_states()
        stream = seen["decoder.layers.2"]
        assert torch.equal(writer.model.decoder.final_norm(stream), states)
    assert seen["decoder.layers.2.self_attn.kernel.weights"].shape[1] == 4
    assert "(1, 12, 32)" in repr(seen)


def test_every_call_of_a_module_is_captured(tokenizer):
    block = Block((pre(RMSNorm(), self_attn=Attention(2, mask=Causal())), pre(RMSNorm(), ffn=FeedForward(16))))
    model = Model(decoder=Stack(8, Embeddings(10), (block,), order=(0, 0, 0)), head=LMHead(10)).build(seed=0)
    with headwater.watch(model, "decoder.layers.0") as seen:
        model(torch.tensor([[1, 2]]))
    assert len(seen.history("decoder.layers.0")) == 3
    assert torch.equal(seen["decoder.layers.0"], seen.history("decoder.layers.0")[-1])


def test_generation_can_be_watched(writer):
    plain = headwater.generate(writer, "ab", max_tokens=3)
    with headwater.watch(writer.model, "decoder.layers.0.self_attn") as seen:
        watched = headwater.generate(writer, "ab", max_tokens=3)
    assert watched.ids == plain.ids
    assert len(seen.history("decoder.layers.0.self_attn")) >= len(plain.ids)


def test_any_other_module_can_be_watched():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    nn.init.constant_(model[0].weight, -1.0)  # below 0, so that the ReLU changes it
    with headwater.watch(model, "0") as seen:
        out = model(torch.ones(2, 3))
    assert bool((seen["0"] != out).any()), "a copy: what runs later in place must not change it"
    outer = nn.Module()
    outer.model = model
    with headwater.watch(outer, "model.0") as seen:
        outer.model(torch.ones(2, 3))
    assert list(seen) == ["model.0"], "a part of that name is a part"


def test_hooks_go_when_the_model_fails(writer):
    with pytest.raises(headwater.BadInput), headwater.watch(writer.model, "**"):
        writer.model(torch.zeros(1, 2))
    assert hooks(writer.model) == 0


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("decoder.layers.0.self_atn", "did you mean 'decoder.layers.0.self_attn'?"),
        ("decoder.layer.*.self_attn", "did you mean 'decoder.layers.*.self_attn'?"),
        ("zebra", "known: bridge, decoder"),
    ],
)
def test_a_pattern_without_match_lists_the_paths(writer, pattern, says):
    with pytest.raises(BadSetting, match="matches no module") as error, headwater.watch(writer.model, pattern):
        pass
    assert says in str(error.value)


def test_a_path_that_was_not_watched_is_refused(writer):
    with headwater.watch(writer.model, "decoder.layers.0") as seen:
        assert len(seen) == 0
        with pytest.raises(KeyError, match="said nothing yet"):
            seen["decoder.layers.0"]
        with pytest.raises(KeyError, match=r"is not watched; did you mean 'decoder.layers.0'"):
            seen["decoder.layers.1"]
    with pytest.raises(BadSetting, match="a pattern must be given"), headwater.watch(writer.model):
        pass
    with pytest.raises(BadSetting, match="a model must be given, got str"), headwater.watch("gpt2", "*"):
        pass


@pytest.mark.parametrize(
    ("path", "pattern", "holds"),
    [("a.b.c", "a.*.c", True), ("a.b.c", "a.*", False), ("a.b.c", "**", True), ("a.c", "a.**.c", True),
     ("a.b", "a.[bc]", True), ("ab", "a.b", False)],
)  # fmt: skip
def test_a_star_is_one_name(path, pattern, holds):
    assert matches_pattern(path, pattern) is holds
