"""LoRA adapters as GGUF: there and back, the permuted rows of q and k, the command, and llama.cpp's own logits."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from tiny_models import tiny

from headwater import load, load_adapter, save_adapter, tune
from headwater.cli import main
from headwater.errors import BadFile, BadSetting
from headwater.families.gguf import save_gguf
from headwater.families.hf_folder import LoadedModel
from headwater.quantization.layers import quantize
from headwater.text.train import train_tokenizer
from headwater.tuning import DoRA, LoRA, RsLoRA, merge
from headwater.weights.gguf import GgufFile, write_gguf

IDS = torch.tensor([[5, 9, 3, 17, 8]])
ALL = LoRA(r=3, target=("*.self_attn.*", "*.ffn.up"))


def tiny_gguf(folder, tied):
    """A tiny LLaMA as a GGUF file, with grouped keys and values."""
    tokenizer = train_tokenizer(["the cat sat on the mat"] * 20, "bpe", vocab_size=300)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    loaded = tiny("llama", vocab_size=len(tokenizer), rms_norm_eps=1e-5, tie_word_embeddings=tied, **sizes)
    loaded = LoadedModel(loaded.model, tokenizer, loaded.config, loaded.path, "language")
    return save_gguf(loaded, folder / "base.gguf", "F32")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("base"), tied=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return tiny_gguf(tmp_path_factory.mktemp("untied"), tied=False)


def tuned(base, random_weights, *methods):
    loaded = tune(load(base), *methods)
    random_weights(loaded.model)
    return loaded


@torch.no_grad()
def test_there_and_back(base, tmp_path, random_weights):
    loaded = tuned(base, random_weights, LoRA(r=3, alpha=5, target="*.self_attn.*"), RsLoRA(r=2, target="*.ffn.*"))
    save_adapter(loaded, tmp_path / "a.gguf", layout="gguf")
    back = load_adapter(load(base), tmp_path / "a.gguf")
    assert torch.allclose(back.model(IDS), loaded.model(IDS), atol=1e-5)
    assert not torch.allclose(back.model(IDS), load(base).model(IDS), atol=0.1)

    file = GgufFile(tmp_path / "a.gguf")
    assert file.metadata["general.type"] == "adapter" and file.metadata["adapter.lora.alpha"] == 5
    change = loaded.model.decoder.layers[0].self_attn.k.changes["default"]
    rows = change.lora_b.view(2, 2, 8, 3).transpose(1, 2).reshape(32, 3)  # halves of each head to pairs
    assert torch.equal(file["blk.0.attn_k.weight.lora_b"], rows)
    assert torch.equal(file["blk.0.attn_k.weight.lora_a"], change.lora_a)


@torch.no_grad()
def test_a_table_of_tokens_there_and_back(base, untied, tmp_path, random_weights):
    """A is transposed in the file, whose rows llama.cpp looks up. Where output and table are tied it has one name."""
    loaded = tuned(untied, random_weights, LoRA(r=3, target="*.embed.tokens"))
    save_adapter(loaded, tmp_path / "a.gguf", layout="gguf")
    change = loaded.model.decoder.embed.tokens.changes["default"]
    assert torch.equal(GgufFile(tmp_path / "a.gguf")["token_embd.weight.lora_a"], change.lora_a.t())
    back = load_adapter(load(untied), tmp_path / "a.gguf")
    assert torch.allclose(back.model(IDS), loaded.model(IDS), atol=1e-5)
    with pytest.raises(BadSetting, match="cannot change an output layer and an embedding that are tied; merge it"):
        save_adapter(tuned(base, random_weights, LoRA(r=2, target="*.embed.tokens")), tmp_path / "b", layout="gguf")


def test_what_does_not_fit_is_refused(base, tmp_path, random_weights):
    for method in (DoRA(r=2), LoRA(r=2, target="head.out")):
        with pytest.raises(BadSetting, match="a GGUF adapter"):
            save_adapter(tuned(base, random_weights, method), tmp_path / "a.gguf", layout="gguf")
    with pytest.raises(BadSetting, match="needs a llama, qwen2, qwen3 language model"):
        save_adapter(tune(tiny("gpt2"), LoRA(r=2)), tmp_path / "a.gguf", layout="gguf")

    save_adapter(tuned(base, random_weights, ALL), tmp_path / "a.gguf", layout="gguf")
    with pytest.raises(BadFile, match="must be a new file"):
        save_adapter(tuned(base, random_weights, ALL), tmp_path / "a.gguf", layout="gguf")
    with pytest.raises(BadFile, match="the adapter does not fit this model"):
        load_adapter(tiny("llama"), tmp_path / "a.gguf")
    file = GgufFile(tmp_path / "a.gguf")
    whole = {name: file[name].clone() for name in file}
    first = next(iter(whole))
    for tensors, metadata, words in (
        ({name: t for name, t in whole.items() if name != first}, {}, "must have A"),
        (whole | {"x.bias": torch.zeros(2)}, {}, "is not known"),
        ({}, {}, "it has no tensors"),
        (whole, {"adapter.lora.alpha": 0.0}, "with an alpha"),
        (whole, {"general.type": "model"}, "it must be a LoRA"),
    ):
        write_gguf(tmp_path / "b.gguf", {**file.metadata, **metadata}, tensors, "F32")
        with pytest.raises(BadFile, match=words):
            load_adapter(load(base), tmp_path / "b.gguf")


def test_the_command(base, tmp_path, random_weights, capsys):
    save_adapter(tuned(base, random_weights, ALL), tmp_path / "peft")
    words = [str(tmp_path / "peft"), str(tmp_path / "a.gguf")]
    assert main(["adapter", "export", *words]) == 0
    assert main(["adapter", "show", words[1]]) == 0
    assert "weights  3,648" in capsys.readouterr().out
    assert main(["adapter", "show", words[0]]) == 0
    assert f"base     {base}" in capsys.readouterr().out
    assert main(["adapter", "merge", words[1], str(tmp_path / "merged.gguf"), "--base", str(base)]) == 0
    assert "10 layers have new weights; merging changed a logit by at most" in capsys.readouterr().out
    with torch.no_grad():
        want = load_adapter(load(base), tmp_path / "peft").model(IDS)
        assert torch.allclose(load(tmp_path / "merged.gguf").model(IDS), want, atol=0.05)  # written in 16 bits
    for wrong, text in (
        (["adapter", "shw", words[0]], "did you mean 'show'"),
        (["adapter", "merge", words[0]], "give NEW"),
        (["adapter", "merge", words[1], str(tmp_path / "m")], "does not name its base; give the base too"),
        (["adapter", "show", str(base.parent)], "has no adapter"),
    ):
        assert main(wrong) > 0
        assert text in capsys.readouterr().err


@torch.no_grad()
def test_merging_into_packed_weights_says_how_far_they_moved(base, random_weights):
    loaded = load(base)
    quantize(loaded.model, "int4", ["decoder.*"])
    tune(loaded, ALL)
    random_weights(loaded.model)
    want = loaded.model(IDS)
    merged = merge(loaded.model)
    assert merged.largest_change < 1e-4  # float32 in place of 4 bits: nothing is rounded away
    assert torch.allclose(loaded.model(IDS), want, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- llama.cpp


def llama_cpp_logits(path, lora=None):
    """HEADWATER_LLAMA_CPP names a folder with llama-cpp-python, if it is not installed."""
    if folder := os.environ.get("HEADWATER_LLAMA_CPP"):
        sys.path.append(folder)
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model = llama_cpp.Llama(str(path), lora_path=lora and str(lora), n_ctx=64, logits_all=True, verbose=False)
    model.eval(IDS[0].tolist())
    return torch.from_numpy(model.scores[: IDS.shape[1]].copy())


def assert_equal_logits(got, want):
    assert (got - want).abs().max() < 2e-2 * want.abs().max()  # llama.cpp rounds activations


@pytest.mark.slow
@torch.no_grad()
def test_llama_cpp_gives_the_same_logits(base, tmp_path, random_weights):
    """With the adapter beside the base, and merged into it in 32 and 16 bits."""
    loaded = tuned(base, random_weights, ALL)
    want = loaded.model(IDS)[0]
    save_adapter(loaded, tmp_path / "a.gguf", layout="gguf")
    got = llama_cpp_logits(base, tmp_path / "a.gguf")
    assert_equal_logits(got, want)
    plain = llama_cpp_logits(base)
    assert_equal_logits(plain, load(base).model(IDS)[0])
    assert (plain - got).abs().max() > 0.2 * want.abs().max()

    merge(loaded.model)
    for bits in ("F32", "F16"):
        assert_equal_logits(llama_cpp_logits(save_gguf(loaded, tmp_path / f"{bits}.gguf", bits)), want)


@pytest.mark.slow
@torch.no_grad()
def test_llama_cpp_adapts_the_embedding(untied, tmp_path, random_weights):
    loaded = tuned(untied, random_weights, LoRA(r=3, target=("*.embed.tokens", "*attn.q", "head.out")))
    save_adapter(loaded, tmp_path / "a.gguf", layout="gguf")
    assert_equal_logits(llama_cpp_logits(untied, tmp_path / "a.gguf"), loaded.model(IDS)[0])
