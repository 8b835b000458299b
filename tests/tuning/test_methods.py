"""The laws of every method: only what it adds learns; cache and padding change nothing; it can be taken out again."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import VOCAB, tiny
from torch.nn import functional as F

import headwater
from headwater import tune
from headwater.core import ModelInputs, dynamic_cache
from headwater.errors import BadInput, BadSetting
from headwater.families.tuned_folder import load_tuned_folder, save_tuned_folder
from headwater.parts import from_dict, to_dict
from headwater.quantization.layers import quantize
from headwater.tuning import (
    IA3,
    DoRA,
    Houlsby,
    LoRA,
    Parallel,
    Pfeiffer,
    PrefixTuning,
    PromptTuning,
    PTuning,
    adapter_tensors,
    can_merge,
    merge,
    remove_adapter,
)
from headwater.tuning.base import selection_of, trained_parameters

SILENT = [LoRA(2), DoRA(2), IA3(), Houlsby(4), Pfeiffer(4), Parallel(4)]  # which change nothing at the start
LONGER = [PrefixTuning(3), PrefixTuning(3, width=5), PromptTuning(3), PTuning(3, width=8)]
FAMILIES = ["llama", "gpt2", "bert", "t5", "bart"]
every_method = pytest.mark.parametrize("method", [*SILENT, *LONGER], ids=repr)
IDS = torch.randint(3, VOCAB, (2, 6), generator=torch.Generator().manual_seed(2))


def outputs(model):
    both = model.encoder is not None and model.decoder is not None
    return model(IDS, **({"source": IDS.flip(1)} if both else {}))


@every_method
@pytest.mark.parametrize("family", FAMILIES)
def test_it_changes_what_it_should_and_can_be_removed(family, method, random_weights):
    model = tiny(family).model
    with torch.no_grad():
        base = outputs(model)
        tune(model, method)
        if method in SILENT:
            assert (outputs(model) - base).abs().max() < 1e-6
        random_weights(model)
        assert (outputs(model) - base).abs().max() > 0.02
        copied = outputs(copy.deepcopy(model))
        assert torch.equal(outputs(model), copied)
        remove_adapter(model)
        assert torch.equal(outputs(model), base)


@every_method
def test_only_what_it_adds_learns(method):
    model = tune(tiny("llama").model.train(), method)
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    learned = trained_parameters(model)
    assert learned and all(".changes." in path for path in learned)
    optimizer = torch.optim.SGD(list(learned.values()), 0.5)
    for _step in range(2):  # after one, LoRA's A and the bottleneck's down have a gradient too
        F.cross_entropy(outputs(model).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        gradients = {path: p.grad is not None and bool(p.grad.any()) for path, p in learned.items()}
        optimizer.zero_grad()
    assert all(gradients.values()), gradients
    for path, parameter in model.named_parameters():
        assert torch.equal(parameter, before[path]) != (path in learned), path


@every_method
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_cached_is_uncached_and_padded_is_unpadded(family, method, random_weights):
    model = tune(tiny(family).model, method)
    random_weights(model)
    whole = model(IDS)
    cache = dynamic_cache(model)
    steps = [model.decode(IDS[:, :4], cache=cache), *(model.decode(IDS[:, i : i + 1], cache=cache) for i in (4, 5))]
    assert torch.allclose(torch.cat(steps, 1), whole, atol=1e-5)

    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, :2] = False
    padded = model(IDS, attention_mask=mask)[1, 2:]
    assert torch.allclose(padded, model(IDS[1:, 2:])[0], atol=1e-5)

    greedy = IDS[:1]
    for _token in range(4):
        greedy = torch.cat((greedy, model(greedy)[:, -1].argmax(-1)[:, None]), 1)
    assert list(headwater.generate(model, IDS[0].tolist(), max_tokens=4).ids) == greedy[0, 6:].tolist()


def test_a_shifted_prefix_would_be_seen(random_weights, monkeypatch):
    """Tokens that stand at the places of the prefix, instead of after it: cached and uncached still agree, peft not."""
    from headwater.tuning.hooks import PrefixedCache

    model = tune(tiny("llama").model, PrefixTuning(3))
    random_weights(model)
    with torch.no_grad():
        right = model(IDS)
        monkeypatch.setattr(PrefixedCache, "seen_tokens", 0)
        assert (model(IDS) - right).abs().max() > 0.01


@every_method
def test_gradient_checkpointing_gives_the_same_gradients(method, random_weights):
    gradients = []
    for enabled in (False, True):
        model = tune(tiny("llama").model.train(), method)
        random_weights(model)
        model.gradient_checkpointing(enabled)
        F.cross_entropy(outputs(model).flatten(0, 1), IDS.flatten()).backward()
        gradients.append([p.grad for p in trained_parameters(model).values()])
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@every_method
def test_a_folder_brings_it_back(method, tmp_path, random_weights):
    base = tiny("llama")
    model = tune(tiny("llama").model, method)
    random_weights(model)
    save_tuned_folder(tmp_path / "run", model, {})
    loaded = load_tuned_folder(tmp_path / "run", lambda name: tiny("llama"))
    with torch.no_grad():
        assert torch.allclose(outputs(loaded.model), outputs(model), atol=1e-5)
        assert not torch.allclose(outputs(loaded.model), outputs(base.model), atol=1e-2)
    assert from_dict(to_dict(method)) == method


# ---------------------------------------------------------------------------------------- bottlenecks as their formula


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("method", [Houlsby(4), Pfeiffer(4), Parallel(4)], ids=repr)
@torch.no_grad()
def test_bottlenecks_compute_their_formula(family, method, random_weights):
    """One layer written out: post-norm (BERT) and pre-norm (LLaMA)."""
    model = tune(tiny(family).model, method)
    random_weights(model)
    stack = model.output_stack
    block = stack.layers[0]
    captured = {}
    block.register_forward_hook(lambda _block, args, kwargs, out: captured.update(args=args, out=out), with_kwargs=True)
    outputs(model)
    x, context, step = captured["args"]

    def adapter(role, values):
        slot = block.get_submodule(f"{role}_{method.slot}")
        change = slot.changes["default"]
        return change.up(change.act(change.down(values)))

    def norm(role, name, values):
        module = block.get_submodule(f"{role}_{name}")
        return getattr(module, "base", module)(values)

    for role in ("self_attn", "ffn"):
        f = getattr(block, role)(norm(role, "norm", x), context, step)
        if isinstance(method, Houlsby) and type(method) is Houlsby:
            x = norm(role, "post_norm", x + f + adapter(role, f))
        elif role == "self_attn":
            x = norm(role, "post_norm", x + f)
        elif isinstance(method, Pfeiffer):
            x = norm(role, "post_norm", x + f + adapter(role, norm(role, "post_norm", x + f)))
        else:
            x = norm(role, "post_norm", x + f + 4 * adapter(role, x))
    assert torch.allclose(captured["out"], x, atol=1e-5)


# ----------------------------------------------------------------------------------------------------- together


@torch.no_grad()
def test_scaling_can_be_merged_and_other_changes_cannot(random_weights):
    model = tune(tiny("gpt2").model, IA3())
    random_weights(model)
    tuned = outputs(model)
    assert merge(model).largest_change < 1e-5
    assert torch.allclose(outputs(model), tuned, atol=1e-5)
    for method in (Houlsby(4), PrefixTuning(3), PromptTuning(3)):
        other = tune(tiny("gpt2").model, method)
        assert not can_merge(other)
        with pytest.raises(BadSetting, match="cannot become weights of the base"):
            merge(other)


@torch.no_grad()
def test_each_row_has_its_own_method(random_weights):
    model = tiny("llama").model
    want = {None: outputs(model)}
    for name, method in (("scaled", IA3()), ("narrow", Pfeiffer(4)), ("after", Houlsby(4))):
        tune(model, method, name=name)
        random_weights(model)
        want[name] = outputs(model)
    for names in (["scaled", "narrow"], [None, "after"], ["narrow", "narrow"]):
        with selection_of(model).per_row(names):
            got = outputs(model)
        for row, name in enumerate(names):
            assert torch.allclose(got[row], want[name][row], atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", LONGER, ids=repr)
def test_cached_equals_uncached_after_other_weights_changed(method, random_weights):
    """The keys and values of virtual tokens depend on every weight of the stack, not on the vectors alone."""
    model = tune(tiny("llama").model, method, LoRA(2))
    random_weights(model)

    def step():
        return model.decode(IDS, cache=dynamic_cache(model))

    before = step()
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            parameter.mul_(3)
    assert not torch.allclose(step(), before, atol=1e-2)
    assert torch.allclose(step(), outputs(model), atol=1e-5)


def test_what_adds_tokens_cannot_share_a_batch_or_a_packed_row():
    model = tune(tiny("llama").model, PromptTuning(3), name="long")
    with selection_of(model).per_row(["long", None]), pytest.raises(BadInput, match="cannot share a batch"):
        outputs(model)
    for method in (PrefixTuning(2), PromptTuning(2)):
        packed = tune(tiny("llama").model, method)
        with pytest.raises(BadInput, match="take no packed documents"):
            packed(IDS, document_ids=torch.ones_like(IDS))


def test_a_quantized_base_keeps_its_blocks(random_weights):
    for method in (IA3(), Pfeiffer(4), PrefixTuning(3), PromptTuning(3)):
        model = tiny("llama", hidden_size=32, intermediate_size=64).model
        quantize(model, "int8")
        blocks = {path: b.clone() for path, b in model.named_buffers() if path.endswith("blocks")}
        tune(model, method)
        random_weights(model)
        F.cross_entropy(outputs(model).flatten(0, 1), IDS.flatten()).backward()
        after = {path.replace(".base.", "."): b for path, b in model.named_buffers() if path.endswith("blocks")}
        assert blocks and all(torch.equal(after[path], b) for path, b in blocks.items())
        assert all(torch.isfinite(t).all() for t in adapter_tensors(model).values())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tune(tiny("llama").model, Pfeiffer(17)), "reduction must be at most d_model (16), got 17"),
        (
            lambda: tune(tiny("llama").model, Pfeiffer(4, target="*.mlp")),
            "'*.mlp' matches no branch of this model; known: *.ffn, *.self_attn",
        ),
        (lambda: tune(tiny("gpt_neox").model, Pfeiffer(4)), "matches no branch of this model"),
        (lambda: Houlsby(activation="swush"), "activation must be one of"),
        (lambda: PrefixTuning(0), "tokens must be at least 1"),
        (lambda: tune(tiny("llama").model, PromptTuning(2), PromptTuning(3)), "two methods change the same module"),
    ],
)
def test_what_cannot_be_tuned(make, words):
    with pytest.raises(BadSetting) as refused:
        make()
    assert words in str(refused.value)


def test_virtual_tokens_take_positions():
    model = tune(tiny("gpt2").model, PromptTuning(3))
    long = torch.zeros(1, 62, dtype=torch.long)
    with pytest.raises(BadInput):
        model.hidden_states(ModelInputs(long))
