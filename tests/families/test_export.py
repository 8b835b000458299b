"""Export: a model is saved in the layout of a family only where that family's config.json describes it completely."""

from __future__ import annotations

import dataclasses
import json
import warnings

import pytest
import torch
from tiny_models import forward, ids, tensors, tiny

import headwater
from headwater.core import (
    Attention,
    ClassificationHead,
    Embeddings,
    FeedForward,
    LayerNorm,
    MeanPooling,
    Pooled,
    Rotary,
    Sinusoidal,
    SinusoidalHalves,
    TokenClassificationHead,
)
from headwater.families.builders import decoder, encoder, transformer
from headwater.families.config_writers import CONFIG_WRITERS
from headwater.families.convert import convert
from headwater.families.export import FAMILY_ORDER, FamilyMatch, FamilyMismatch, match_family, spec_differences
from headwater.families.gguf import save_gguf
from headwater.families.hf_folder import LoadedModel
from headwater.families.load import save_with_result
from headwater.families.presets import PRESETS, preset
from headwater.families.registry import FAMILIES
from headwater.parts import swap
from headwater.quantization.layers import quantize
from headwater.text.train import train_tokenizer
from headwater.variants.mean_pool_bridge import MeanPoolBridge
from headwater.variants.rope_scaling import PerFrequencyScaling
from headwater.weights.hf_config import HFConfig

SIZES = {"d_model": 16, "heads": 2, "layers": 2, "d_ff": 24}
LLAMA = {
    "norm_position": "pre",
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "bias": False,
    "position": "rotary",
}
PRE = {"norm_position": "pre", "activation": "gelu"}


def read(result: FamilyMatch):
    c = HFConfig(dict(result.config))
    spec = FAMILIES[result.family].read_spec(c, result.head_type)
    c.refuse_unread()
    return spec


EVERY = [(name, head) for name in FAMILY_ORDER for head in FAMILIES[name].head_names]


@pytest.mark.parametrize(("name", "head"), EVERY, ids=" ".join)
def test_a_writer_is_the_inverse_of_its_reader(name, head):
    """config -> spec -> config -> the same spec, of this family or of one before it that has the same models."""
    spec = tiny(name, head).spec
    result = match_family(spec, [name], {"id2label": {0: "a", 1: "b"}} if head == "token_classification" else {})
    assert isinstance(result, FamilyMatch), result
    assert result.family == name and not result.rewrites
    assert spec_differences(read(result), spec) == []
    result = match_family(spec)
    assert isinstance(result, FamilyMatch) and spec_differences(read(result), spec) == []


# Never chosen for a model: other names of a family above, layouts that are not transformers', and the parts of Bark.
NEVER_CHOSEN = {
    "xlm-roberta",
    "camembert",
    "fairseq",
    "fairseq_prenorm",
    "dallebart",
    "semantic",
    "coarse_acoustics",
    "fine_acoustics",
    "bark",
    "musicgen",
    "musicgen_decoder",
}


def test_every_family_of_transformers_is_tried():
    assert set(FAMILY_ORDER) == set(CONFIG_WRITERS) == set(FAMILIES) - NEVER_CHOSEN


def test_two_scores_per_token_are_an_answer_unless_they_have_labels():
    spec = tiny("bert", "question_answering").spec
    labels = {"id2label": {0: "a", 1: "b"}}
    assert match_family(spec, ["bert"]).head_type == "question_answering"
    assert match_family(spec, ["bert"], labels).head_type == "token_classification"
    spec = tiny("led", "question_answering").spec
    assert match_family(spec, ["led"]).head_type == "question_answering"
    assert isinstance(match_family(spec, ["led"], labels), FamilyMismatch), "LED has no head with labels of tokens"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_public_model(name):
    result = match_family(preset(name))
    assert isinstance(result, FamilyMatch)
    public = {"gpt3": "gpt2"}.get(name, name.split("-")[0].removesuffix("3"))
    assert result.family == (public if public in FAMILY_ORDER else "marian")


def test_a_config_that_does_not_describe_the_model_is_never_taken(monkeypatch):
    """The planted fault: a writer that is wrong about one number."""
    spec = tiny("llama").spec
    honest = CONFIG_WRITERS["llama"]
    for key, wrong in (("rms_norm_eps", 1e-3), ("num_key_value_heads", 2), ("rope_parameters", {"rope_theta": 7.0})):
        wrong_writer = dataclasses.replace(
            honest, write_config=lambda s, k=key, w=wrong: honest.write_config(s) | {k: w}
        )
        monkeypatch.setitem(CONFIG_WRITERS, "llama", wrong_writer)
        assert isinstance(match_family(spec, ["llama"]), FamilyMismatch)
    monkeypatch.setitem(CONFIG_WRITERS, "llama", honest)
    assert isinstance(match_family(spec, ["llama"]), FamilyMatch)


