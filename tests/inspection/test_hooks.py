"""watch: captures any module by its path, and does not change the output of the model."""

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


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_watching_does_not_change_the_output(any_model):
    inputs = tokenize_input(any_model, TEXT, "hi" if any_model.model.encoder and any_model.model.decoder else None)
    with torch.no_grad():
        plain = inputs.forward()
        with headwater.watch(any_model.model, "**.self_attn") as activations:
            watched = inputs.forward()
        with headwater.watch(any_model.model, "**.layers.*", "**.ffn.up"):
            with_other_hooks = inputs.forward()
    assert torch.equal(plain, with_other_hooks), "only a watched attention layer uses another kernel"
    assert (plain - watched).abs().max() <= 1e-6 * plain.abs().max()
    assert all(weights.shape[1] == 4 for weights in activations.values())
    assert num_hooks(any_model.model) == 0


def test_a_fault_in_the_eager_formula_changes_the_watched_output(causal_lm, monkeypatch):
    """The planted fault: a scale that only the eager formula has changes the watched output."""
    from headwater.core.kernels import Kernel

    monkeypatch.setattr(Kernel, "transform_scores", lambda self, scores: scores * 1.1)
    inputs = tokenize_input(causal_lm, TEXT)
    with torch.no_grad():
        plain = inputs.forward()
        with headwater.watch(causal_lm.model, "**.self_attn"):
            watched = inputs.forward()
    assert (plain - watched).abs().max() > 1e-4 * plain.abs().max()


def test_weights_of_cross_attention_are_a_distribution(encoder_decoder):
    inputs = tokenize_input(encoder_decoder, TEXT, "hi")
    with headwater.watch(encoder_decoder, "decoder.layers.*.cross_attn") as activations:
        inputs.forward()
    assert list(activations) == [f"decoder.layers.{n}.cross_attn" for n in range(3)]
    for weights in activations.values():
        assert weights.shape == (1, 4, len(inputs.tokens), len(inputs.source))
        assert torch.allclose(weights.sum(-1), torch.ones(()))
        assert not weights.requires_grad


def test_a_block_captures_the_residual_stream_and_a_tap_its_value(causal_lm):
    inputs = tokenize_input(causal_lm, TEXT)
    with (
        torch.no_grad(),
        headwater.watch(causal_lm.model, "decoder.layers.2", "decoder.layers.2.**.weights") as activations,
    ):
        states, _ = inputs.hidden_states()
        stream = activations["decoder.layers.2"]
        assert torch.equal(causal_lm.model.decoder.final_norm(stream), states)
    assert activations["decoder.layers.2.self_attn.kernel.weights"].shape[1] == 4
    assert "(1, 12, 32)" in repr(activations)


def test_every_call_of_a_module_is_captured(tokenizer):
    block = Block((pre(RMSNorm(), self_attn=Attention(2, mask=Causal())), pre(RMSNorm(), ffn=FeedForward(16))))
    model = Model(decoder=Stack(8, Embeddings(10), (block,), order=(0, 0, 0)), head=LMHead(10)).build(seed=0)
    with headwater.watch(model, "decoder.layers.0") as activations:
        model(torch.tensor([[1, 2]]))
    assert len(activations.history("decoder.layers.0")) == 3
    assert torch.equal(activations["decoder.layers.0"], activations.history("decoder.layers.0")[-1])


def test_generation_can_be_watched(causal_lm):
    plain = headwater.generate(causal_lm, "ab", max_tokens=3)
    with headwater.watch(causal_lm.model, "decoder.layers.0.self_attn") as activations:
        watched = headwater.generate(causal_lm, "ab", max_tokens=3)
    assert watched.ids == plain.ids
    assert len(activations.history("decoder.layers.0.self_attn")) >= len(plain.ids)


def test_any_other_module_can_be_watched():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True))
    nn.init.constant_(model[0].weight, -1.0)  # below 0, so that the ReLU changes it
    with headwater.watch(model, "0") as activations:
        out = model(torch.ones(2, 3))
    assert bool((activations["0"] != out).any()), "a copy: later in-place operations must not change it"
    outer = nn.Module()
    outer.model = model
    with headwater.watch(outer, "model.0") as activations:
        outer.model(torch.ones(2, 3))
    assert list(activations) == ["model.0"], "a submodule named model is watched as a submodule"


def test_hooks_are_removed_when_the_model_raises(causal_lm):
    with pytest.raises(headwater.BadInput), headwater.watch(causal_lm.model, "**"):
        causal_lm.model(torch.zeros(1, 2))
    assert num_hooks(causal_lm.model) == 0


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("decoder.layers.0.self_atn", "did you mean 'decoder.layers.0.self_attn'?"),
        ("decoder.layer.*.self_attn", "did you mean 'decoder.layers.*.self_attn'?"),
        ("zebra", "known: bridge, decoder"),
    ],
)
def test_a_pattern_without_match_lists_the_paths(causal_lm, pattern, message):
    with pytest.raises(BadSetting, match="matches no module") as error, headwater.watch(causal_lm.model, pattern):
        pass
    assert message in str(error.value)


def test_a_path_that_was_not_watched_is_rejected(causal_lm):
    with headwater.watch(causal_lm.model, "decoder.layers.0") as activations:
        assert len(activations) == 0
        with pytest.raises(KeyError, match="has no output yet"):
            activations["decoder.layers.0"]
        with pytest.raises(KeyError, match=r"is not watched; did you mean 'decoder.layers.0'"):
            activations["decoder.layers.1"]
    with pytest.raises(BadSetting, match="a pattern must be given"), headwater.watch(causal_lm.model):
        pass
    with pytest.raises(BadSetting, match="the model must be an nn.Module, got str"), headwater.watch("gpt2", "*"):
        pass


@pytest.mark.parametrize(
    ("path", "pattern", "matches"),
    [("a.b.c", "a.*.c", True), ("a.b.c", "a.*", False), ("a.b.c", "**", True), ("a.c", "a.**.c", True),
     ("a.b", "a.[bc]", True), ("ab", "a.b", False)],
)  # fmt: skip
def test_a_star_matches_one_name(path, pattern, matches):
    assert matches_pattern(path, pattern) is matches
