"""Packed layers are plain layers with the widened weights; packing goes by path and says what it did."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwater
from headwater.errors import BadSetting
from headwater.fast.packed import PACKED, PACKERS, PackedLinear, PackedTable, pack
from headwater.weights.gguf_blocks import unpacked

STEPS = {"Q8_0": 127, "Q4_1": 15}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from(sorted(PACKERS)), st.integers(0, 2**31))
def test_a_packed_layer_is_the_plain_layer_with_its_widened_weights(rows: int, blocks: int, kind: str, seed: int):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32 * blocks, generator=draw) * 10 ** float(torch.randint(-3, 3, (1,), generator=draw))
    bias, x = torch.randn(rows, generator=draw), torch.randn(2, 3, 32 * blocks, generator=draw)
    packed = PackedLinear(PACKERS[kind](weight), PACKED[kind], bias)
    assert torch.equal(packed.weight, unpacked(packed.blocks, PACKED[kind]))
    plain = nn.functional.linear(x, packed.weight, bias)
    torch.testing.assert_close(packed(x), plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max()))
    torch.testing.assert_close(
        packed(x.repeat(2, 2, 1))[:2, :3], plain, rtol=1e-4, atol=1e-5 * float(plain.abs().max())
    )
    grouped = weight.view(rows, blocks, 32)
    span = grouped.abs().amax(-1) if kind == "Q8_0" else grouped.amax(-1) - grouped.amin(-1)
    error = (packed.weight - weight).view(rows, blocks, 32).abs().amax(-1)
    assert bool((error <= span / STEPS[kind] * 0.51 + grouped.abs().amax(-1) * 2e-3).all())


def test_a_packed_table_widens_what_is_looked_up():
    weight, ids = torch.randn(10, 64), torch.tensor([[1, 9], [0, 1]])
    table = PackedTable(PACKERS["Q8_0"](weight), PACKED["Q8_0"])
    assert torch.equal(table(ids), table.weight[ids])
    assert (table.num_embeddings, table.embedding_dim) == (10, 64)


def test_packing_goes_by_path_and_leaves_tied_tables_and_odd_widths_alone():
    spec = headwater.decoder(50, d_model=64, heads=4, layers=2, d_ff=90, placement="pre", norm="rms")
    model = spec.build(seed=0).eval()
    before = model(torch.tensor([[1, 2, 3]]))
    paths = pack(model, "int8", ["decoder.layers.*"])
    assert "decoder.layers.0.self_attn.q" in paths
    assert "decoder.layers.0.ffn.up" in paths
    assert "decoder.layers.0.ffn.down" not in paths  # 90 is no multiple of 32
    assert "head.out" not in paths
    assert (model(torch.tensor([[1, 2, 3]])) - before).abs().max() < 0.2


def test_faults_say_what_to_do():
    model = headwater.decoder(50, d_model=64, heads=4, layers=1).build(seed=0)
    with pytest.raises(BadSetting, match=r"bits must be int8 or int4, got 'int3'"):
        pack(model, "int3")
    with pytest.raises(BadSetting, match=r"no linear layer matches \['encoder.\*'\]; there are 7, such as decoder"):
        pack(model, "int8", ["encoder.*"])
