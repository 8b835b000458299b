"""Memory and FLOPs: equal to a real KV cache and to a FLOP counter; activations close to what autograd saves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headwater
import headwater.core as core
from headwater.core.cache import dynamic_cache
from headwater.errors import BadSetting, TooLong
from headwater.families import builders
from headwater.inspection.costs import count
from headwater.parts import swap
from headwater.variants.mean_pool_bridge import MeanPoolBridge

SMALL = {"d_model": 64, "heads": 4, "layers": 3}
BATCH, LENGTH = 2, 96
SPECS = {
    "both": builders.transformer(100, **SMALL),
    "both, no dropout": builders.transformer(100, **SMALL, dropout=0.0),
    "decoder, gelu, pre-norm": builders.decoder(100, **SMALL, norm_position="pre", activation="gelu", dropout=0.0),
    "decoder, grouped, gated": builders.decoder(100, **SMALL, norm_position="pre", norm="rms", gated=True,
                                            activation="silu", kv_heads=2, position="rotary", bias=False, dropout=0.0),
    "decoder, wide heads": builders.decoder(100, **SMALL, head_dim=24),
    "encoder": builders.encoder(100, **SMALL, activation="gelu"),
    "pooled source": dataclasses.replace(builders.transformer(100, **SMALL), bridge=MeanPoolBridge(3)),
}  # fmt: skip


def with_eager_attention(spec):
    """The same with eager attention, whose products a FLOP counter sees."""
    spec = swap(spec, core.Attention, lambda a: dataclasses.replace(a, kernel=core.Eager()))
    return swap(spec, core.CrossAttention, lambda a: dataclasses.replace(a, kernel=core.Eager()))


def inputs(spec):
    ids = torch.randint(100, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return (ids,), ({"source": ids} if spec.encoder and spec.decoder else {})


@pytest.mark.parametrize("name", SPECS)
def test_flops_equal_those_of_a_flop_counter(name):
    spec = SPECS[name]
    args, kwargs = inputs(spec)
    model, counted = with_eager_attention(spec).build(seed=0), count(spec, BATCH, LENGTH).flops
    with FlopCounterMode(display=False) as forward:
        out = model(*args, **kwargs)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    tokens = BATCH * LENGTH
    assert forward.get_total_flops() == counted["forward"] * tokens
    assert forward.get_total_flops() + backward.get_total_flops() == counted["training"] * tokens


def test_attention_flops_are_limited_to_the_window():
    spec = swap(
        builders.decoder(100, **SMALL), core.Attention, lambda a: dataclasses.replace(a, mask=core.SlidingWindow(8))
    )
    full, windowed = (count(s, 1, 512).flops["attention"] for s in (builders.decoder(100, **SMALL), spec))
    assert full == 64 * windowed


def test_training_costs_six_flops_per_parameter():
    """Training costs about 6 FLOPs per parameter and token where attention is small."""
    counted = headwater.count(headwater.preset("llama-7b"), length=128)
    assert counted.flops["training"] / counted.parameters == pytest.approx(6, rel=0.03)


@pytest.mark.parametrize("name", ["both", "decoder, grouped, gated", "decoder, wide heads", "pooled source"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kv_cache_has_the_counted_size(name, dtype):
    spec = SPECS[name]
    model = spec.build(seed=0).to(torch.float32 if dtype == "fp32" else torch.bfloat16).eval()
    (ids,), kwargs = inputs(spec)
    cache = dynamic_cache(model)
    with torch.no_grad():
        model.decode(ids, cache=cache, memory=model.encode(ids) if kwargs else None)
    cached = [t for store in cache.group_caches for pair in store.kv.values() for t in pair]
    cached += [t for pair in cache.cross_kv.values() for t in pair]
    assert sum(t.nbytes for t in cached) == count(spec, BATCH, LENGTH, dtype).bytes["kv_cache"]


def test_the_kv_cache_of_llama_70b():
    counted = headwater.count(headwater.preset("llama-70b"), batch=4, length=4096, dtype="bf16")
    assert counted.bytes["kv_cache"] == 4 * 4096 * 80 * 2 * 8 * 128 * 2
    assert counted.bytes["weights"] == counted.bytes["gradients"] == 2 * counted.parameters
    assert counted.bytes["optimizer"] == 12 * counted.parameters
    assert headwater.count(headwater.preset("bert-base")).bytes["kv_cache"] == 0


def saved_activation_bytes(model, args, kwargs):
    """Bytes that autograd saves for the backward pass, without the weights, each tensor once."""
    parameter_storages = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    cached = {}

    def pack(t):
        cached[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*args, **kwargs).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))
    result = sum(storage.nbytes() for at, storage in cached.items() if at not in parameter_storages)
    loss.backward()
    return result


@pytest.mark.parametrize("name", [name for name in SPECS if name != "pooled source"])
def test_activations_are_estimated_within_a_quarter(name):
    spec = SPECS[name]
    args, kwargs = inputs(spec)
    measured = saved_activation_bytes(spec.build(seed=0).train(), args, kwargs)
    assert 0.75 < count(spec, BATCH, LENGTH).bytes["activations"] / measured < 1.25


def test_gradient_checkpointing_would_break_the_estimate():
    """The planted fault: gradient checkpointing saves far less, so the measurement can fail."""
    spec = SPECS["decoder, gelu, pre-norm"]
    args, kwargs = inputs(spec)
    measured = saved_activation_bytes(spec.build(seed=0).train().gradient_checkpointing(), args, kwargs)
    assert count(spec, BATCH, LENGTH).bytes["activations"] / measured > 2


def test_costs_scale_with_the_batch():
    once, twice = (count(SPECS["both"], b, 64) for b in (1, 2))
    assert {n: twice.bytes[n] / once.bytes[n] for n in once.bytes} == {
        "weights": 1, "gradients": 1, "optimizer": 1, "activations": 2, "kv_cache": 2}  # fmt: skip
    assert once.flops == twice.flops, "FLOPs are per token"


def test_a_built_model_counts_as_its_spec():
    spec = SPECS["both"]
    assert count(spec.build(seed=0), 1, 64) == count(spec, 1, 64)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"dtype": "fp8"}, BadSetting, "dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        ({"batch": 0}, BadSetting, "at least 1"),
        ({"length": 0}, BadSetting, "at least 1"),
        ({"length": 2000}, TooLong, "1024 positions, got 2000; give at most 1024"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, kind, message):
    with pytest.raises(kind, match=message):
        count(headwater.preset("gpt2"), **arguments)


def test_another_module_is_rejected_with_an_alternative():
    with pytest.raises(BadSetting, match=r"module_tree takes any module"):
        count(torch.nn.Linear(2, 2))
