"""A weight with NaN or infinity is refused by name, in every file format and dtype."""

from __future__ import annotations

import math
import struct

import gguf as public_gguf
import pytest
import torch

import headwater
from headwater.errors import BadFile
from headwater.families.gguf import load_gguf, save_gguf
from headwater.families.llama2c import read_llama2c
from headwater.families.load import load
from headwater.quantization.blocks import GGML_TYPES_BY_NAME, dequantize
from headwater.quantization.layers import quantize
from headwater.weights import gguf
from headwater.weights.checks import SCALES_PER_BLOCK, check_finite_scales, is_finite
from headwater.weights.gguf import GgufFile
from headwater.weights.native import load_native, named_tensors, save_native
from headwater.weights.shards import open_weights, save_weights

BAD = [math.nan, math.inf, -math.inf]
REFUSED = "holds NaN or infinity; the file is damaged or was saved from a broken run"
HALVES = {"Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}  # byte offsets of the scales in a block
HALVES |= {name: tuple(range(0, 2 * count, 2)) for name, count in SCALES_PER_BLOCK.items()}


def small():
    return headwater.decoder(40, d_model=32, heads=2, layers=2, d_ff=64).build(seed=0).eval()


@pytest.mark.parametrize("bad", BAD)
def test_a_native_folder(bad: float, tmp_path):
    for path in named_tensors(small()):
        model = small()
        tensor = model.get_parameter(path).detach()
        tensor.view(-1)[tensor.numel() // 2] = bad
        save_native(tmp_path, model, {})
        with pytest.raises(BadFile, match=f"{path} {REFUSED}"):
            load_native(tmp_path)
    save_native(tmp_path, small(), {})
    load_native(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_native_folder_of_other_dtypes(dtype: torch.dtype, tmp_path):
    save_native(tmp_path, small(), {})
    tensors = {name: t.to(dtype) for name, t in open_weights(tmp_path).items()}
    save_weights(tmp_path, tensors)
    load_native(tmp_path)
    tensors["decoder.layers.1.ffn.up.weight"][3, 4] = 1e300 if dtype == torch.float64 else math.inf
    save_weights(tmp_path, tensors)
    with pytest.raises(BadFile, match=f"decoder.layers.1.ffn.up.weight {REFUSED}"):
        load_native(tmp_path)


def test_a_native_folder_with_integer_weights_is_refused(tmp_path):
    save_native(tmp_path, small(), {})
    tensors = dict(open_weights(tmp_path))
    tensors["decoder.layers.1.ffn.up.weight"] = tensors["decoder.layers.1.ffn.up.weight"].long()
    save_weights(tmp_path, tensors)
    with pytest.raises(BadFile, match=r"ffn.up.weight must be floating point, it is torch.int64"):
        load_native(tmp_path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_quantized_native_folder(bits: str, bad: float, tmp_path):
    for path in ("head.out", "decoder.layers.1.self_attn.q", "decoder.layers.0.ffn.down"):
        model = small()
        quantize(model, bits)
        save_native(tmp_path, model, {})
        load_native(tmp_path)
        scale = model.get_submodule(path).blocks.view(torch.float16)
        scale[-1, 0] = bad
        save_native(tmp_path, model, {})
        with pytest.raises(BadFile, match=f"blocks {REFUSED}"):
            load_native(tmp_path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", HALVES)
def test_scales_decide_for_every_block_format(name: str, bad: float):
    """Blocks with finite scales dequantize to finite weights; one bad scale gives non-finite weights."""
    kind = GGML_TYPES_BY_NAME[name]
    blocks = torch.randint(0, 256, (3, 4 * kind.type_size), dtype=torch.uint8)
    halves = blocks.view(12, kind.type_size).view(torch.float16)
    for at in HALVES[name]:
        halves[:, at // 2] = 65504.0  # the largest float16
    assert is_finite(dequantize(blocks, kind))
    if name in SCALES_PER_BLOCK:
        check_finite_scales(blocks, kind, "w", "file")
    for at in HALVES[name]:
        broken = blocks.clone()
        broken.view(12, kind.type_size).view(torch.float16)[7, at // 2] = bad
        assert not is_finite(dequantize(broken, kind))
        if name in SCALES_PER_BLOCK:
            with pytest.raises(BadFile, match=f"file: w {REFUSED}"):
                check_finite_scales(broken, kind, "w", "file")


def test_a_sum_that_overflows_is_checked_again():
    assert is_finite(torch.full((64,), 3e38)) and not is_finite(torch.tensor([3e38, math.inf]))
    assert (
        is_finite(torch.full((64,), 65504.0).half()) and is_finite(torch.empty(0)) and is_finite(torch.ones(3).long())
    )


# --------------------------------------------------------------------------------------------------------------- GGUF


def gguf_file(path, kind: str, monkeypatch) -> GgufFile:
    """A tiny LLaMA, all of its matrices stored as `kind`."""
    from headwater.families.hf_folder import LoadedModel
    from headwater.families.registry import FAMILIES
    from headwater.text.train import train_tokenizer
    from headwater.weights.hf_config import HFConfig

    tokenizer = train_tokenizer(["the cat sat on the mat"] * 20, "bpe", vocab_size=280)
    config = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    model = FAMILIES["llama"].read_spec(HFConfig(dict(config)), "language").build(seed=0).eval()

    def convert(tensor, stored):
        if stored.dtype is not None:
            return tensor.to(stored.dtype)
        ggml_type = public_gguf.GGMLQuantizationType[stored.name]
        return torch.from_numpy(public_gguf.quants.quantize(tensor.detach().float().numpy(), ggml_type))

    def choose(meta, outtype):
        return GGML_TYPES_BY_NAME[kind if meta.dim() > 1 else "F32"]

    monkeypatch.setattr(gguf, "_choose_ggml_type", choose)
    monkeypatch.setattr(gguf, "_convert_tensor", convert)
    save_gguf(LoadedModel(model, tokenizer, config, path, "language"), path)
    return GgufFile(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_file(kind: str, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    file = gguf_file(path, kind, monkeypatch)
    load_gguf(path)
    raw, ours = path.read_bytes(), {"token_embd": "embed.tokens", "attn_q": "self_attn.q", "ffn_down": "ffn.down"}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight"):
        stored = file.infos[name]
        for bad in (math.nan, math.inf):
            dtype = stored.ggml_type.dtype or torch.float16
            number = torch.tensor([bad], dtype=dtype).view(torch.uint8).numpy().tobytes()
            last = stored.ggml_type.type_size if stored.ggml_type.dtype is None else len(number)
            at = stored.offset + stored.num_bytes - last
            path.write_bytes(raw[:at] + number + raw[at + len(number) :])
            word = ours.get(name.removesuffix(".weight").split(".")[-1], "self_attn_norm")
            with pytest.raises(BadFile, match=f"{word}.weight {REFUSED}"):
                load(path)


def test_a_gguf_file_with_unaligned_tensors(tmp_path, monkeypatch):
    """An alignment of one byte is valid: such tensors are copied to an aligned address."""
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(gguf, "ALIGNMENT", 1)
    write = gguf.write_gguf
    extra = {"general.alignment": 1}
    monkeypatch.setattr("headwater.families.gguf.write_gguf", lambda p, meta, *rest: write(p, {**meta, **extra}, *rest))
    file = gguf_file(path, "F32", monkeypatch)
    assert any(stored.offset % 4 for stored in file.infos.values())
    for name, stored in file.infos.items():
        expected = struct.unpack_from("<f", path.read_bytes(), stored.offset)[0]
        assert file[name].flatten()[0].item() == expected and file[name].data_ptr() % 4 == 0
    load_gguf(path)


def test_a_llama2c_file():
    width, inner, layers, heads, vocab, positions = 8, 16, 1, 2, 10, 4
    count = vocab * width + layers * (2 * width + 4 * width * width + 3 * width * inner) + width + 2 * positions * 2
    head = struct.pack("<7i", width, inner, layers, heads, heads, vocab, positions)
    numbers = torch.randn(count)
    read_llama2c(bytearray(head + numbers.numpy().tobytes()), "file")
    numbers[vocab * width + 3] = math.nan
    with pytest.raises(BadFile, match=f"input_layernorm.weight {REFUSED}"):
        read_llama2c(bytearray(head + numbers.numpy().tobytes()), "file")
