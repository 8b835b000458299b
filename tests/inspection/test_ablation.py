"""Head ablation equals zeroed columns of `out`; position effects equal the outputs of the position encodings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater.core import Attention, Block, Causal, Embeddings, FeedForward, LMHead, Model, RMSNorm, Stack, pre
from headwater.errors import BadSetting
from headwater.inspection import ablate, ablation, head_importance, position_effects
from headwater.inspection.inputs import tokenize_input
from headwater.inspection.predictions import token_losses

TEXT = "你好 world"


@pytest.mark.parametrize("kind", ["encoder.self_attn", "decoder.self_attn", "decoder.cross_attn"])
def test_ablation_zeroes_the_slice_of_the_output_projection(make_model, kind):
    model, zeroed = make_model("both", "pre"), make_model("both", "pre")
    side, role = kind.split(".")
    with torch.no_grad():
        getattr(getattr(zeroed.model, side).layers[1], role).out.weight[:, 2 * 8 : 3 * 8] = 0
        probs = tokenize_input(zeroed, TEXT, "hi").forward()[0, -1].softmax(-1)
    result = ablate(model, TEXT, 1, 2, "hi", kind=kind)
    for candidate in result.candidates:
        assert candidate.ablated_prob == pytest.approx(float(probs[candidate.token.id]), rel=1e-4, abs=1e-7)
    assert result.ablated_loss == pytest.approx(token_losses(zeroed, TEXT, "hi").mean, rel=1e-4)
    assert result.loss == pytest.approx(token_losses(model, TEXT, "hi").mean, rel=1e-4)
    assert (result.kl_divergence >= -1e-6).all() and result.kl_divergence.max() > 0
    other = ablate(model, TEXT, 1, 1, "hi", kind=kind)
    assert other.ablated_loss != result.ablated_loss, "another head gives another loss"


def test_a_batch_of_heads_equals_each_head_alone(causal_lm, monkeypatch):
    result = head_importance(causal_lm, TEXT)
    monkeypatch.setattr(ablation, "LOGITS_PER_BATCH", 5 * 12 * 260)  # five heads per pass, across layers
    np.testing.assert_allclose(head_importance(causal_lm, TEXT).loss_change, result.loss_change, atol=1e-5)
    assert result.loss_change.shape == (3, 4)
    for layer, head in ((0, 0), (1, 3), (2, 2)):
        one = ablate(causal_lm, TEXT, layer, head)
        assert result.loss_change[layer, head] == pytest.approx(one.ablated_loss - one.loss, abs=1e-4)
    assert not any(m._forward_pre_hooks for m in causal_lm.model.modules())


def test_one_call_of_a_shared_layer_is_ablated():
    block = Block((pre(RMSNorm(), self_attn=Attention(2, mask=Causal())), pre(RMSNorm(), ffn=FeedForward(16))))
    model = Model(decoder=Stack(8, Embeddings(30), (block,), order=(0, 0)), head=LMHead(30)).build(seed=0)
    ids = list(range(9))
    first, second = (ablate(model, ids, layer, 0).ablated_loss for layer in (0, 1))
    assert first != second
    with torch.no_grad():
        model.decoder.layers[0].self_attn.out.weight[:, :4] = 0
    assert ablate(model, ids, 0, 0).loss not in (first, second), "zeroing it in both calls differs again"


def test_a_bidirectional_model(masked_lm):
    result = ablate(masked_lm, "ab<mask>d", 0, 0)
    assert result.kind == "encoder.self_attn" and len(result.kl_divergence) == 4


@pytest.mark.parametrize(("layer", "head", "message"), [(3, 0, "layer must be from 0"), (0, 4, "head must be from 0")])
def test_an_unknown_head_is_rejected(causal_lm, layer, head, message):
    with pytest.raises(BadSetting, match=message):
        ablate(causal_lm, TEXT, layer, head)


# ------------------------------------------------------------------------------------------------------------ positions


def single_effect(model, **options):
    result = position_effects(model, **options)
    assert len(result.effects) == 1
    return result.effects[0]


def test_sinusoids_are_the_formula(make_model):
    effect = single_effect(make_model("decoder", "post"), length=9)
    p, i = np.arange(9)[:, None], np.arange(16)[None]
    angle = p / 10000 ** (2 * i / 32)
    np.testing.assert_allclose(effect.table[:, ::2], np.sin(angle), atol=1e-5)
    np.testing.assert_allclose(effect.table[:, 1::2], np.cos(angle), atol=1e-5)
    np.testing.assert_allclose(np.diag(effect.similarity), 1, atol=1e-5)
    assert (effect.kind, effect.part, effect.path) == ("add", "Sinusoidal", "decoder.embed.position")


def test_a_learned_table_is_plotted_up_to_its_size(make_model):
    model = make_model("decoder", "sandwich", max_positions=20)
    effect = single_effect(model)
    np.testing.assert_allclose(
        effect.table, model.model.decoder.embed.position.table.weight.detach().numpy(), atol=1e-6
    )


def test_rotary_rotates_and_its_score_falls_with_distance(make_model):
    effect = single_effect(make_model("decoder", "pre"), length=12)
    frequencies = 10000.0 ** -(np.arange(4) / 4)
    np.testing.assert_allclose(effect.table, np.cos(np.arange(12)[:, None] * frequencies), atol=1e-5)
    np.testing.assert_allclose(effect.curves[0], effect.table.mean(1), atol=1e-5)
    assert effect.kind == "rotate" and effect.curves[0, 0] == pytest.approx(1)


def test_alibi_falls_with_its_slope(make_model):
    effect = single_effect(make_model("decoder", "alibi"), length=8)
    slopes = 2.0 ** (-8 * np.arange(1, 5) / 4)
    np.testing.assert_allclose(effect.curves, -slopes[:, None] * np.abs(effect.offsets), rtol=1e-6)
    assert effect.offsets.tolist() == list(range(-7, 8))


def test_relative_bias_and_xl_equal_the_module_output(make_model):
    model = make_model("decoder", "relative")
    effect = single_effect(model, length=8)
    table = model.model.decoder.position_encodings[0].table.weight.detach().numpy()
    np.testing.assert_allclose(effect.curves[:, 7], table[0], atol=1e-6)
    np.testing.assert_allclose(effect.curves[:, 6], table[1], atol=1e-6)
    model = make_model("decoder", "xl")
    first, *rest = position_effects(model, length=6).effects
    assert len(rest) == 2 and first.kind == "query_bias", "each layer has its own"
    module = model.model.decoder.position_encodings[0]
    r = module.position_projection(module.sinusoids.add(torch.zeros(1), torch.tensor([3]))).unflatten(-1, (4, 8))[0]
    expected = (module.v.weight * r).sum(-1).detach().numpy() / math.sqrt(8)
    np.testing.assert_allclose(first.curves[:, 5 - 3], expected, rtol=1e-4)


def test_no_position_has_no_effect(make_model):
    result = position_effects(make_model("decoder", "pre", position="none"))
    assert not result.effects and str(result) == "this model has no position encoding"
    with pytest.raises(BadSetting, match="length must be at least 2"):
        position_effects(make_model("decoder"), length=1)
