"""Positions equal their published formulas: RoPE and its scalings, T5's buckets, ALiBi's slopes, both sines."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from headwater import core as hw
from headwater.core.init import init_buffers
from headwater.core.positions import T5Bias, apply_rotary
from headwater.errors import TooLong
from headwater.families import builders
from headwater.variants.rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from headwater.variants.transformer_xl import RelativeXL

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
    from transformers.models.t5.modeling_t5 import T5Attention


def built(part, width: int, heads: int = 1):
    position = part.build(width, heads)
    init_buffers(position)
    return position


def public(kind: str, head_dim: int = 64, length: int | None = None, theta: float = 10000.0, **settings) -> tuple:
    """Speeds and gain of the public implementation."""
    rope = {"rope_type": kind, "rope_theta": theta, **settings}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def close(a, b, limit=1e-6):
    assert ((a - b).abs() / b.abs().clamp(min=1e-12)).max() < limit


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rope_scalings_equal_the_public_ones(width, theta):
    old = {"original_max_position_embeddings": 64}
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    beats = {"beta_fast": 16.0, "beta_slow": 2.0}
    trials = {
        "linear": (LinearScaling(4), {"factor": 4.0}),
        "llama3": (Llama3Scaling(8, 1, 4, 64), {"factor": 8.0, **bands, **old}),
        "yarn": (YarnScaling(4, 64), {"factor": 4.0, **old}),
        "yarn, other beats": (YarnScaling(16, 64, beta_fast=16, beta_slow=2), {"factor": 16.0, **beats, **old}),
        "yarn, untruncated": (YarnScaling(4, 64, truncate=False), {"factor": 4.0, "truncate": False, **old}),
        "yarn, given gain": (YarnScaling(4, 64, attention_factor=1.3), {"factor": 4.0, "attention_factor": 1.3, **old}),
    }
    for name, (scaling, settings) in trials.items():
        inv_freq, gain = public(name.split(",")[0], width, theta=theta, **settings)
        ours = built(hw.Rotary(theta, scaling=scaling), width)
        close(ours.inv_freq, inv_freq)
        assert scaling.attention_scaling == pytest.approx(gain, abs=1e-6), name


@pytest.mark.parametrize("length", [10, 64, 65, 300, 5000])
def test_dynamic_scaling_equals_the_public_one_at_every_length(length):
    inv_freq, _ = public("dynamic", length=length, factor=2.0)
    ours = built(hw.Rotary(scaling=DynamicScaling(2, 64)), 64)
    got = ours.scaling.for_length(ours.inv_freq, ours.theta, torch.arange(length)[None])
    close(got.flatten(), inv_freq, limit=3e-6)


def test_dynamic_scaling_looks_at_each_row_alone():
    """Past the trained length, too: the longest row of a batch does not change the others."""
    ours = built(hw.Rotary(scaling=DynamicScaling(2, 4)), 8)
    positions = torch.stack((torch.arange(9), torch.arange(9).clamp(max=5)))
    cos, sin = ours.cos_sin(positions, torch.float32)
    for row in range(2):
        alone = ours.cos_sin(positions[row : row + 1], torch.float32)
        assert torch.equal(cos[row : row + 1], alone[0]) and torch.equal(sin[row : row + 1], alone[1])
    assert not torch.allclose(cos[0, :, :5], cos[1, :, :5])


@pytest.mark.parametrize("partial_factor", [1.0, 0.5])
def test_turning_equals_the_public_one(partial_factor):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 7, 16), torch.randn(2, 2, 7, 16)
    rotated = int(16 * partial_factor)
    config = LlamaConfig(hidden_size=4 * rotated, num_attention_heads=4, head_dim=rotated)
    positions = torch.randint(0, 1000, (2, 7))
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    want = apply_rotary_pos_emb(q[..., :rotated], k[..., :rotated], cos, sin)
    ours = built(hw.Rotary(partial_factor=partial_factor), 16)
    got = ours.rotate(q, k, ours.cos_sin(positions, torch.float32))
    for ours_, theirs, plain in zip(got, want, (q, k), strict=True):
        assert (ours_[..., :rotated] - theirs).abs().max() < 1e-5
        assert torch.equal(ours_[..., rotated:], plain[..., rotated:])


def test_turned_scores_depend_on_distance_alone():
    """And on nothing else; with the sign of the sine swapped in k they would not."""
    torch.manual_seed(0)
    q, k, ours = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), built(hw.Rotary(100.0), 8)

    def score(place_q, place_k, sign=1):
        rotated = [ours.cos_sin(torch.tensor([[place]]), torch.float32) for place in (place_q, place_k)]
        return (apply_rotary(q, *rotated[0]) * apply_rotary(k, rotated[1][0], sign * rotated[1][1])).sum()

    assert (score(7, 3) - score(104, 100)).abs() < 1e-4
    assert (score(7, 3, -1) - score(104, 100, -1)).abs() > 1e-2
    assert (score(7, 3) - score(3, 7)).abs() > 1e-2


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 64)])
def test_buckets_equal_t5(bidirectional, num_buckets, max_distance):
    offsets = torch.arange(-400, 401)[None]
    table = T5Bias(hw.RelativeBias(num_buckets, max_distance, bidirectional), 2)
    want = T5Attention._relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
    assert torch.equal(table.bucket(offsets), want)
    assert not torch.equal(table.bucket(-offsets), want)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20, 71])
def test_slopes_equal_bloom(heads):
    ours = built(hw.Alibi(), 8, heads)
    public_bias = build_alibi_tensor(torch.ones(1, 9, dtype=torch.long), heads, torch.float32)[:, 0]  # slope · place
    assert torch.allclose(ours.slopes, public_bias[:, 1], atol=1e-7)
    positions = torch.arange(9)[None]
    got = ours.bias(positions, positions)[0]  # BLOOM leaves out what is the same for all keys of a query
    want = public_bias[:, None, :] - public_bias[:, :, None]
    past = torch.ones(9, 9).tril().bool()
    assert torch.allclose(got[:, past], want[:, past], atol=1e-6)


def test_sines_equal_the_paper_and_marian():
    width, positions = 12, torch.arange(50)[None]
    paper = torch.zeros(50, width)
    for place in range(50):
        for i in range(0, width, 2):
            angle = place / 10000 ** (i / width)
            paper[place, i], paper[place, i + 1] = math.sin(angle), math.cos(angle)
    zeros = torch.zeros(1, 50, width)
    assert (built(hw.Sinusoidal(), width).add(zeros, positions)[0] - paper).abs().max() < 1e-5
    marian = MarianSinusoidalPositionalEmbedding(50, width).create_weight()
    assert (built(hw.SinusoidalHalves(), width).add(zeros, positions)[0] - marian).abs().max() < 1e-5


def test_transformer_xl_is_its_four_terms():
    """(q + u)·k + (q + v)·R(i - j), written out pair by pair."""
    torch.manual_seed(0)
    heads, width, length = 2, 4, 5
    ours = RelativeXL().build(width, heads)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    init_buffers(ours)
    q, k, positions = (
        torch.randn(1, heads, length, width),
        torch.randn(1, heads, length, width),
        torch.arange(length)[None],
    )
    rotated, _ = ours.rotate(q, k, None)
    got = rotated @ k.mT + ours.query_bias(rotated, positions, positions)
    even = torch.arange(0, heads * width, 2)
    for h in range(heads):
        for i in range(length):
            for j in range(length):
                angle = (i - j) / 10000 ** (even / (heads * width))
                r = (ours.position_projection.weight @ torch.cat((angle.sin(), angle.cos()))).view(heads, width)[h]
                want = (q[0, h, i] + ours.u.weight[h]) @ k[0, h, j] + (q[0, h, i] + ours.v.weight[h]) @ r
                assert abs(got[0, h, i, j] - want) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["rotary", "sinusoidal", "alibi", "xl"])
def test_places_survive_a_model_in_half_precision(name, dtype):
    """Speeds stay float32 and are not rounded on the way: bfloat16 cannot tell place 256 from 257."""
    model = builders.decoder(9, d_model=16, heads=2, layers=1, d_ff=8, position=name).build(seed=0)
    want = {n: b.clone() for n, b in model.named_buffers()}
    assert want
    halved = dict(model.to(dtype).named_buffers())
    assert all(torch.equal(halved[n], want[n]) and halved[n].dtype == torch.float32 for n in want)
    assert all(torch.allclose(b.float(), want[n]) for n, b in model.float().named_buffers())
    assert torch.tensor(257.0, dtype=torch.bfloat16) == 256


def test_a_learned_table_knows_its_length():
    model = builders.decoder(9, d_model=16, heads=2, layers=1, d_ff=8, position="learned", max_positions=6).build(
        seed=0
    )
    model(torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(
        TooLong, match="there are 6 positions, got a token at position 6; shorten the input to 6 tokens"
    ):
        model(torch.zeros(1, 7, dtype=torch.long))
