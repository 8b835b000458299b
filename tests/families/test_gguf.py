"""GGUF: a model that is saved and loaded is the same, with its tokenizer; the order of RoPE rows is right."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from tiny_models import tiny

import headwater
from headwater.errors import BadFile, BadSetting, Unavailable
from headwater.families.builders import decoder
from headwater.families.gguf import load_gguf, save_gguf
from headwater.families.hf_folder import LoadedModel
from headwater.families.load import load, save
from headwater.families.registry import FAMILIES
from headwater.quantization.layers import QuantizedLinear
from headwater.text.train import train_tokenizer
from headwater.weights.hf_config import HFConfig

CONFIG = {
    "model_type": "llama", "vocab_size": 0, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat", "天地玄黄 宇宙洪荒"] * 20, "bpe", vocab_size=320)


def llama_model(tokenizer, **changes) -> LoadedModel:
    config = {**CONFIG, "vocab_size": len(tokenizer), **changes}
    spec = FAMILIES[config["model_type"]].read_spec(HFConfig(dict(config)), "language")
    model = spec.build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    return LoadedModel(model, tokenizer, config, Path("made"), "language")


VARIANTS = [
    {},
    {"tie_word_embeddings": False, "head_dim": 32},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 16},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=json.dumps)
@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-6), ("F16", 5e-2), ("Q8_0", 0.3)])
def test_written_and_read_is_the_same_model(tokenizer, tmp_path, changes, kind, limit):
    loaded = llama_model(tokenizer, **changes)
    save_gguf(loaded, tmp_path / "m.gguf", kind)
    again = load_gguf(tmp_path / "m.gguf")
    ids = torch.randint(0, len(tokenizer), (2, 9))
    with torch.no_grad():
        one, two = loaded.model(ids), again.model(ids)
    assert (one - two).abs().max() < limit
    assert again.tokenizer.encode("the cat 玄") == tokenizer.encode("the cat 玄")
    assert (kind == "Q8_0") == isinstance(again.model.decoder.layers[0].self_attn.q, QuantizedLinear)


def test_the_public_package_reads_our_files(tokenizer, tmp_path):
    loaded = llama_model(tokenizer)
    assert save(loaded, tmp_path / "m.gguf") == tmp_path / "m.gguf"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert {"token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"} <= {t.name for t in reader.tensors}


def test_the_order_of_rotary_rows_matters_and_is_right(tokenizer, tmp_path):
    """Planted fault: a file with q and k rows in two halves instead of interleaved pairs is another model."""
    from headwater.families import gguf as family_gguf

    loaded = llama_model(tokenizer)
    names = family_gguf.GGUF_ARCHITECTURES["llama"]
    wrong = {
        **family_gguf.GGUF_ARCHITECTURES,
        "llama": family_gguf.GgufArchitecture("llama", family_gguf.HALVES_ROPE_NAMES),
    }
    try:
        family_gguf.GGUF_ARCHITECTURES.update(wrong)
        save_gguf(loaded, tmp_path / "wrong.gguf", "F32")
    finally:
        family_gguf.GGUF_ARCHITECTURES["llama"] = names
    ids = torch.randint(0, len(tokenizer), (2, 9))
    with torch.no_grad():
        assert (load_gguf(tmp_path / "wrong.gguf").model(ids) - loaded.model(ids)).abs().max() > 0.05


def test_generation_with_quantized_blocks(tokenizer, tmp_path):
    loaded = llama_model(tokenizer)
    save_gguf(loaded, tmp_path / "m.gguf", "Q8_0")
    answer = headwater.generate(load(tmp_path / "m.gguf"), "the cat", max_tokens=5)
    assert len(answer.ids) <= 5


def test_faults(tokenizer, tmp_path):
    save_gguf(llama_model(tokenizer), tmp_path / "m.gguf")
    with pytest.raises(BadFile, match="it must be a new file"):
        save_gguf(llama_model(tokenizer), tmp_path / "m.gguf")
    message = (
        "a GGUF file can hold only llama, qwen2, qwen3 language models: llama has decoder as stacks, this model has enc"
    )
    with pytest.raises(BadSetting, match=message):
        save_gguf(
            LoadedModel(tiny("bert").model, tokenizer, {"model_type": "bert"}, tmp_path, "language"), tmp_path / "b"
        )
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "odd.gguf").write_bytes(raw.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lluma", 1))
    with pytest.raises(BadFile, match="architecture 'lluma' is not supported; did you mean 'llama'"):
        load_gguf(tmp_path / "odd.gguf")
    (tmp_path / "short.gguf").write_bytes(raw[:-4000])
    with pytest.raises(BadFile, match="cut short"):
        load_gguf(tmp_path / "short.gguf")


# -------------------------------------------------------------------------------------------------- native models

LLAMA = {"norm_position": "pre", "norm": "rms", "gated": True, "activation": "silu", "bias": False,
         "position": "rotary", "d_model": 32, "heads": 4, "kv_heads": 2, "layers": 2, "d_ff": 48}  # fmt: skip


def native_model(tokenizer, **changes) -> LoadedModel:
    """A decoder in the native layout, as after training: its config.json names no family."""
    model = decoder(len(tokenizer), **LLAMA | changes).build(seed=0).eval()
    return LoadedModel(
        model, tokenizer, {"model_type": "headwater", "metadata": {"task": "language-model"}}, Path("run")
    )


def test_a_native_decoder_is_saved_as_llama(tokenizer, tmp_path):
    loaded = native_model(tokenizer)
    save_gguf(loaded, tmp_path / "m.gguf", "F32")
    again, rows = load_gguf(tmp_path / "m.gguf"), torch.randint(0, len(tokenizer), (2, 9))
    with torch.no_grad():
        assert (again.model(rows) - loaded.model(rows)).abs().max() < 2e-5
    for text in ("the cat sat", "宇宙 玄黄, 12\n"):
        assert again.tokenizer.encode(text) == tokenizer.encode(text)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    assert (fields["llama.block_count"], fields["llama.embedding_length"], fields["llama.feed_forward_length"]) == (
        2,
        32,
        48,
    )
    assert (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]) == (4, 2)
    assert fields["tokenizer.ggml.tokens"][:3] == ["<pad>", "<bos>", "<eos>"]
    assert len(fields["tokenizer.ggml.tokens"]) == len(tokenizer) == fields["llama.vocab_size"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "layer"}, "has RMSNorm.* this model has LayerNorm"),
        ({"position": "alibi"}, "has Rotary.* this model has Alibi"),
        ({"activation": "gelu"}, "has 'silu' as decoder.layers.ffn.layer.activation, this model has 'gelu'"),
        ({"bias": True}, "a GGUF file of llama cannot hold all tensors of this model, such as biases"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_settings_without_a_gguf_key_are_refused(tokenizer, tmp_path, changes, message):
    """transformers' llama has the last two settings; the GGUF architecture llama has neither."""
    with pytest.raises(BadSetting, match=message):
        save_gguf(native_model(tokenizer, **changes), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["unigram", "char"])
