"""Any spec is one of two things: refused in one line before any memory is asked for, or a model that runs both ways."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwater import core as hw
from headwater.errors import BadSetting, Fault, TooLong
from headwater.families import builders
from headwater.parts import REGISTRY, from_dict, to_dict
from headwater.variants.mean_pool_bridge import MeanPoolBridge
from headwater.variants.parallel_block import ParallelBlock
from headwater.variants.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from headwater.variants.soft_cap import SoftCap
from headwater.variants.transformer_xl import RelativeXL

VOCAB = 7
few = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])

# --------------------------------------------------------------------------------------------------------- valid specs

scalings = st.one_of(
    st.just(hw.NoScaling()),
    st.builds(LinearScaling, st.floats(1, 50)),
    st.builds(DynamicScaling, st.floats(1, 50), st.integers(1, 9)),
    st.builds(Llama3Scaling, st.floats(1, 50), st.floats(0.5, 1), st.floats(2, 9), st.integers(1, 99)),
    st.builds(YarnScaling, st.floats(1, 50), st.integers(1, 99), st.floats(2, 64), st.floats(0.1, 1)),
)
at_embedding = st.one_of(
    st.just(hw.NoPosition()),
    st.builds(hw.Sinusoidal, st.floats(2, 1e6)),
    st.builds(hw.SinusoidalHalves, st.floats(2, 1e6)),
    st.builds(hw.Learned, st.integers(8, 20), st.integers(0, 2)),
)
in_attention = st.one_of(
    st.just(hw.NoPosition()),
    st.builds(hw.Rotary, st.floats(2, 1e6), st.sampled_from([1.0, 0.5]), scalings),
    st.just(hw.Alibi()),
    st.builds(hw.RelativeBias, st.integers(4, 32), st.integers(20, 99), st.booleans()),
    st.just(RelativeXL()),
)
rules = st.recursive(
    st.one_of(
        st.just(hw.Bidirectional()),
        st.just(hw.Causal()),
        st.builds(hw.SlidingWindow, st.integers(1, 9)),
        st.builds(hw.LocalWindow, st.integers(0, 9)),
    ),
    lambda inner: st.builds(hw.And, inner, inner),
    max_leaves=3,
)
eps = st.floats(1e-6, 1e-2)
norms = st.one_of(
    st.builds(hw.LayerNorm, eps, st.booleans()), st.builds(hw.RMSNorm, eps), st.builds(hw.OffsetRMSNorm, eps)
)
dropouts = st.sampled_from([0.0, 0.1, 0.9])
kernels = st.one_of(st.just(hw.SDPA()), st.just(hw.Eager()), st.builds(SoftCap, st.floats(0.5, 50)))
feeds = st.builds(
    lambda kind, *fields: kind(*fields),
    st.sampled_from([hw.FeedForward, hw.GatedFeedForward]),
    st.integers(1, 9),
    st.sampled_from(sorted(hw.ACTIVATIONS)),
    st.booleans(),
    dropouts,
)


@st.composite
def attentions(draw: Any, kind: type = hw.Attention) -> Any:
    groups, kv = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    fields = {
        "heads": groups * kv,
        "kv_heads": draw(st.sampled_from([kv, None])),
        "head_dim": draw(st.sampled_from([4, 8])),
        "v_head_dim": draw(st.sampled_from([None, 3])),
        "bias": draw(st.sampled_from(["", "q", "qkv", "qkvo"])),
        "qk_norm": draw(st.one_of(st.just(hw.NoNorm()), norms)),
        "scale": draw(st.one_of(st.none(), st.floats(0.01, 2))),
        "dropout": draw(dropouts),
        "kernel": draw(kernels),
    }
    own = {} if kind is hw.CrossAttention else {"mask": draw(rules), "position": draw(in_attention)}
    return kind(**fields, **own)


@st.composite
def stacks(draw: Any, d_model: int, reads: bool) -> hw.Stack:
    def branch(**layer: Any) -> hw.Branch:
        norm = draw(norms)
        return draw(st.sampled_from([hw.pre, hw.sandwich] if parallel else [hw.pre, hw.sandwich, hw.post]))(
            norm, **layer
        )

    layers = []
    for _ in range(draw(st.integers(0, 2))):
        parallel = draw(st.booleans())
        branches = [branch(self_attn=draw(attentions()))]
        if reads:
            branches.append(branch(cross_attn=draw(attentions(hw.CrossAttention))))
        branches.append(branch(ffn=draw(feeds)))
        layers.append((ParallelBlock if parallel else hw.Block)(tuple(branches), draw(dropouts)))
    order = draw(st.lists(st.integers(0, len(layers) - 1), max_size=3)) if layers else []
    width = draw(st.sampled_from([None, 6, d_model]))
    embed = hw.Embeddings(VOCAB, draw(at_embedding), 2.0, draw(st.integers(0, 2)), draw(norms), width, draw(dropouts))
    return hw.Stack(d_model, embed, tuple(layers), draw(norms), tuple(order), draw(dropouts))


@st.composite
def specs(draw: Any) -> hw.Model:
    d_model, shape = draw(st.sampled_from([4, 8])), draw(st.sampled_from(["encoder", "decoder", "both"]))
    sides = {
        side: draw(stacks(d_model, reads=shape == "both" and side == "decoder"))
        for side in ("encoder", "decoder")
        if shape in (side, "both")
    }
    head = draw(
        st.one_of(
            st.builds(hw.LMHead, st.just(VOCAB), st.booleans(), st.floats(0.1, 2)),
            st.builds(hw.TokenClassificationHead, st.integers(1, 4), dropouts),
            st.builds(
                hw.ClassificationHead, st.integers(1, 4), st.just(hw.Pooler(hw.MeanPooling())), dropouts, st.booleans()
            ),
            st.just(hw.NoHead()),
        )
    )
    bridge = draw(st.one_of(st.just(hw.NoBridge()), st.builds(MeanPoolBridge, st.integers(1, 4))))
    init = draw(st.sampled_from([hw.PAPER_INIT, (("*", hw.Normal(0.3)),), hw.scaled_normal(2)]))
    return hw.Model(head, **sides, bridge=bridge, init=init)


def runs_both_ways(spec: hw.Model) -> None:
    """Forward and backward with finite values, padding included."""
    model = spec.build(seed=0)
    both = model.encoder is not None and model.decoder is not None
    ids, keep = (
        torch.arange(10).view(2, 5) % spec_vocab(spec),
        torch.tensor([[True] * 5, [True, True, False, False, False]]),
    )
    given = {"source": ids % source_vocab(spec), "source_attention_mask": keep} if both else {}
    torch.manual_seed(0)
    out = model(ids, attention_mask=keep, **given)
    assert out.isfinite().all()
    out.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def spec_vocab(spec: hw.Model) -> int:
    return (spec.decoder if spec.decoder is not None else spec.encoder).embed.vocab


def source_vocab(spec: hw.Model) -> int:
    return spec.encoder.embed.vocab


@few
@given(specs())
def test_every_valid_spec_builds_and_runs(spec):
    runs_both_ways(spec)
    assert from_dict(to_dict(spec)) == spec and eval(repr(spec), dict(REGISTRY)) == spec


# ------------------------------------------------------------------------------------------------------- invalid specs


class Memory(TorchDispatchMode):
    """Refuses to make a tensor that needs memory for more than a few numbers (constants are made of one or two)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            assert not isinstance(t, torch.Tensor) or t.is_meta or t.numel() < 8, f"{func} asked for memory"
        return out


