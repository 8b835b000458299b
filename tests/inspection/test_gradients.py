"""Gradient norms and flow, the first non-finite module, and attribution of an output to the input tokens."""

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


def test_norms_are_those_of_a_backward_pass(any_model):
    inputs = tokenize_input(any_model, TEXT, target_of(any_model))
    result = gradient_flow(any_model, inputs)
    model = any_model.model
    assert all(p.grad is None for p in model.parameters()), "p.grad is not touched"
    with eval_mode(model, enable_grad=True):
        text_loss(inputs)[0].backward()
    try:
        assert len(result.norms) == len(list(model.parameters()))
        for norm, (path, p) in zip(result.norms, model.named_parameters(), strict=True):
            assert norm.path == path
            assert norm.grad_norm == pytest.approx(float(p.grad.norm()), rel=1e-4, abs=1e-9)
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert result.total_norm == pytest.approx(total, rel=1e-4)
    finally:
        model.zero_grad()


def test_the_flow_is_the_gradient_of_the_residual_stream(causal_lm):
    result = gradient_flow(causal_lm, TEXT)
    assert [name for name, _ in result.flow] == ["decoder.embed", *(f"decoder.layers.{n}" for n in range(3))]
    captured = []
    handle = causal_lm.model.decoder.layers[1].register_forward_hook(lambda m, i, output: captured.append(output))
    with eval_mode(causal_lm.model, enable_grad=True):
        value, loss_name = text_loss(tokenize_input(causal_lm, TEXT))
        (grad,) = torch.autograd.grad(value, captured)
    handle.remove()
    size = float(grad.norm(dim=-1).square().mean().sqrt())
    assert dict(result.flow)["decoder.layers.1"] == pytest.approx(size, rel=1e-4)
    assert result.loss == pytest.approx(value.item(), rel=1e-5) and loss_name == "mean cross-entropy of the tokens"
    assert len(result.token_norms) == len(result.tokens) and result.token_norms[-1] == 0, (
        "nothing is predicted after the last token"
    )


def test_frozen_weights_are_measured_and_stay_frozen(make_model):
    model = make_model("decoder")
    model.model.requires_grad_(False)
    assert gradient_flow(model, TEXT).total_norm > 0
    assert not any(p.requires_grad for p in model.model.parameters())


def test_a_vanishing_gradient_is_reported(make_model):
    model = make_model("decoder", "pre")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.self_attn.out.weight.zero_()
            layer.ffn.down.weight.zero_()
        model.model.decoder.layers[2].ffn_norm.weight.zero_()
    assert "get no gradient" in gradient_flow(model, TEXT).warning
    result = gradient_flow(make_model("decoder"), TEXT)
    assert result.warning == ""
    flow = (("decoder.embed", 1.0), ("decoder.layers.0", 1e-6), ("decoder.layers.1", 1.0))
    assert "vanishes in the backward pass" in replace(result, flow=flow).warning
    assert "explodes in the backward pass" in replace(result, flow=(flow[0], ("a", 1e6), ("b", 1.0))).warning


# ---------------------------------------------------------------------------------------------------------- NaN and inf


def test_a_correct_model_has_no_nonfinite_module(any_model):
    assert first_nonfinite(any_model, TEXT, target_of(any_model)) is None


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("decoder.layers.1.ffn.up", math.nan, "NaN"),
        ("decoder.layers.0.self_attn.k", math.inf, "infinity"),
        ("head.out", math.nan, "NaN"),
    ],
)
def test_the_first_nonfinite_module_is_named(make_model, path, value, what):
    model = make_model("decoder")
    module = model.model.get_submodule(path)
    if path == "head.out":
        module.weight = torch.nn.Parameter(module.weight.detach().clone())  # no longer tied to the embedding
    with torch.no_grad():
        module.weight[3, 0] = value
    result = first_nonfinite(model, TEXT)
    assert result.path == path and what in result.what
    assert "gradient of" in gradient_flow(model, TEXT).warning


# ---------------------------------------------------------------------------------------------------------- attribution


@pytest.mark.parametrize(("shape", "style"), [("decoder", "post"), ("decoder", "sandwich"), ("both", "post")])
def test_integrated_gradients_are_complete(make_model, shape, style):
    """Completeness: Σ scores = log p(x) - log p(baseline)."""
    model = make_model(shape, style)
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


def test_a_wrong_quadrature_is_not_complete(make_model, monkeypatch):
    right = np.polynomial.legendre.leggauss
    monkeypatch.setattr(np.polynomial.legendre, "leggauss", lambda n: (right(n)[0], right(n)[1] / 2))
    assert attribute(make_model("decoder", "post"), "hello").completeness_gap > 0.3


def test_input_x_gradient_equals_autograd(make_model):
    model = make_model("decoder", "post")
    result = attribute(model, "abc", position=1, token_id=7, method="input_x_gradient")
    table, ids = model.model.decoder.embed.tokens, tokenize_input(model, "abc").ids
    x = table(ids).detach().requires_grad_()
    handle = table.register_forward_hook(lambda m, i, o: x)
    value = model.model(ids)[0, 1].log_softmax(-1)[7]
    handle.remove()
    (grad,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose(result.attributions, (x * grad).sum(-1)[0].detach().numpy(), rtol=1e-4, atol=1e-6)
    assert result.attributions[2] == 0, "a later token contributes nothing"
    assert math.isnan(result.completeness_gap) and result.position == 1


def test_occlusion_equals_zeroed_embeddings(encoder_decoder):
    result = attribute(encoder_decoder, "abc", "xy", method="occlusion", token_id=11)
    table = encoder_decoder.model.encoder.embed.tokens
    inputs = tokenize_input(encoder_decoder, "abc", "xy")

    def logprob_without(position):
        def hook(module, inputs, output):
            output = output.clone()
            output[:, position] = 0
            return output

        handle = table.register_forward_hook(hook)
        with torch.no_grad():
            value = inputs.forward()[0, -1].log_softmax(-1)[11]
        handle.remove()
        return float(value)

    np.testing.assert_allclose(
        result.source_attributions, [result.logprob - logprob_without(n) for n in range(3)], rtol=1e-3, atol=1e-5
    )
    assert len(result.attributions) == 3 and result.steps == 6


def test_a_classifier_output_is_named_by_its_label(make_model):
    model = make_model("encoder", "post", head=ClassificationHead(3))
    model.labels = ["bad", "fair", "good"]
    result = attribute(model, "hello")
    assert result.output in model.labels and result.completeness_gap <= attribution.MAX_COMPLETENESS_GAP
    assert attribute(model, "hello", token_id=2).output == "good"


def test_invalid_attribution_arguments_are_rejected(causal_lm, masked_lm):
    with pytest.raises(BadSetting, match="did you mean 'integrated_gradients'"):
        attribute(causal_lm, "abc", method="integrated_gradient")
    with pytest.raises(BadSetting, match="position must be below 3, got 3"):
        attribute(causal_lm, "abc", position=3)
    with pytest.raises(BadSetting, match="token_id must be from 0 to 259, got 'x'"):
        attribute(causal_lm, "abc", token_id="x")
    with pytest.raises(BadInput, match="put <mask> into the text"):
        attribute(masked_lm, "abc")
