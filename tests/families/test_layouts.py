"""Layouts of valid checkpoints: half precision, shards, old names, no prefix, old settings; and tied weights."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import ALL_CONFIGS, forward, ids, make, reconfigure, rewrite, tensors, tiny

import headwater
from headwater.families.hf_folder import save_hf_folder
from headwater.inspection.inputs import resolve_spec
from headwater.variants.rope_scaling import Llama3Scaling
from headwater.weights.shards import save_weights


def load_and_forward(folder):
    return forward(headwater.load(folder).model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_other_dtypes_become_float32(family, dtype, tmp_path):
    folder = make(tmp_path / "m", family)
    rewrite(folder, lambda weights: {name: tensor.to(dtype) for name, tensor in weights.items()})
    half = headwater.load(folder).model
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    rewrite(folder, lambda weights: {name: tensor.to(torch.float32) for name, tensor in weights.items()})
    assert torch.equal(forward(half), load_and_forward(folder))


@pytest.mark.parametrize("family", ["llama", "t5", "bart"])
def test_shards_equal_a_single_file(family, tmp_path):
    folder = make(tmp_path / "m", family)
    before = load_and_forward(folder)
    paths = save_weights(folder, tensors(folder), max_shard_size=4000)
    assert len(paths) > 3
    assert not (folder / "model.safetensors").exists()
    assert torch.equal(load_and_forward(folder), before)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("gpt2", "transformer."), ("bert", "bert."), ("llama", "model."), ("bart", "model."), ("gpt_neox", "gpt_neox.")],
)
def test_the_prefix_may_be_absent(family, prefix, tmp_path):
    """The published GPT-2 has no prefix, and neither has a body saved without its head."""
    folder = make(tmp_path / "m", family)
    before = load_and_forward(folder)
    rewrite(folder, lambda weights: {name.removeprefix(prefix): tensor for name, tensor in weights.items()})
    assert not any(name.startswith(prefix) for name in tensors(folder))
    assert torch.equal(load_and_forward(folder), before)


def test_old_names_of_norms(tmp_path):
    folder = make(tmp_path / "m", "bert")
    before = load_and_forward(folder)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def old_name(name):
        return next((name.removesuffix(new) + was for new, was in old.items() if name.endswith(new)), name)

    rewrite(folder, lambda weights: {old_name(name): tensor for name, tensor in weights.items()})
    assert any(name.endswith("gamma") for name in tensors(folder))
    assert torch.equal(load_and_forward(folder), before)


def test_buffers_of_old_files_are_ignored(tmp_path):
    folder = make(tmp_path / "m", "gpt2")
    before = load_and_forward(folder)

    def stored(weights):
        for i in range(2):
            weights[f"transformer.h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
            weights[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-1e4)

    rewrite(folder, stored)
    assert torch.equal(load_and_forward(folder), before)


ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "rope_settings",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **ROPE}},
    ],
    ids=["rope_scaling", "its older key", "rope_parameters"],
)
def test_both_generations_of_rope_settings(rope_settings, tmp_path):
    folder = make(tmp_path / "m", "llama", **rope_settings)
    loaded = headwater.load(folder)
    rotary = loaded.spec.decoder.layers[0].branches[0].layer.position
    assert rotary.theta == 5e5
    assert rotary.scaling == Llama3Scaling(8.0, 1.0, 4.0, 16)
    assert torch.equal(
        forward(loaded.model), forward(tiny("llama", rope_theta=5e5, rope_scaling=llama3_scaling()).model)
    )


def llama3_scaling():
    return {"rope_type": "llama3", **ROPE}


# --------------------------------------------------------------------------------------------------------------- ties


def test_tied_tables_stored_twice_and_different_are_both_kept(tmp_path):
    """config.json declares tied weights, but the tensors differ: the tensors decide."""
    folder = make(tmp_path / "m", "llama", tie_word_embeddings=True)
    other = torch.randn(47, 16)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": other}))
    model = headwater.load(folder).model
    assert torch.equal(model.head.out.weight, other)
    assert not torch.equal(model.decoder.embed.tokens.weight, other)


def test_tied_tables_stored_twice_and_equal_are_one(tmp_path):
    folder = make(tmp_path / "m", "llama", tie_word_embeddings=False)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    model = headwater.load(folder).model
    assert model.head.out.weight is model.decoder.embed.tokens.weight


@pytest.mark.parametrize("lost", ["lm_head.weight", "model.embed_tokens.weight"])
def test_the_one_table_in_the_file_serves_both(lost, tmp_path):
    folder = make(tmp_path / "m", "llama", tie_word_embeddings=False)
    rewrite(folder, lambda weights: {name: tensor for name, tensor in weights.items() if name != lost})
    model = headwater.load(folder).model
    assert model.head.out.weight is model.decoder.embed.tokens.weight


def untied_t5(folder, *names):
    """A T5 whose embedding tables all differ, stored only under these names."""
    make(folder, "t5", tie_word_embeddings=False)
    draw = {name: torch.randn(47, 16) for name in ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")}

    def stored(weights):
        weights.pop("shared.weight", None)
        weights.update({f"{name}.weight": draw[name] for name in names})

    rewrite(folder, stored)
    model = headwater.load(folder).model
    result = (model.encoder.embed.tokens.weight, model.decoder.embed.tokens.weight, model.head.out.weight)
    return draw, result


def test_t5_without_shared_keeps_three_tables(tmp_path):
    """A known bug elsewhere: an input embedding silently replaced by the output projection."""
    draw, result = untied_t5(tmp_path / "m", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    assert [torch.equal(table, kept) for table, kept in zip(draw.values(), result, strict=True)] == [True] * 3


def test_t5_with_one_input_table_and_an_output(tmp_path):
    for name in ("encoder.embed_tokens", "decoder.embed_tokens"):
        draw, result = untied_t5(tmp_path / name, name, "lm_head")
        assert torch.equal(result[0], draw[name])
        assert result[1] is result[0]
        assert torch.equal(result[2], draw["lm_head"])


def test_saved_models_keep_separate_tables(tmp_path):
    untied_t5(tmp_path / "m", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    loaded = headwater.load(tmp_path / "m")
    save_hf_folder(loaded, tmp_path / "again")
    assert {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"} <= set(
        tensors(tmp_path / "again")
    )
    assert torch.equal(load_and_forward(tmp_path / "again"), forward(loaded.model))


# --------------------------------------------------------------------------------------------------------- every family


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_saved_and_loaded_is_the_same(family, tmp_path):
    original = tiny(family)
    folder = save_hf_folder(original, tmp_path / "m")
    assert torch.equal(load_and_forward(folder), forward(original.model))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize("family", ALL_CONFIGS)
def test_config_json_alone_determines_the_spec(family, tmp_path):
    """`headwater show` needs no weights."""
    original = tiny(family)
    (tmp_path / "config.json").write_text(json.dumps(original.config))
    spec = resolve_spec(str(tmp_path))
    assert sum(p.numel() for p in spec.on_meta().parameters()) == sum(p.numel() for p in original.model.parameters())


def test_a_folder_is_not_overwritten(tmp_path):
    folder = make(tmp_path / "m", "bert")
    with pytest.raises(headwater.BadFile, match="must be a new or empty folder"):
        make(folder, "bert")


def test_a_changed_tensor_is_seen_after_saving(tmp_path, monkeypatch):
    """Planted fault: the weights change while they are saved."""
    from headwater.families import hf_folder as module

    original = tiny("bert")
    honest = module.save_weights
    monkeypatch.setattr(
        module, "save_weights", lambda where, weights: honest(where, {n: t * 1.01 for n, t in weights.items()})
    )
    with pytest.raises(headwater.BadFile, match="changed when it was written and read back"):
        save_hf_folder(original, tmp_path / "m")


def test_heads_can_be_chosen(tmp_path):
    folder = make(tmp_path / "m", "bert", architectures=["BertForPreTraining"])
    both = forward(headwater.load(folder).model)
    assert torch.equal(forward(headwater.load(folder, head="language").model), both["language"])
    assert headwater.load(folder, head="hidden_states").model(ids()).shape == (2, 9, 16)
    with pytest.raises(headwater.BadSetting, match="bert has no head 'langage'; did you mean 'language'"):
        headwater.load(folder, head="langage")
    reconfigure(folder, architectures=["Unheard"])
    assert headwater.load(folder).head == "language"


def test_separate_vocabularies_are_not_tied(tmp_path):
    """The output projection is tied to the decoder's embedding, although the encoder's has the same shape."""
    original = tiny("marian", share_encoder_decoder_embeddings=False)
    folder = save_hf_folder(original, tmp_path / "m")
    model = headwater.load(folder).model
    assert model.head.out.weight is model.decoder.embed.tokens.weight
    assert model.head.out.weight is not model.encoder.embed.tokens.weight
    assert torch.equal(forward(model), forward(original.model))
