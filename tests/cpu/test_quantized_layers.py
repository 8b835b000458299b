"""Packed layers are plain layers with the widened weights; packing goes by path and says what it did."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwater
from headwater.errors import BadFile, BadSetting
from headwater.families.builders import transformer
from headwater.quantization.blocks import dequantize
from headwater.quantization.layers import BLOCK_FORMATS, QUANTIZERS, QuantizedEmbedding, QuantizedLinear, quantize
from headwater.weights.native import load_native, save_native

STEPS = {"Q8_0": 127, "Q4_1": 15}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from(sorted(QUANTIZERS)), st.integers(0, 2**31))
def test_a_packed_layer_is_the_plain_layer_with_its_widened_weights(rows: int, blocks: int, kind: str, seed: int):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 32 * blocks, generator=draw) * 10 ** float(torch.randint(-3, 3, (1,), generator=draw))
    bias, x = torch.randn(rows, generator=draw), torch.randn(2, 3, 32 * blocks, generator=draw)
    packed = QuantizedLinear(QUANTIZERS[kind](weight), BLOCK_FORMATS[kind], bias)
    assert torch.equal(packed.weight, dequantize(packed.blocks, BLOCK_FORMATS[kind]))
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
    table = QuantizedEmbedding(QUANTIZERS["Q8_0"](weight), BLOCK_FORMATS["Q8_0"])
    assert torch.equal(table(ids), table.weight[ids])
    assert (table.num_embeddings, table.embedding_dim) == (10, 64)


def test_packing_goes_by_path_and_leaves_tied_tables_and_odd_widths_alone():
    spec = headwater.decoder(50, d_model=64, heads=4, layers=2, d_ff=90, norm_position="pre", norm="rms")
    model = spec.build(seed=0).eval()
    before = model(torch.tensor([[1, 2, 3]]))
    paths = quantize(model, "int8", ["decoder.layers.*"])
    assert "decoder.layers.0.self_attn.q" in paths
    assert "decoder.layers.0.ffn.up" in paths
    assert "decoder.layers.0.ffn.down" not in paths  # 90 is no multiple of 32
    assert "head.out" not in paths
    assert (model(torch.tensor([[1, 2, 3]])) - before).abs().max() < 0.2


def test_faults_say_what_to_do():
    model = headwater.decoder(50, d_model=64, heads=4, layers=1).build(seed=0)
    with pytest.raises(BadSetting, match=r"bits must be int8 or int4, got 'int3'"):
        quantize(model, "int3")
    with pytest.raises(BadSetting, match=r"no linear layer matches \['encoder.\*'\]; there are 7, such as decoder"):
        quantize(model, "int8", ["encoder.*"])


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_packed_model_is_saved_and_loaded_as_it_is(bits, tmp_path):
    """Tied blocks are written once and are one again; a plain copy would be three times as large."""
    spec = transformer(64, d_model=64, heads=4, layers=2, d_ff=96)
    model = spec.build(seed=1).eval()
    quantize(model, bits)
    save_native(tmp_path, model, {"task": "seq2seq"})
    again, about = load_native(tmp_path)
    ids, source = torch.arange(12).view(2, 6), torch.arange(14).view(2, 7)
    assert torch.equal(model(ids, source=source), again(ids, source=source)) and about == {"task": "seq2seq"}
    assert again.head.out.blocks.data_ptr() == again.decoder.embed.tokens.blocks.data_ptr()
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    plain = save_native(tmp_path / "plain", spec.build(seed=1), {}) / "model.safetensors"
    assert (tmp_path / "model.safetensors").stat().st_size < plain.stat().st_size / 2


FAULTS = {
    "must name Q4_0, Q4_1, Q8_0, got 'Q9'": lambda config: config["quantization"].update({"head.out": "Q9"}),
    "must name linear layers and embeddings": lambda config: config["quantization"].update({"head": "Q8_0"}),
    "must be uint8": lambda config: config["quantization"].update({"head.out": "Q4_1"}),
    "is missing": lambda config: config["quantization"].pop("decoder.layers.0.ffn.up"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_packed_folder_that_does_not_fit_is_refused(words, tmp_path):
    model = transformer(64, d_model=64, heads=4, layers=1, d_ff=96).build(seed=1)
    quantize(model, "int8")
    save_native(tmp_path, model, {})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    FAULTS[words](config)
    path.write_text(json.dumps(config))
    with pytest.raises(BadFile, match=words):
        load_native(tmp_path)
