"""The laws of low-rank adapters: zero = base, merged = unmerged, a fixed base, each row its own."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from headwater import tune
from headwater.core import functional
from headwater.core.functional import ChangedLinear
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.parts import from_dict, to_dict
from headwater.quantization.layers import QuantizedLinear, quantize
from headwater.tuning import DoRA, Full, LoRA, RsLoRA, adapter_tensors, merge, remove_adapter, tuning_of, use_adapter
from headwater.tuning.base import learned_parameters, selection_of, trained_parameters
from headwater.tuning.lowrank import LowRank

KINDS = [LoRA, RsLoRA, DoRA]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_a_new_adapter_changes_nothing(model, ids, kind):
    with torch.no_grad():
        want = model(ids)
        tune(model, kind(r=4, target="all-linear"))
        assert torch.allclose(model(ids), want, atol=0 if kind is not DoRA else 1e-6, rtol=0)


@every_kind
@torch.no_grad()
def test_merged_is_unmerged_and_back(model, ids, random_weights, kind):
    base = model(ids)
    tune(model, kind(r=3, alpha=5, target="all-linear"))
    random_weights(model)
    tuned = model(ids)
    merged = merge(model)
    assert (tuned - base).abs().max() > 0.1
    assert merged.largest_change < 1e-5
    assert torch.allclose(model(ids), tuned, atol=1e-5)
    assert not any(isinstance(module, ChangedLinear) for module in model.modules())

    merged.undo()
    assert torch.equal(model(ids), tuned)
    use_adapter(model, None)
    assert torch.equal(model(ids), base)


@torch.no_grad()
def test_a_wrong_merge_is_seen(model, random_weights, monkeypatch):
    tune(model, LoRA(r=3, target="all-linear"))
    random_weights(model)
    monkeypatch.setattr(LowRank, "delta", lambda change: change.lora_b @ change.lora_a)  # the scale is forgotten
    assert merge(model).largest_change > 0.1


@given(
    out=st.integers(2, 9),
    width=st.integers(2, 9),
    r=st.integers(1, 4),
    alpha=st.floats(0.1, 30),
    seed=st.integers(0, 99),
)
def test_it_computes_its_formula(out, width, r, alpha, seed):
    draw = torch.Generator().manual_seed(seed)
    w, a, b, x = (torch.randn(*shape, generator=draw) for shape in ((out, width), (r, width), (out, r), (3, width)))
    bias = torch.randn(out, generator=draw)
    for kind, scale in ((LoRA, alpha / r), (RsLoRA, alpha / r**0.5), (DoRA, alpha / r)):
        model = nn.Module()
        model.layer = nn.Linear(width, out)
        model.layer.weight.data, model.layer.bias.data = w, bias
        change = _changed(model, kind(r, alpha), a, b)
        direction = w + scale * b @ a
        if kind is DoRA:
            magnitude = torch.rand(out, generator=draw) + 0.5
            change.magnitude.data = magnitude
            direction = direction * (magnitude / direction.norm(dim=1))[:, None]
        assert torch.allclose(model.layer(x), F.linear(x, direction, bias), atol=1e-4, rtol=1e-4)


def _changed(model, spec, a, b):
    """The layer of a bare module, changed: tune() needs a whole Transformer."""
    from headwater.tuning.base import Selection
    from headwater.tuning.linear import TunedLinear

    selection = Selection()
    selection.active = "x"
    model.layer = TunedLinear(model.layer, selection)
    change = spec.build(model.layer, torch.Generator().manual_seed(0))
    change.lora_a.data, change.lora_b.data = a, b
    model.layer.add_change("x", change)
    return change


# ------------------------------------------------------------------------------------------------------- what learns


@every_kind
def test_only_the_adapter_learns(model, ids, kind):
    base = {path: p.detach().clone() for path, p in model.named_parameters()}
    tune(model, kind(r=4, target="*.self_attn.*"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for _step in range(2):
        F.cross_entropy(model.train()(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
    assert all(".changes." in path for path in trained_parameters(model))
    assert all(tensor.abs().sum() > 0 for name, tensor in adapter_tensors(model).items() if name.endswith("lora_b"))
    for path, parameter in model.named_parameters():
        if ".changes." not in path:
            assert torch.equal(parameter, base[path.replace(".base.", ".")])
            assert parameter.grad is None


def test_names_in_files_do_not_depend_on_other_changes(model):
    tune(model, LoRA(r=2, target="*.self_attn.q"), Full("*.ffn_post_norm.weight"))
    tune(model, LoRA(r=2, target="*.self_attn.q"), name="other")
    names = {f"decoder.layers.{i}.self_attn.q.lora_{side}" for i in range(2) for side in "ab"}
    assert set(learned_parameters(model)) == names | {f"decoder.layers.{i}.ffn_post_norm.weight" for i in range(2)}
    assert set(learned_parameters(model, "other")) == names


def test_gradients_with_fused_bases_are_those_of_the_formula():
    """q, k and v of one x are multiplied together in C; the low-rank part is added. As large as C needs it."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(256, 256) for name in "qkv"}).requires_grad_(False)
    draw = torch.Generator().manual_seed(1)
    for name in "qv":
        holder = nn.Module()
        holder.layer = model[name]
        _changed(holder, LoRA(4), torch.randn(4, 256, generator=draw), torch.randn(256, 4, generator=draw))
        model[name] = holder.layer
    x = torch.randn(600, 256, requires_grad=True)
    fused = functional.linears(x, model["q"], model["k"], model["v"])
    grads = torch.autograd.grad(sum(y.square().sum() for y in fused), [x, *_weights(model)])
    single = [model[name](x) for name in "qkv"]
    want = torch.autograd.grad(sum(y.square().sum() for y in single), [x, *_weights(model)])
    for got, expected in zip((*fused, *grads), (*single, *want), strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def _weights(model):
    return [p for p in model.parameters() if p.requires_grad or p.shape[0] == 4 or p.shape[-1] == 4]


# ------------------------------------------------------------------------------------------------- quantized bases


@pytest.mark.parametrize("bits", ["int8", "int4"])
@every_kind
def test_a_quantized_base_is_unchanged_and_its_gradients_are_those_of_its_float_weights(model, ids, kind, bits):
    quantize(model, bits, ["decoder.*"])
    blocks = {path: b.clone() for path, b in model.named_buffers() if path.endswith("blocks")}
    plain = copy.deepcopy(model)
    for path, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.columns, module.rows, module.bias is not None)
            linear.weight.data = module.weight
            if module.bias is not None:
                linear.bias.data = module.bias.data
            parent, _, name = path.rpartition(".")
            setattr(plain.get_submodule(parent), name, linear)
    grads = []
    for each in (model, plain):
        tune(each, kind(r=4, target="all-linear"))
        from tests.tuning.conftest import randomize

        randomize(each)
        F.cross_entropy(each(ids).flatten(0, 1), ids.flatten()).backward()
        grads.append({path: p.grad for path, p in each.named_parameters() if p.requires_grad})
    for path, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][path], atol=1e-5, rtol=1e-4), path
    for path, buffer in model.named_buffers():
        if path.endswith("blocks"):
            assert torch.equal(buffer, blocks[path.replace(".base.", ".")])


