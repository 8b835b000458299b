"""Gradients and what follows from them: norms, flow, where numbers break, and what made the model say that."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from headwater.core import ClassHead
from headwater.errors import BadInput, BadSetting
from headwater.inspection import attribution, credit, first_bad, gradients
from headwater.inspection.scores import loss
from headwater.inspection.subjects import read, still

TEXT = "你好 world"


def target_of(model):
    return "hi" if model.model.encoder is not None and model.model.decoder is not None else None


def test_norms_are_those_of_a_backward_pass(any_shape):
    reading = read(any_shape, TEXT, target_of(any_shape))
    found = gradients(any_shape, reading)
    model = any_shape.model
    assert all(p.grad is None for p in model.parameters()), "the model's own gradients are left alone"
    with still(model, learning=True):
        loss(reading)[0].backward()
    try:
        assert len(found.norms) == len(list(model.parameters()))
        for norm, (path, p) in zip(found.norms, model.named_parameters(), strict=True):
            assert norm.path == path
            assert norm.gradient == pytest.approx(float(p.grad.norm()), rel=1e-4, abs=1e-9)
        total = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        assert found.total == pytest.approx(total, rel=1e-4)
    finally:
        model.zero_grad()


def test_the_flow_is_the_gradient_of_the_stream(writer):
    found = gradients(writer, TEXT)
    assert [name for name, _ in found.flow] == ["decoder.embed", *(f"decoder.layers.{n}" for n in range(3))]
    held = []
    handle = writer.model.decoder.layers[1].register_forward_hook(lambda m, i, output: held.append(output))
    with still(writer.model, learning=True):
        value, of = loss(read(writer, TEXT))
        (grad,) = torch.autograd.grad(value, held)
    handle.remove()
    size = float(grad.norm(dim=-1).square().mean().sqrt())
    assert dict(found.flow)["decoder.layers.1"] == pytest.approx(size, rel=1e-4)
    assert found.loss == pytest.approx(value.item(), rel=1e-5) and of == "mean surprise of the tokens"
    assert len(found.token_norms) == len(found.tokens) and found.token_norms[-1] == 0, "after the last nothing is asked"


def test_frozen_weights_are_measured_and_stay_frozen(make):
    model = make("decoder")
    model.model.requires_grad_(False)
    assert gradients(model, TEXT).total > 0
    assert not any(p.requires_grad for p in model.model.parameters())


def test_a_gradient_that_vanishes_is_told(make):
    model = make("decoder", "pre")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.self_attn.out.weight.zero_()
            layer.ffn.down.weight.zero_()
        model.model.decoder.layers[2].ffn_norm.weight.zero_()
    assert "get no gradient" in gradients(model, TEXT).hint
    found = gradients(make("decoder"), TEXT)
    assert found.hint == ""
    flow = (("decoder.embed", 1.0), ("decoder.layers.0", 1e-6), ("decoder.layers.1", 1.0))
    assert "vanishes on its way down" in replace(found, flow=flow).hint
    assert "explodes on its way down" in replace(found, flow=(flow[0], ("a", 1e6), ("b", 1.0))).hint


# ---------------------------------------------------------------------------------------------------------- NaN and inf


def test_nothing_is_found_in_a_sound_model(any_shape):
    assert first_bad(any_shape, TEXT, target_of(any_shape)) is None


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
    found = first_bad(model, TEXT)
    assert found.path == path and what in found.what
    assert "gradient of" in gradients(model, TEXT).hint


# ---------------------------------------------------------------------------------------------------------- attribution


@pytest.mark.parametrize(("shape", "style"), [("decoder", "post"), ("decoder", "sandwich"), ("both", "post")])
def test_integrated_gradients_add_up(make, shape, style):
    """The parts are the whole: Σ scores = log p(x) - log p(nothing)."""
    model = make(shape, style)
    found = attribution(model, "hello", "hi" if shape == "both" else None)
    total = found.scores.sum() + found.source_scores.sum()
    assert found.gap <= credit.ENOUGH
    assert total == pytest.approx(found.value - found.baseline, rel=2 * credit.ENOUGH)
    assert len(found.source_scores) == (5 if shape == "both" else 0) and found.source_scores.all()
    with torch.no_grad():
        log_p = read(model, "hello", "hi" if shape == "both" else None).answer()[0, -1].log_softmax(-1)
    assert found.value == pytest.approx(float(log_p.max()), rel=1e-4)
    assert found.output == read(model, "a", "b" if shape == "both" else None).name(int(log_p.argmax())).text


def test_half_of_the_way_would_not_add_up(make, monkeypatch):
    right = np.polynomial.legendre.leggauss
    monkeypatch.setattr(np.polynomial.legendre, "leggauss", lambda n: (right(n)[0], right(n)[1] / 2))
    assert attribution(make("decoder", "post"), "hello").gap > 0.3


def test_gradient_times_input_by_hand(make):
    model = make("decoder", "post")
    found = attribution(model, "abc", place=1, token=7, by="gradient")
    table, ids = model.model.decoder.embed.tokens, read(model, "abc").ids
    x = table(ids).detach().requires_grad_()
    handle = table.register_forward_hook(lambda m, i, o: x)
    value = model.model(ids)[0, 1].log_softmax(-1)[7]
    handle.remove()
    (grad,) = torch.autograd.grad(value, x)
    np.testing.assert_allclose(found.scores, (x * grad).sum(-1)[0].detach().numpy(), rtol=1e-4, atol=1e-6)
    assert found.scores[2] == 0, "a later token adds nothing"
    assert math.isnan(found.gap) and found.place == 1


def test_blanked_by_hand(translator):
    found = attribution(translator, "abc", "xy", by="blanked", token=11)
    table = translator.model.encoder.embed.tokens
    reading = read(translator, "abc", "xy")

    def without(place):
        def hook(module, inputs, output):
            output = output.clone()
            output[:, place] = 0
            return output

        handle = table.register_forward_hook(hook)
        with torch.no_grad():
            value = reading.answer()[0, -1].log_softmax(-1)[11]
        handle.remove()
        return float(value)

    np.testing.assert_allclose(found.source_scores, [found.value - without(n) for n in range(3)], rtol=1e-3, atol=1e-5)
    assert len(found.scores) == 3 and found.steps == 6


def test_a_class_is_explained_by_its_label(make):
    model = make("encoder", "post", head=ClassHead(3))
    model.labels = ["bad", "fair", "good"]
    found = attribution(model, "hello")
    assert found.output in model.labels and found.gap <= credit.ENOUGH
    assert attribution(model, "hello", token=2).output == "good"


def test_what_cannot_be_explained_is_refused(writer, filler):
    with pytest.raises(BadSetting, match="did you mean 'integrated'"):
        attribution(writer, "abc", by="integrate")
    with pytest.raises(BadSetting, match="place must be below 3, got 3"):
        attribution(writer, "abc", place=3)
    with pytest.raises(BadSetting, match="token must be an id from 0 to 259, got 'x'"):
        attribution(writer, "abc", token="x")
    with pytest.raises(BadInput, match="put <mask> into the text"):
        attribution(filler, "abc")