def test_tokenizers_that_gguf_cannot_hold_are_refused(tmp_path, kind):
    learned = train_tokenizer(["the cat sat on the mat"] * 20, kind)
    with pytest.raises(Unavailable, match="only byte-level BPE tokenizers .* save the model as a folder"):
        save_gguf(native_model(learned), tmp_path / "m.gguf")
    with pytest.raises(BadSetting, match="holds the model's tokenizer, this model has none"):
        save_gguf(LoadedModel(native_model(learned).model, None, {}, tmp_path), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.head_count", [4, 4], r"llama.attention.head_count must be a number, got '\[4, 4\]'"),
        ("llama.attention.head_count", "four", "llama.attention.head_count must be a number, got 'four'"),
        ("llama.embedding_length", "64", "llama.embedding_length must be a number, got '64'"),
        ("llama.rope.dimension_count", [16], r"llama.rope.dimension_count must be a number, got '\[16\]'"),
        ("tokenizer.ggml.eos_token_id", "end", "tokenizer.ggml.eos_token_id must be a number, got 'end'"),
    ],
)
def test_a_setting_that_is_not_a_number_is_refused(tokenizer, tmp_path, monkeypatch, key, value, message):
    from headwater.families import gguf as family_gguf

    real = family_gguf.tokenizer_to_gguf
    monkeypatch.setattr(family_gguf, "tokenizer_to_gguf", lambda tokenizer: {**real(tokenizer), key: value})
    monkeypatch.setattr(family_gguf, "_check_written", lambda *args: None)  # it would reject the file
    save_gguf(llama_model(tokenizer), tmp_path / "m.gguf", "F32")
    with pytest.raises(BadFile, match=message) as caught:
        load_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