def test_the_backward_pass_of_a_quantized_layer_keeps_no_float_weight():
    layer = QuantizedLinear(*_blocks(64, 96)).requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(torch.randn(5, 96, requires_grad=True)).sum().backward()
    assert sum(kept) < 64 * 96 // 2


def _blocks(rows, columns):
    model = nn.Sequential(nn.Linear(columns, rows, bias=False))
    quantize(model)
    return model[0].blocks, model[0].block_format


# --------------------------------------------------------------------------------------------------- several adapters


@torch.no_grad()
def test_each_row_has_its_own_adapter(model, ids, random_weights):
    want = {None: model(ids)}
    for name in ("a", "b"):
        tune(model, (LoRA if name == "a" else DoRA)(r=3, target="all-linear"), name=name)
        random_weights(model)
        want[name] = model(ids)
    names = ["a", None, "b", "a"]
    with selection_of(model).per_row(names):
        got = model(ids)
    for row, name in enumerate(names):
        assert torch.allclose(got[row], want[name][row], atol=1e-6), row
    assert (want["a"] - want["b"]).abs().max() > 0.1


@torch.no_grad()
def test_an_adapter_on_the_wrong_row_is_seen(model, ids, random_weights):
    base = model(ids)
    tune(model, LoRA(r=3), name="a")
    random_weights(model)
    with selection_of(model).per_row([None, "a", None, None]):
        changed = (model(ids) - base).abs().amax((1, 2)) > 1e-4
    assert changed.tolist() == [False, True, False, False]


