"""The smaller parts of the core: first weights, heads, the embedding, pooling, taps, and mixed precision."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from headwater import core as hw
from headwater.core.feedforward import ACTIVATIONS
from headwater.families import builders
from headwater.variants.mean_pool_bridge import MeanPoolBridge

SIZES = {"d_model": 32, "heads": 4, "layers": 2, "d_ff": 64, "dropout": 0.0}
IDS = torch.arange(12).view(2, 6) % 9
KEEP = torch.tensor([[False, False, True, True, True, True], [True, True, True, False, False, False]])


# ------------------------------------------------------------------------------------------------------- first weights


def test_the_same_seed_gives_the_same_weights():
    spec = builders.transformer(50, **SIZES)
    a, b, c = spec.build(seed=1), spec.build(seed=1), spec.build(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.decoder.layers[0].ffn.up.weight, c.decoder.layers[0].ffn.up.weight)


def test_a_seed_leaves_the_dice_of_others_alone():
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    builders.decoder(9, **SIZES).build(seed=5)
    assert torch.equal(torch.rand(3), want)


def test_first_weights_follow_their_rules():
    model = builders.transformer(4000, **SIZES).build(seed=0)
    q = model.encoder.layers[0].self_attn.q
    bound = math.sqrt(6 / 64)
    assert q.weight.abs().max() <= bound and q.weight.abs().max() > 0.95 * bound and (q.bias == 0).all()
    tokens = model.decoder.embed.tokens.weight  # tied to the output, and drawn by the rule of its home
    assert tokens is model.head.out.weight and abs(tokens.std() * math.sqrt(32) - 1) < 0.02
    norm = model.decoder.layers[0].ffn_post_norm
    assert (norm.weight == 1).all() and (norm.bias == 0).all()


def test_what_writes_into_the_stream_begins_smaller():
    model = builders.decoder(50, **{**SIZES, "layers": 8}, norm_position="pre").build(seed=0)
    layer = model.decoder.layers[3]
    assert layer.ffn.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.ffn.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert layer.self_attn.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


def test_offset_norms_begin_as_no_change():
    norm = hw.OffsetRMSNorm(1e-6).build(8)
    norm.reset_parameters()
    x = torch.randn(3, 8)
    assert torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-6))


# ----------------------------------------------------------------------------------------------------- heads and tables


def encoder(head, **changes) -> hw.Transformer:
    return builders.encoder(9, head, **{**SIZES, **changes}).build(seed=0).eval()


def test_a_head_reads_the_token_it_names():
    states = encoder(hw.NoHead())(IDS, attention_mask=KEEP)
    where = {hw.FirstToken(): (2, 0), hw.LastToken(): (5, 2)}
    for pick, (a, b) in where.items():
        got = encoder(hw.Pooled(pick))(IDS, attention_mask=KEEP)
        assert torch.equal(got, torch.stack((states[0, a], states[1, b])))
    mean = encoder(hw.Pooled(hw.MeanPooling()))(IDS, attention_mask=KEEP)
    assert torch.allclose(mean, torch.stack((states[0, 2:].mean(0), states[1, :3].mean(0))), atol=1e-6)


def test_padding_changes_no_pooled_answer():
    model = encoder(hw.ClassificationHead(3, hw.Pooler(hw.MeanPooling())))
    alone = model(IDS[:1, 2:])
    assert torch.allclose(model(IDS, attention_mask=KEEP)[:1], alone, atol=1e-5)
    assert not torch.allclose(model(IDS)[:1], alone, atol=1e-3)


def test_a_narrow_table_is_widened():
    head = hw.LMHead(9, transform=hw.MLMTransform("gelu", hw.LayerNorm()), width=12)
    stack = hw.Stack(32, hw.Embeddings(9, hw.Learned(8), width=12, token_types=2, norm=hw.LayerNorm()), ())
    model = hw.Model(head, encoder=stack, tied=(("head.out", "encoder.embed.tokens"),)).build(seed=0)
    assert model.encoder.embed.projection.weight.shape == (32, 12) and model(IDS).shape == (2, 6, 9)
    kinds = torch.ones_like(IDS)
    assert torch.equal(model(IDS), model(IDS, token_types=0 * kinds)) and not torch.equal(
        model(IDS), model(IDS, token_types=kinds)
    )


def test_pooled_memory_is_the_mean_of_neighbours():
    model = builders.transformer(9, **SIZES).build(seed=0)
    pool = MeanPoolBridge(2).build()
    memory = model.encode(IDS[:, :5])
    pooled = pool(memory)
    assert pooled.hidden_states.shape == (2, 3, 32)
    assert torch.allclose(pooled.hidden_states[:, 0], memory.hidden_states[:, :2].mean(1), atol=1e-6)
    assert torch.allclose(pooled.hidden_states[:, 2], memory.hidden_states[:, 4], atol=1e-6), (
        "a last one without a neighbour"
    )


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("gelu", lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("quick_gelu", lambda x: x / (1 + math.exp(-1.702 * x))),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("tanh", math.tanh),
    ],
)
def test_activations_are_their_formulas(name, formula):
    x = torch.linspace(-4, 4, 41)
    assert torch.allclose(ACTIVATIONS[name](x), torch.tensor([formula(v.item()) for v in x]), atol=1e-6)


def test_every_activation_has_its_formula_tested():
    assert set(ACTIVATIONS) == {"relu", "gelu", "gelu_tanh", "quick_gelu", "silu", "tanh"}


def test_dropout_acts_in_its_places():
    """At the embedding, on the weights of attention and on every branch; never in eval mode."""
    spec = builders.decoder(9, **{**SIZES, "dropout": 0.5}, attention_dropout=0.5)
    model = spec.build(seed=0)
    drops = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout) and module.p > 0]
    assert drops == ["decoder.embed.dropout", "decoder.layers.0.dropout", "decoder.layers.1.dropout"]
    assert all(layer.self_attn.kernel.dropout == 0.5 for layer in model.decoder.layers)
    assert not torch.equal(model(IDS), model(IDS))
    model.eval()
    assert torch.equal(model(IDS), model(IDS))


# ------------------------------------------------------------------------------------------------- places and precision


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "rotary", "alibi", "relative", "xl"])
def test_given_places_are_obeyed(position):
    """Counted places, given by hand, change nothing; other places change the answers."""
    model = builders.decoder(9, **SIZES, position=position).build(seed=0).eval()
    counted = torch.arange(6)[None]
    assert torch.allclose(model(IDS, positions=counted), model(IDS), atol=1e-5)
    spread = torch.tensor([[0, 3, 4, 9, 10, 30]])
    assert not torch.allclose(model(IDS, positions=spread), model(IDS), atol=1e-4)


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "alibi", "xl"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near_full(position, dtype):
    """A model in half precision, or under autocast, stays within rounding, far from the beginning too."""
    model = builders.decoder(9, **SIZES, position=position).build(seed=0).eval()
    text = torch.arange(400)[None] % 9
    with torch.no_grad():
        want = model(text)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(text).float()
        half = model.to(dtype)(text).float()
    limit = 0.03 * want.abs().max()
    assert (half - want).abs().max() < limit and (mixed - want).abs().max() < limit


@pytest.mark.parametrize("make", [hw.dynamic_cache, hw.sliding_cache, lambda m: hw.static_cache(m, 2, 8)])
def test_a_cache_works_in_half_precision(make):
    model = builders.decoder(9, **SIZES, position="rotary").build(seed=0).eval().bfloat16()
    with torch.no_grad():
        whole, cache = model(IDS).float(), make(model)
        steps = torch.cat([model.decode(part, cache=cache) for part in IDS.split((3, 1, 2), 1)], 1).float()
    assert (steps - whole).abs().max() < 0.05 * whole.abs().max()


def test_a_rolling_cache_keeps_only_its_window():
    attention = hw.Attention(4, mask=hw.SlidingWindow(3))
    block = hw.Block((hw.pre(hw.RMSNorm(), self_attn=attention), hw.pre(hw.RMSNorm(), ffn=hw.FeedForward(8))))
    model = hw.Model(decoder=hw.Stack(16, hw.Embeddings(9), (block,) * 2)).build(seed=0)
    cache = hw.sliding_cache(model)
    with torch.no_grad():
        for part, real in zip(IDS.split((4, 1, 1), 1), KEEP.split((4, 1, 1), 1), strict=True):
            model.decode(part, attention_mask=real, cache=cache)
    (store,) = cache.group_caches
    assert {k.shape[2] for k, _ in store.kv.values()} == {2} and store.positions.shape == (2, 2)
    assert store.positions[store.attention_mask].tolist() == [2, 3, 1, 2], (
        "the last real tokens of each row, whatever padding followed"
    )


def test_listening_stops_when_the_hook_goes():
    model = builders.decoder(9, **SIZES).build(seed=0)
    tap, received = model.get_submodule("decoder.layers.1.self_attn.kernel.weights"), []
    hook = tap.register_forward_hook(lambda *a: received.append(a[2].shape))
    model(IDS)
    hook.remove()
    model(IDS)
    assert received == [(2, 4, 6, 6)] and not tap.has_hooks


def test_shared_layers_are_one_and_run_often():
    spec = builders.decoder(9, **{**SIZES, "layers": 1})
    often = replace(spec, decoder=replace(spec.decoder, order=(0,) * 5))
    count = [sum(p.numel() for p in s.on_meta().parameters()) for s in (spec, often)]
    assert count[0] == count[1]
    once, five = spec.build(seed=0).eval(), often.build(seed=0).eval()
    assert not torch.allclose(once(IDS), five(IDS))
    assert set(hw.static_cache(five, 1, 4).group_caches[0].kv) == {(step, 0) for step in range(5)}


def test_layers_with_equal_positions_share_them():
    def owned(position):
        return builders.decoder(9, **SIZES, position=position).build(seed=0).decoder.position_encodings

    assert len(owned("rotary")) == len(owned("relative")) == 1 and len(owned("xl")) == 2


def test_recomputing_tells_a_cache_nothing_twice():
    model, found = builders.decoder(9, **SIZES).build(seed=0), []
    for on in (False, True):
        cache = hw.dynamic_cache(model.gradient_checkpointing(on))
        model.zero_grad()
        torch.cat([model.decode(part, cache=cache) for part in IDS.split(3, 1)], 1).square().sum().backward()
        found.append(model.decoder.layers[0].ffn.up.weight.grad.clone())
    assert torch.equal(*found)


# --------------------------------------------------------------------------------------------------- residual branches


class ZeroLayer(torch.nn.Module):
    """A layer that adds nothing to the residual stream."""

    def forward(self, x, context, step):
        return torch.zeros_like(x)


def test_a_replaced_child_is_used_by_the_forward_pass():
    """Adapters and quantized layers replace children of a block by path."""
    model = builders.decoder(9, **SIZES).build(seed=0).eval()
    block = model.decoder.layers[0]
    before = model(IDS)
    assert [branch.layer for branch in block.branches] == [block.self_attn, block.ffn]

    block.ffn = ZeroLayer()
    assert block.branches[1].layer is block.ffn and not torch.equal(model(IDS), before)


def test_a_copy_has_its_own_branches():
    model = builders.decoder(9, **SIZES).build(seed=0).eval()
    copied = copy.deepcopy(model)
    copied.decoder.layers[0].ffn = ZeroLayer()
    assert copied.decoder.layers[1].branches[0].layer is copied.decoder.layers[1].self_attn
    assert not torch.equal(copied(IDS), model(IDS))
