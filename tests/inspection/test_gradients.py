"""Gradients and what follows from them: norms, flow, where numbers break, and what made the model say that."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.core import ClassificationHead
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, BadSetting
from headwater.inspection import attribute, attribution, first_nonfinite, gradient_flow
from headwater.inspection.inputs import tokenize_input
from headwater.inspection.logit_lens import text_loss

TEXT = "你好 world"


def target_of(model):
    return "hi" if model.model.encoder is not None and model.model.decoder is not None else None


def test_norms_are_those_of_a_backward_pass(any_shape):
    reading = tokenize_input(any_shape, TEXT, target_of(any_shape))
    result = gradient_flow(any_shape, reading)
    model = any_shape.model
    assert all(p.grad is None for p in model.parameters()), "the model's own gradients are left alone"
    with eval_mode(model, enable_grad=True):
        text_loss(reading)[0].backward()
    try:
        assert len(result.norms) == len(list(model.parameters()))
        for norm, (path, p) in zip(result.norms, model.named_parameters(), strict=True):
            assert norm.path == path
            assert norm.grad_norm == pytest.approx(float(p.grad.norm()), rel=1e-4, abs=1e-9)
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert result.total_norm == pytest.approx(total, rel=1e-4)
    finally:
        model.zero_grad()


def test_the_flow_is_the_gradient_of_the_stream(writer):
    result = gradient_flow(writer, TEXT)
    assert [name for name, _ in result.flow] == ["decoder.embed", *(f"decoder.layers.{n}" for n in range(3))]
    held = []
    handle = writer.model.decoder.layers[1].register_forward_hook(lambda m, i, output: held.append(output))
    with eval_mode(writer.model, enable_grad=True):
        value, of = text_loss(tokenize_input(writer, TEXT))
        (grad,) = torch.autograd.grad(value, held)
    handle.remove()
    size = float(grad.norm(dim=-1).square().mean().sqrt())
    assert dict(result.flow)["decoder.layers.1"] == pytest.approx(size, rel=1e-4)
    assert result.loss == pytest.approx(value.item(), rel=1e-5) and of == "mean surprise of the tokens"
    assert len(result.token_norms) == len(result.tokens) and result.token_norms[-1] == 0, (
        "after the last nothing is asked"
    )


def test_frozen_weights_are_measured_and_stay_frozen(make):
    model = make("decoder")
    model.model.requires_grad_(False)
    assert gradient_flow(model, TEXT).total_norm > 0
    assert not any(p.requires_grad for p in model.model.parameters())


def test_a_vanishing_gradient_is_reported(make):
    model = make("decoder", "pre")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.self_attn.out.weight.zero_()
            layer.ffn.down.weight.zero_()
        model.model.decoder.layers[2].ffn_norm.weight.zero_()
    assert "get no gradient" in gradient_flow(model, TEXT).warning
    result = gradient_flow(make("decoder"), TEXT)
    assert result.warning == ""
    flow = (("decoder.embed", 1.0), ("decoder.layers.0", 1e-6), ("decoder.layers.1", 1.0))
    assert "vanishes on its way down" in replace(result, flow=flow).warning
    assert "explodes on its way down" in replace(result, flow=(flow[0], ("a", 1e6), ("b", 1.0))).warning


# ---------------------------------------------------------------------------------------------------------- NaN and inf


def test_nothing_is_found_in_a_sound_model(any_shape):
    assert first_nonfinite(any_shape, TEXT, target_of(any_shape)) is None


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("decoder.layers.1.ffn.up", math.nan, "NaN"),
        ("decoder.layers.0.self_attn.k", math.inf, "infinity"),
        ("head.out", math.nan, "NaN"),
    ],
)
def test_the_module_where_numbers_break_is_named(make, path, value, what):
    model = make("decoder")
    module = model.model.get_submodule(path)
    if path == "head.out":
        module.weight = torch.nn.Parameter(module.weight.detach().clone())  # no longer the table's
    with torch.no_grad():
        module.weight[3, 0] = value
    result = first_nonfinite(model, TEXT)
    assert result.path == path and what in result.what
    assert "gradient of" in gradient_flow(model, TEXT).warning


# ---------------------------------------------------------------------------------------------------------- attribution


@pytest.mark.parametrize(("shape", "style"), [("decoder", "post"), ("decoder", "sandwich"), ("both", "post")])
def test_integrated_gradients_add_up(make, shape, style):
    """The parts are the whole: Σ scores = log p(x) - log p(nothing)."""
    model = make(shape, style)
    result = attribute(model, "hello", "hi" if shape == "both" else None)
    total = result.attributions.sum() + result.source_attributions.sum()
    assert result.completeness_gap <= attribution.MAX_COMPLETENESS_GAP
    assert total == pytest.approx(result.logprob - result.baseline_logprob, rel=2 * attribution.MAX_COMPLETENESS_GAP)
    assert len(result.source_attributions) == (5 if shape == "both" else 0) and result.source_attributions.all()
    with torch.no_grad():
        log_p = tokenize_input(model, "hello", "hi" if shape == "both" else None).forward()[0, -1].log_softmax(-1)
    assert result.logprob == pytest.approx(float(log_p.max()), rel=1e-4)
    assert (
        result.output
        == tokenize_input(model, "a", "b" if shape == "both" else None).decode_token(int(log_p.argmax())).text
    )


def test_half_of_the_way_would_not_add_up(make, monkeypatch):
    right = np.polynomial.legendre.leggauss
    monkeypatch.setattr(np.polynomial.legendre, "leggauss", lambda n: (right(n)[0], right(n)[1] / 2))
    assert attribute(make("decoder", "post"), "hello").completeness_gap > 0.3


def test_gradient_times_input_by_hand(make):
    model = make("decoder", "post")
    result = attribute(model, "abc", position=1, token_id=7, method="input_x_gradient")
    table, ids = model.model.decoder.embed.tokens, tokenize_input(model, "abc").ids
    x = table(ids).detach().requires_grad_()
    handle = table.register_forward_hook(lambda m, i, o: x)
    value = model.model(ids)[0, 1].log_softmax(-1)[7]
    handle.remove()
    (grad,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose(result.attributions, (x * grad).sum(-1)[0].detach().numpy(), rtol=1e-4, atol=1e-6)
    assert result.attributions[2] == 0, "a later token adds nothing"
    assert math.isnan(result.completeness_gap) and result.position == 1


def test_blanked_by_hand(translator):
    result = attribute(translator, "abc", "xy", method="occlusion", token_id=11)
    table = translator.model.encoder.embed.tokens
    reading = tokenize_input(translator, "abc", "xy")

    def without(place):
        def hook(module, inputs, output):
            output = output.clone()
            output[:, place] = 0
            return output

        handle = table.register_forward_hook(hook)
        with torch.no_grad():
            value = reading.forward()[0, -1].log_softmax(-1)[11]
        handle.remove()
        return float(value)

    np.testing.assert_allclose(
        result.source_attributions, [result.logprob - without(n) for n in range(3)], rtol=1e-3, atol=1e-5
    )
    assert len(result.attributions) == 3 and result.steps == 6


def test_a_class_is_explained_by_its_label(make):
    model = make("encoder", "post", head=ClassificationHead(3))
    model.labels = ["bad", "fair", "good"]
    result = attribute(model, "hello")
    assert result.output in model.labels and result.completeness_gap <= attribution.MAX_COMPLETENESS_GAP
    assert attribute(model, "hello", token_id=2).output == "good"


def test_what_cannot_be_explained_is_refused(writer, filler):
    with pytest.raises(BadSetting, match="did you mean 'integrated_gradients'"):
        attribute(writer, "abc", method="integrated_gradient")
    with pytest.raises(BadSetting, match="position must be below 3, got 3"):
        attribute(writer, "abc", position=3)
    with pytest.raises(BadSetting, match="token_id must be from 0 to 259, got 'x'"):
        attribute(writer, "abc", token_id="x")
    with pytest.raises(BadInput, match="put <mask> into the text"):
        attribute(filler, "abc")