def test_an_adapter_can_be_removed(model, ids, random_weights):
    with torch.no_grad():
        base = model(ids)
        for name in ("a", "b"):
            tune(model, LoRA(r=3), name=name)
            random_weights(model)
        remove_adapter(model, "a")
        assert list(tuning_of(model).adapters) == ["b"]
        remove_adapter(model, "b")
        assert torch.equal(model(ids), base)
        assert not any(isinstance(module, ChangedLinear) for module in model.modules())


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (
            (LoRA(target="*.self_atn.q"),),
            "target '*.self_atn.q' matches no linear layer of this model; did you mean '*.self_attn.q'?",
        ),
        ((LoRA(r=33),), "r must be at most the width of the layer (32, decoder.layers.0.self_attn.q), got 33"),
        ((LoRA(), LoRA()), "two methods change the same module"),
        ((), "it needs a method"),
        ((Full("decoder.layer.*"),), "target 'decoder.layer.*' matches no parameter"),
    ],
)
def test_what_cannot_be_tuned_is_left_as_it_was(model, methods, words):
    before = {path: p.requires_grad for path, p in model.named_parameters()}
    with pytest.raises(BadSetting) as refused:
        tune(model, *methods)
    assert words in str(refused.value)
    assert {path: p.requires_grad for path, p in model.named_parameters()} == before
    assert tuning_of(model) is None


def test_sizes_that_make_no_sense():
    for make, words in (
        (lambda: LoRA(r=0), "r must be at least 1"),
        (lambda: LoRA(alpha=-1.0), "alpha must be above 0"),
        (lambda: DoRA(dropout=1.0), "dropout must be from 0 up to 1"),
    ):
        with pytest.raises(BadSetting, match=words):
            make()


def test_names_and_models_are_checked(model):
    with pytest.raises(BadInput, match="tune needs a model, got str"):
        tune("smollm2", LoRA())  # type: ignore[type-var]
    tune(model, LoRA(), name="polite")
    with pytest.raises(BadSetting, match="has an adapter 'polite' already"):
        tune(model, LoRA(), name="polite")
    with pytest.raises(BadSetting, match="must be an identifier"):
        tune(model, LoRA(), name="a.b")
    with pytest.raises(NotFound, match="no adapter of this model is called 'polit'; did you mean 'polite'"):
        use_adapter(model, "polit")
    quantize(model, "int8", ["*.ffn.*"])
    with pytest.raises(BadSetting, match=r"decoder.layers.0.ffn.up is quantized and cannot be trained itself"):
        tune(model, Full("*.ffn.*"), name="whole")


def test_specs_are_values():
    spec = DoRA(4, 3, target=("*.q", "*.v"))
    assert from_dict(to_dict(spec)) == spec
    assert repr(spec) == "DoRA(r=4, alpha=3.0, target=('*.q', '*.v'))"
    assert tuning_of(nn.Linear(2, 2)) is None