def other_second_layer(spec):
    first, second = spec.decoder.layers
    second = swap(second, FeedForward, lambda ffn: dataclasses.replace(ffn, activation="relu"))
    return dataclasses.replace(spec, decoder=dataclasses.replace(spec.decoder, layers=(first, second)))


ODD = {
    "a norm without bias": ("gpt2", lambda s: swap(s, LayerNorm, lambda n: dataclasses.replace(n, bias=False))),
    "scores not scaled": ("gpt2", lambda s: swap(s, Attention, lambda a: dataclasses.replace(a, scale=1.0))),
    "a bias on some projections": ("gpt2", lambda s: swap(s, Attention, lambda a: dataclasses.replace(a, bias="qk"))),
    "one layer of another kind": ("gpt2", other_second_layer),
    "no final norm": ("gpt2", lambda s: dataclasses.replace(
        s, decoder=dataclasses.replace(s.decoder, final_norm=headwater.core.NoNorm()))),
    "an untied output": ("gpt2", lambda s: dataclasses.replace(s, tied=())),
    "states pooled in between": ("marian", lambda s: dataclasses.replace(s, bridge=MeanPoolBridge(2))),
    "no token types": ("bert", lambda s: swap(s, Embeddings, lambda e: dataclasses.replace(e, token_types=0))),
    "factors of a GGUF file": ("llama", lambda s: swap(
        s, Rotary, lambda r: dataclasses.replace(r, scaling=PerFrequencyScaling((1.0, 2.0, 3.0, 4.0))))),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_every_change_of_the_outputs_is_detected(what):
    name, change = ODD[what]
    spec = tiny(name).spec
    assert isinstance(match_family(spec, [name]), FamilyMatch)
    assert isinstance(match_family(change(spec), [name]), FamilyMismatch)


def test_changes_without_effect_on_the_outputs_are_no_difference():
    spec = tiny("gpt2").spec
    other = swap(spec, Attention, lambda a: dataclasses.replace(a, dropout=0.3, head_dim=8, kv_heads=2))
    assert spec_differences(spec, dataclasses.replace(other, init=(("*", headwater.core.Zero()),))) == []


# ----------------------------------------------------------------------------------------- the same function, rewritten

FORMS = {
    "marian": (transformer(47, **SIZES), ("output_bias", "sinusoidal_halves")),
    "pegasus": (transformer(47, norm_position="pre", **SIZES), ("output_bias", "sinusoidal_halves")),
    "blenderbot": (
        transformer(47, norm_position="pre", position="learned", max_positions=64, **SIZES),
        ("output_bias",),
    ),
    "gpt_neox": (decoder(47, position="rotary", **PRE, **SIZES), ("embedding_scale",)),
    "llama": (decoder(47, kv_heads=1, **LLAMA, **SIZES), ("embedding_scale",)),
    "gpt2": (decoder(47, position="learned", max_positions=64, **PRE, **SIZES), ()),
}


def wide(spec):
    """Initial weights plus noise, so that a wrong term shows."""
    model, draw = spec.build(seed=0).eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


@pytest.mark.parametrize("name", FORMS)
def test_a_rewritten_model_gives_the_same_outputs(name, tmp_path):
    spec, changes = FORMS[name]
    model = wide(spec)
    saved = save_with_result(model, tmp_path / "m")
    assert saved.model.config["model_type"] == name and saved.rewrites == changes and saved.mismatch is None
    again = headwater.load(tmp_path / "m")
    limit = 1e-5 if "sinusoidal_halves" in changes else 0.0
    assert (forward(again.model) - forward(model)).abs().max() <= limit
    headwater.save(again, tmp_path / "again")  # a second save needs no rewrite
    assert all(torch.equal(t, tensors(tmp_path / "again")[n]) for n, t in tensors(tmp_path / "m").items())
    assert model.spec == spec, "the original model is unchanged"


def test_a_wrong_rewrite_is_refused(monkeypatch, tmp_path):
    """The planted fault: sines and cosines in the right order, but the features left where they were."""
    from headwater.families import export, rewrites

    wrong = tuple(
        dataclasses.replace(r, rewrite_weights=lambda spec, weights: weights) if r.name == "sinusoidal_halves" else r
        for r in rewrites.REWRITES
    )
    monkeypatch.setattr(export, "REWRITES", wrong)
    with pytest.raises(headwater.BadFile, match="gives other outputs than before; not written"):
        save_with_result(wide(FORMS["pegasus"][0]), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_sinusoidal_halves_is_a_permutation_of_sinusoidal():
    """The law behind `sinusoidal_halves`: the second form is the first with its features in another order."""
    positions = torch.arange(9)[None]
    waves = [kind().build(8) for kind in (Sinusoidal, SinusoidalHalves)]
    for wave in waves:
        wave.init_buffers()
    one, two = (wave.add(torch.zeros(1, 9, 8), positions) for wave in waves)
    assert torch.equal(one[..., [0, 2, 4, 6, 1, 3, 5, 7]], two) and not torch.equal(one, two)


# ------------------------------------------------------------------------------------------------- where no family fits

NATIVE = {
    "mean of the states": (encoder(47, ClassificationHead(3, Pooled(MeanPooling())), position="rotary", **PRE, **SIZES),
                           "megatron-bert", "head.pooler"),
    "rotary encoder": (encoder(47, TokenClassificationHead(3), position="rotary", **PRE, **SIZES), "megatron-bert",
                       "encoder.embed.position"),
    "masked words": (encoder(47, position="rotary", **PRE, **SIZES), "megatron-bert", "head.transform"),
    "alibi": (decoder(47, position="alibi", **PRE, **SIZES), "gpt_neox", "decoder.layers.self_attn.layer.position"),
}  # fmt: skip


@pytest.mark.parametrize("what", NATIVE)
def test_native_layout_with_a_warning_where_no_family_fits(what, tmp_path):
    spec, nearest, where = NATIVE[what]
    model = wide(spec)
    with pytest.warns(
        UserWarning, match=f"transformers does not open: its nearest family, {nearest}, has .* as {where}"
    ):
        headwater.save(model, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "headwater"
    assert torch.equal(forward(headwater.load(tmp_path / "m").model), forward(model))


def test_a_layout_that_cannot_hold_the_model_is_refused(tmp_path):
    model = wide(FORMS["gpt_neox"][0])
    message = (
        r"layout 'llama' cannot express this model: transformers' llama has RMSNorm.* this model has LayerNorm\(\)"
    )
    with pytest.raises(headwater.BadSetting, match=message):
        headwater.save(model, tmp_path / "m", layout="llama")
    with pytest.raises(headwater.BadSetting, match="'transformers' cannot express .* gpt_neox has Rotary.* Alibi"):
        headwater.save(wide(NATIVE["alibi"][0]), tmp_path / "m", layout="transformers")
    with pytest.raises(headwater.BadSetting, match="got 'lama'; did you mean 'llama'"):
        headwater.save(model, tmp_path / "m", layout="lama")
    with pytest.raises(headwater.BadSetting, match="t5 has encoder and decoder as stacks, this model has decoder"):
        headwater.save(model, tmp_path / "m", layout="t5")
    with pytest.raises(headwater.BadInput, match="save needs a model, got str"):
        headwater.save("runs/mine", tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_requested_layout_is_written(tmp_path):
    model = wide(FORMS["gpt_neox"][0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        headwater.save(model, tmp_path / "ours", layout="headwater")
        headwater.save(model, tmp_path / "theirs", layout="gpt_neox")
    assert headwater.load(tmp_path / "ours").spec == model.spec
    assert headwater.load(tmp_path / "theirs").config["model_type"] == "gpt_neox"
    with pytest.raises(headwater.BadFile, match="must be a new or empty folder"):
        headwater.save(model, tmp_path / "ours", layout="headwater")
    bert = tiny("bert")
    headwater.save(bert, tmp_path / "native", layout="headwater")
    assert torch.equal(forward(headwater.load(tmp_path / "native").model), forward(bert.model))


# ------------------------------------------------------------------------- models that config.json does not describe


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["the cat sat on the mat", "天地玄黄 宇宙洪荒"] * 20, "bpe", vocab_size=320)


@pytest.fixture
def packed(tokenizer, tmp_path):
    """A GGUF file with quantized weights."""
    spec = decoder(len(tokenizer), d_model=32, heads=2, layers=2, d_ff=64, **LLAMA)
    spec = swap(spec, Embeddings, lambda embed: dataclasses.replace(embed, scale=1.0))
    return headwater.load(save_gguf(LoadedModel(wide(spec), tokenizer, {}, tmp_path), tmp_path / "packed.gguf", "Q8_0"))


def test_quantized_weights_are_saved_dequantized(packed, tmp_path):
    headwater.save(packed, tmp_path / "m")
    headwater.save(packed, tmp_path / "m.gguf")
    rows = ids()
    with torch.no_grad():
        expected = packed.model(rows)
        assert (headwater.load(tmp_path / "m").model(rows) - expected).abs().max() < 1e-3
        assert (headwater.load(tmp_path / "m.gguf").model(rows) - expected).abs().max() < 1e-2


def test_quantized_weights_are_rewritten(tmp_path):
    model = wide(decoder(64, d_model=32, heads=2, layers=1, d_ff=64, position="rotary", **PRE))
    quantize(model, "int8")
    saved = save_with_result(model, tmp_path / "m")
    assert saved.rewrites == ("embedding_scale",)
    with torch.no_grad():
        assert (headwater.load(tmp_path / "m").model(ids()) - model(ids())).abs().max() < 1e-2


def test_rope_factors_of_a_gguf_file_are_not_lost(packed, tmp_path):
    """config.json has no key for them: they would read back as plain RoPE."""
    factors = PerFrequencyScaling((1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0))
    spec = swap(packed.spec, Rotary, lambda rotary: dataclasses.replace(rotary, scaling=factors))
    model = wide(spec)
    loaded = LoadedModel(model, packed.tokenizer, packed.config, packed.path, "language")
    with pytest.warns(UserWarning, match="PerFrequency"):
        headwater.save(loaded, tmp_path / "m")
    assert torch.equal(forward(headwater.load(tmp_path / "m").model), forward(model))
    with pytest.raises(headwater.BadSetting, match="has NoScaling.* this model has another PerFrequency"):
        headwater.save(loaded, tmp_path / "m.gguf")


def test_a_new_head_is_saved_with_its_own_type(tmp_path):
    headwater.save(tiny("bert", architectures=["BertForMaskedLM"]), tmp_path / "bert")
    tuned = headwater.load(tmp_path / "bert", new_head=TokenClassificationHead(3))
    headwater.save(tuned, tmp_path / "tags")
    again = headwater.load(tmp_path / "tags")
    assert (again.config["architectures"], again.head) == (["BertForTokenClassification"], "token_classification")
    assert torch.equal(forward(again.model), forward(tuned.model))


def test_a_fault_leaves_nothing_behind(monkeypatch, tmp_path):
    from headwater.families import hf_folder

    honest = hf_folder.save_weights
    monkeypatch.setattr(
        hf_folder, "save_weights", lambda where, weights: honest(where, {n: t * 2 for n, t in weights.items()})
    )
    with pytest.raises(headwater.BadFile, match="changed when it was written and read back"):
        headwater.save(tiny("bert"), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------- tokenizer, dropout, command


def test_two_texts_get_two_token_types(tokenizer, tmp_path):
    """transformers' tokenizer returns token types only where the model has them."""
    for name, has_types in (("bert", True), ("roberta", False), ("gpt2", False)):
        more = {"roberta": {"type_vocab_size": 1}}.get(name, {})
        loaded = tiny(name, vocab_size=len(tokenizer), **more)
        loaded.tokenizer = tokenizer
        headwater.save(loaded, tmp_path / name)
        config = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert ("token_type_ids" in config.get("model_input_names", [])) == has_types


def test_the_dropout_of_a_classifier_may_differ_from_that_of_the_states():
    spec = tiny("bert", "sequence_classification", classifier_dropout=0.3, hidden_dropout_prob=0.1).spec
    assert spec.head.dropout == 0.3
    assert tiny("bert", "sequence_classification", hidden_dropout_prob=0.2).spec.head.dropout == 0.2


def test_convert_prints_what_it_wrote(tmp_path, capsys):
    from headwater.cli import main

    headwater.save(wide(FORMS["pegasus"][0]), tmp_path / "run", layout="headwater")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'new'}: pegasus with the head 'language', ")
    assert lines[1].startswith("rewritten, with the same outputs: a bias of zeros on the output; sines before cosines")
    assert lines[-1] == "loaded again and compared: equal"
    with pytest.warns(UserWarning):
        headwater.save(wide(NATIVE["alibi"][0]), tmp_path / "alibi")
    assert main(["convert", str(tmp_path / "alibi"), str(tmp_path / "same")]) == 0
    assert "nearest family, gpt_neox, has Rotary(partial_factor=0.25) as decoder" in capsys.readouterr().out
    with pytest.raises(headwater.BadSetting, match="--drop and --vocabulary are for old checkpoints"):
        convert(tmp_path / "run", tmp_path / "other", drop=["a"])
    with pytest.raises(headwater.BadFile, match="must be a new or empty folder"):
        convert(tmp_path / "run", tmp_path / "new")
    convert(tmp_path / "run", tmp_path / "new", force=True)