NUMBERS = [
    -1,
    0,
    1,
    3,
    5,
    2**31,
    10**20,
    0.0,
    -0.5,
    1.5,
    1e300,
    float("nan"),
    float("inf"),
    True,
    None,
    "",
    "relu",
    "x",
]


def places(plain: Any, path: tuple = ()) -> list[tuple]:
    """Every place in a tree of JSON where a simple value stands."""
    if isinstance(plain, dict):
        return [p for key, value in plain.items() if key != "kind" for p in places(value, (*path, key))]
    if isinstance(plain, list):
        return [p for n, value in enumerate(plain) for p in places(value, (*path, n))]
    return [path]


def changed(plain: Any, path: tuple, value: Any) -> Any:
    plain = copy.deepcopy(plain)
    inner = plain
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return plain


def refused_or_runs(plain: Any) -> bool:
    """True where it was refused."""
    try:
        with Memory():
            spec = from_dict(plain)
            spec.on_meta()
    except Fault as fault:
        assert "\n" not in str(fault) and "; " in str(fault), str(fault)
        return True
    if sum(p.numel() for p in spec.on_meta().parameters()) < 10**6 and spec_vocab(spec) > 1:
        try:
            runs_both_ways(spec)
        except BadSetting as fault:  # the rules of the first weights are asked when there are weights to draw
            assert str(fault).startswith("init: some rule must match every path")
            return True
        except TooLong as fault:  # a small table of positions is a valid spec, for short inputs
            assert str(fault).startswith("position.table: there are ")
    return False


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), specs())
def test_a_spec_with_one_wrong_value_is_refused_or_runs(data, spec):
    plain = to_dict(spec)
    path = data.draw(st.sampled_from(places(plain)))
    refused_or_runs(changed(plain, path, data.draw(st.sampled_from(NUMBERS))))


WRONG = {
    "heads": ("decoder", {"kind": "Attention", "heads": 3}),
    "fields": ("decoder", {"kind": "Attention", "heads": 4, "mask": {"kind": "Causal", "size": 3}}),
    "a kind": ("decoder", {"kind": "Atention", "heads": 4}),
    "a number": ("decoder", 4),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_layer_asks_for_no_memory(name):
    spec = builders.decoder(VOCAB, d_model=16, heads=4, layers=1, d_ff=8)
    plain = to_dict(spec)
    plain["decoder"]["layers"][0]["branches"][0]["layer"] = WRONG[name][1]
    assert refused_or_runs(plain)


def test_a_missing_rule_is_seen_before_memory_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *args, **kwargs: pytest.fail("memory was asked for"))
    with pytest.raises(BadSetting, match="some rule must match every path"):
        hw.Model(decoder=builders.decoder(VOCAB, d_model=8, heads=2).decoder, init=(("x", hw.Normal(1)),)).build()


def test_the_counter_sees_memory():
    spec = builders.decoder(VOCAB, d_model=16, heads=4, layers=1, d_ff=8)
    with Memory():
        spec.on_meta()
    with pytest.raises(AssertionError, match="asked for memory"), Memory():
        spec.build(seed=0)
    assert not refused_or_runs(to_dict(replace(spec, init=hw.PAPER_INIT)))
