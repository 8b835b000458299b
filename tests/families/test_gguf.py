"""GGUF in and out: what is written reads back as the same model, with its tokenizer; the rotary order is right."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from tiny_models import tiny

import headwater
from headwater.core import decoder
from headwater.errors import BadFile, BadSetting, Unavailable
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


def made(tokenizer, **changes) -> LoadedModel:
    config = {**CONFIG, "vocab_size": len(tokenizer), **changes}
    spec = FAMILIES[config["model_type"]].read_spec(HFConfig(dict(config)), "language")
    model = spec.build(seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
    return LoadedModel(model, tokenizer, config, Path("made"), "language")


KIN = [
    {},
    {"tie_word_embeddings": False, "head_dim": 32},
    {"model_type": "qwen2"},
    {"model_type": "qwen3", "head_dim": 16},
]


@pytest.mark.parametrize("changes", KIN, ids=json.dumps)
@pytest.mark.parametrize(("kind", "limit"), [("F32", 1e-6), ("F16", 5e-2), ("Q8_0", 0.3)])
def test_written_and_read_is_the_same_model(tokenizer, tmp_path, changes, kind, limit):
    loaded = made(tokenizer, **changes)
    save_gguf(loaded, tmp_path / "m.gguf", kind)
    again = load_gguf(tmp_path / "m.gguf")
    ids = torch.randint(0, len(tokenizer), (2, 9))
    with torch.no_grad():
        one, two = loaded.model(ids), again.model(ids)
    assert (one - two).abs().max() < limit
    assert again.tokenizer.encode("the cat 玄") == tokenizer.encode("the cat 玄")
    assert (kind == "Q8_0") == isinstance(again.model.decoder.layers[0].self_attn.q, QuantizedLinear)


def test_the_public_reader_finds_what_we_wrote(tokenizer, tmp_path):
    loaded = made(tokenizer)
    assert save(loaded, tmp_path / "m.gguf") == tmp_path / "m.gguf"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    assert {"token_embd.weight", "blk.1.ffn_down.weight", "output_norm.weight"} <= {t.name for t in reader.tensors}


def test_the_order_of_rotary_rows_matters_and_is_right(tokenizer, tmp_path):
    """A file whose q and k rows are in our order instead of GGUF's reads as another model: the law would see it."""
    from headwater.families import gguf as family_gguf

    loaded = made(tokenizer)
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


def test_generation_uses_the_blocks_as_they_are(tokenizer, tmp_path):
    loaded = made(tokenizer)
    save_gguf(loaded, tmp_path / "m.gguf", "Q8_0")
    answer = headwater.generate(load(tmp_path / "m.gguf"), "the cat", max_tokens=5)
    assert len(answer.ids) <= 5


def test_faults(tokenizer, tmp_path):
    save_gguf(made(tokenizer), tmp_path / "m.gguf")
    with pytest.raises(BadFile, match="it must be a new file"):
        save_gguf(made(tokenizer), tmp_path / "m.gguf")
    said = (
        "a GGUF file can hold only llama, qwen2, qwen3 language models: llama has decoder as stacks, this model has enc"
    )
    with pytest.raises(BadSetting, match=said):
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


# -------------------------------------------------------------------------------------------- models made of parts here

LLAMA = {"norm_position": "pre", "norm": "rms", "gated": True, "activation": "silu", "bias": False,
         "position": "rotary", "d_model": 32, "heads": 4, "kv_heads": 2, "layers": 2, "d_ff": 48}  # fmt: skip


def own(tokenizer, **changes) -> LoadedModel:
    """A decoder in our own layout, as training leaves it: its config.json names no family."""
    model = decoder(len(tokenizer), **LLAMA | changes).build(seed=0).eval()
    return LoadedModel(model, tokenizer, {"model_type": "headwater", "about": {"task": "language-model"}}, Path("run"))


def test_a_decoder_of_our_own_is_written_as_llama(tokenizer, tmp_path):
    loaded = own(tokenizer)
    save_gguf(loaded, tmp_path / "m.gguf", "F32")
    again, rows = load_gguf(tmp_path / "m.gguf"), torch.randint(0, len(tokenizer), (2, 9))
    with torch.no_grad():
        assert (again.model(rows) - loaded.model(rows)).abs().max() < 2e-5
    for text in ("the cat sat", "宇宙 玄黄, 12\n"):
        assert again.tokenizer.encode(text) == tokenizer.encode(text)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    said = {name: field.contents() for name, field in reader.fields.items()}
    assert said["general.architecture"] == "llama"
    assert (said["llama.block_count"], said["llama.embedding_length"], said["llama.feed_forward_length"]) == (2, 32, 48)
    assert (said["llama.attention.head_count"], said["llama.attention.head_count_kv"]) == (4, 2)
    assert said["tokenizer.ggml.tokens"][:3] == ["<pad>", "<bos>", "<eos>"]
    assert len(said["tokenizer.ggml.tokens"]) == len(tokenizer) == said["llama.vocab_size"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm": "layer"}, "has RMSNorm.* this model has LayerNorm"),
        ({"position": "alibi"}, "has Rotary.* this model has Alibi"),
        ({"activation": "gelu"}, "has 'silu' as decoder.layers.ffn.layer.activation, this model has 'gelu'"),
        ({"bias": True}, "a GGUF file of llama cannot hold all tensors of this model, such as biases"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_what_gguf_has_no_word_for_is_refused(tokenizer, tmp_path, changes, said):
    """The last two are models of transformers' llama; a GGUF file of the architecture llama has neither setting."""
    with pytest.raises(BadSetting, match=said):
        save_gguf(own(tokenizer, **changes), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["unigram", "char"])
def test_tokenizers_that_gguf_cannot_hold_are_refused(tmp_path, kind):
    learned = train_tokenizer(["the cat sat on the mat"] * 20, kind)
    with pytest.raises(Unavailable, match="only byte-level BPE tokenizers .* save the model as a folder"):
        save_gguf(own(learned), tmp_path / "m.gguf")
    with pytest.raises(BadSetting, match="holds the model's tokenizer, this model has none"):
        save_gguf(LoadedModel(own(learned).model, None, {}, tmp_path), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.head_count", [4, 4], r"llama.attention.head_count must be a number, got '\[4, 4\]'"),
        ("llama.attention.head_count", "four", "llama.attention.head_count must be a number, got 'four'"),
        ("llama.embedding_length", "64", "llama.embedding_length must be a number, got '64'"),
        ("llama.rope.dimension_count", [16], r"llama.rope.dimension_count must be a number, got '\[16\]'"),
        ("tokenizer.ggml.eos_token_id", "end", "tokenizer.ggml.eos_token_id must be a number, got 'end'"),
    ],
)
def test_a_setting_that_is_no_number_is_refused_in_one_line(tokenizer, tmp_path, monkeypatch, key, value, said):
    from headwater.families import gguf as family_gguf

    real = family_gguf.tokenizer_to_gguf
    monkeypatch.setattr(family_gguf, "tokenizer_to_gguf", lambda given: {**real(given), key: value})
    monkeypatch.setattr(family_gguf, "_check_written", lambda *given: None)  # it would not be written else
    save_gguf(made(tokenizer), tmp_path / "m.gguf", "F32")
    with pytest.raises(BadFile, match=said) as caught:
        load_gguf(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)
