"""A NaN or an infinity in a weight is refused by name, whatever kind of file it lies in and however it is stored."""

from __future__ import annotations

import math
import struct

import gguf
import pytest
import torch

import headwater
from headwater.errors import BadFile
from headwater.families.gguf import load_gguf, save_gguf
from headwater.families.loading import load
from headwater.fast.packed import pack
from headwater.weights import gguf_write
from headwater.weights.finite import SCALES, check_scales, is_finite
from headwater.weights.gguf import GgufFile
from headwater.weights.gguf_blocks import BY_NAME, unpacked
from headwater.weights.llama2c import read as read_llama2c
from headwater.weights.native import load_model, save_model, tensors_of
from headwater.weights.shards import open_folder, write_folder

BAD = [math.nan, math.inf, -math.inf]
REFUSED = "holds NaN or infinity; the file is damaged or was saved from a broken run"
HALVES = {"Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}  # where scales lie in a block
HALVES |= {name: tuple(range(0, 2 * count, 2)) for name, count in SCALES.items()}


def small():
    return headwater.decoder(40, d_model=32, heads=2, layers=2, d_ff=64).build(seed=0).eval()


@pytest.mark.parametrize("bad", BAD)
def test_a_native_folder(bad: float, tmp_path):
    for path in tensors_of(small()):
        model = small()
        tensor = model.get_parameter(path).detach()
        tensor.view(-1)[tensor.numel() // 2] = bad
        save_model(tmp_path, model, {})
        with pytest.raises(BadFile, match=f"{path} {REFUSED}"):
            load_model(tmp_path)
    save_model(tmp_path, small(), {})
    load_model(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_native_folder_of_other_dtypes(dtype: torch.dtype, tmp_path):
    save_model(tmp_path, small(), {})
    tensors = {name: t.to(dtype) for name, t in open_folder(tmp_path).items()}
    write_folder(tmp_path, tensors)
    load_model(tmp_path)
    tensors["decoder.layers.1.ffn.up.weight"][3, 4] = 1e300 if dtype == torch.float64 else math.inf
    write_folder(tmp_path, tensors)
    with pytest.raises(BadFile, match=f"decoder.layers.1.ffn.up.weight {REFUSED}"):
        load_model(tmp_path)


def test_a_native_folder_of_whole_numbers_is_another_models(tmp_path):
    save_model(tmp_path, small(), {})
    tensors = dict(open_folder(tmp_path))
    tensors["decoder.layers.1.ffn.up.weight"] = tensors["decoder.layers.1.ffn.up.weight"].long()
    write_folder(tmp_path, tensors)
    with pytest.raises(BadFile, match=r"ffn.up.weight must be floating point, it is torch.int64"):
        load_model(tmp_path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_a_packed_native_folder(bits: str, bad: float, tmp_path):
    for path in ("head.out", "decoder.layers.1.self_attn.q", "decoder.layers.0.ffn.down"):
        model = small()
        pack(model, bits)
        save_model(tmp_path, model, {})
        load_model(tmp_path)
        scale = model.get_submodule(path).blocks.view(torch.float16)
        scale[-1, 0] = bad
        save_model(tmp_path, model, {})
        with pytest.raises(BadFile, match=f"blocks {REFUSED}"):
            load_model(tmp_path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", HALVES)
def test_scales_decide_for_every_kind_of_block(name: str, bad: float):
    """Blocks whose scales are finite widen to finite weights; one bad scale makes weights that are none."""
    kind = BY_NAME[name]
    blocks = torch.randint(0, 256, (3, 4 * kind.size), dtype=torch.uint8)
    halves = blocks.view(12, kind.size).view(torch.float16)
    for at in HALVES[name]:
        halves[:, at // 2] = 65504.0  # the largest there is
    assert is_finite(unpacked(blocks, kind))
    if name in SCALES:
        check_scales(blocks, kind, "w", "file")
    for at in HALVES[name]:
        spoilt = blocks.clone()
        spoilt.view(12, kind.size).view(torch.float16)[7, at // 2] = bad
        assert not is_finite(unpacked(spoilt, kind))
        if name in SCALES:
            with pytest.raises(BadFile, match=f"file: w {REFUSED}"):
                check_scales(spoilt, kind, "w", "file")


def test_a_sum_that_overflows_is_looked_at_again():
    assert is_finite(torch.full((64,), 3e38)) and not is_finite(torch.tensor([3e38, math.inf]))
    assert (
        is_finite(torch.full((64,), 65504.0).half()) and is_finite(torch.empty(0)) and is_finite(torch.ones(3).long())
    )


# --------------------------------------------------------------------------------------------------------------- GGUF


def gguf_file(path, kind: str, monkeypatch) -> GgufFile:
    """A tiny LLaMA, all of its matrices stored as `kind`."""
    from headwater.data.learn import learn
    from headwater.families.family import FAMILIES
    from headwater.families.folder import Loaded
    from headwater.weights.settings import Settings

    tokenizer = learn(["the cat sat on the mat"] * 20, "bpe", vocab=280)
    config = {
        "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    model = FAMILIES["llama"].read(Settings(dict(config)), "language").build(seed=0).eval()

    def packed(tensor, stored):
        if stored.dtype is not None:
            return tensor.to(stored.dtype)
        made = gguf.quants.quantize(tensor.detach().float().numpy(), gguf.GGMLQuantizationType[stored.name])
        return torch.from_numpy(made)

    monkeypatch.setattr(gguf_write, "_kind_of", lambda shape, _: BY_NAME[kind if shape.dim() > 1 else "F32"])
    monkeypatch.setattr(gguf_write, "_packed", packed)
    save_gguf(Loaded(model, tokenizer, config, path, "language"), path)
    return GgufFile(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_a_gguf_file(kind: str, tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    file = gguf_file(path, kind, monkeypatch)
    load_gguf(path)
    raw, ours = path.read_bytes(), {"token_embd": "embed.tokens", "attn_q": "self_attn.q", "ffn_down": "ffn.down"}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.attn_norm.weight"):
        stored = file.stored[name]
        for bad in (math.nan, math.inf):
            dtype = stored.kind.dtype or torch.float16
            number = torch.tensor([bad], dtype=dtype).view(torch.uint8).numpy().tobytes()
            at = stored.begin + stored.size - (stored.kind.size if stored.kind.dtype is None else len(number))
            path.write_bytes(raw[:at] + number + raw[at + len(number) :])
            word = ours.get(name.removesuffix(".weight").split(".")[-1], "self_attn_norm")
            with pytest.raises(BadFile, match=f"{word}.weight {REFUSED}"):
                load(path)


def test_a_gguf_file_whose_tensors_lie_anywhere(tmp_path, monkeypatch):
    """An alignment of one byte is legal: numbers are then copied to where the processor can read them."""
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(gguf_write, "ALIGN", 1)
    write = gguf_write.write_gguf
    told = {"general.alignment": 1}
    monkeypatch.setattr("headwater.families.gguf.write_gguf", lambda p, meta, *rest: write(p, {**meta, **told}, *rest))
    file = gguf_file(path, "F32", monkeypatch)
    assert any(stored.begin % 4 for stored in file.stored.values())
    for name, stored in file.stored.items():
        want = struct.unpack_from("<f", path.read_bytes(), stored.begin)[0]
        assert file[name].flatten()[0].item() == want and file[name].data_ptr() % 4 == 0
    load_gguf(path)


def test_a_llama2c_file():
    width, inner, layers, heads, vocab, places = 8, 16, 1, 2, 10, 4
    count = vocab * width + layers * (2 * width + 4 * width * width + 3 * width * inner) + width + 2 * places * 2
    head = struct.pack("<7i", width, inner, layers, heads, heads, vocab, places)
    numbers = torch.randn(count)
    read_llama2c(bytearray(head + numbers.numpy().tobytes()), "file")
    numbers[vocab * width + 3] = math.nan
    with pytest.raises(BadFile, match=f"input_layernorm.weight {REFUSED}"):
        read_llama2c(bytearray(head + numbers.numpy().tobytes()), "file")
