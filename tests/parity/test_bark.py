"""Parity of Bark's causal models with transformers, through files on disk; published counts."""

from __future__ import annotations

import warnings

import pytest
import torch
from safetensors.torch import load_file

from headwater.errors import BadInput
from headwater.families import FAMILIES
from headwater.families.hf_folder import load_hf_folder, save_hf_folder
from headwater.weights.hf_config import HFConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

LIMIT = 2e-5
SHOWS = 4e-4
TINY = {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "block_size": 40, "input_vocab_size": 61}
MODELS = {
    "semantic": (T.BarkSemanticModel, T.BarkSemanticConfig),
    "coarse_acoustics": (T.BarkCoarseModel, T.BarkCoarseConfig),
}


def public(name, **change):
    model_class, config_class = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**{**TINY, "output_vocab_size": 53, "bias": False, **change})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("change", [{}, {"bias": True}, {"num_heads": 8, "num_layers": 1}], ids=str)
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_it_equals_transformers_both_ways(name, change, tmp_path):
    model = public(name, **change)
    model.save_pretrained(tmp_path / "public")
    loaded = load_hf_folder(tmp_path / "public")
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    assert float((loaded.model(ids) - expected).abs().max()) < LIMIT
    assert float((loaded.model(ids.roll(1, 1)) - expected).abs().max()) > SHOWS

    save_hf_folder(loaded, tmp_path / "again")
    written, original = (load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "public"))
    original = {key: value for key, value in original.items() if not key.endswith("attn.bias")}  # stored causal masks
    assert written.keys() == original.keys() and all(torch.equal(written[key], original[key]) for key in original)
    again, report = type(model).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert all(key.endswith("attn.bias") for key in report["missing_keys"])
    assert torch.equal(again(ids).logits, expected)


@torch.inference_mode()
def test_another_epsilon_would_show(tmp_path):
    model = public("semantic")
    model.save_pretrained(tmp_path)
    loaded = load_hf_folder(tmp_path)
    loaded.model.decoder.layers[0].ffn_norm.eps = 1e-2
    ids = torch.arange(20)[None]
    assert float((loaded.model(ids) - model(ids).logits).abs().max()) > SHOWS


def public_fine(**change):
    config = {
        **TINY,
        "block_size": 24,
        "input_vocab_size": 9,
        "output_vocab_size": 9,
        "n_codes_total": 5,
        "bias": False,
    }
    torch.manual_seed(0)
    model = T.BarkFineModel(T.BarkFineConfig(**{**config, **change})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("change", [{}, {"bias": True}, {"n_codes_given": 2}], ids=str)
@torch.inference_mode()
def test_the_fine_model_equals_transformers_both_ways(change, tmp_path):
    model = public_fine(**change)
    model.save_pretrained(tmp_path / "public")
    loaded = load_hf_folder(tmp_path / "public")
    codes = torch.randint(9, (2, 24, 5), generator=torch.Generator().manual_seed(1))
    for book in range(change.get("n_codes_given", 1), 5):
        expected = model(book, codes).logits
        assert float((loaded.model(codes[..., : book + 1]) - expected).abs().max()) < LIMIT
        shifted = codes.roll(1, -1)  # a planted fault: each code given to the next codebook
        assert float((loaded.model(shifted[..., : book + 1]) - expected).abs().max()) > SHOWS
    with pytest.raises(BadInput, match="must be codebook"):
        loaded.model(codes[..., :1])

    save_hf_folder(loaded, tmp_path / "again")
    again, report = T.BarkFineModel.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not report["unexpected_keys"] and not [k for k in report["missing_keys"] if "lm_heads" not in k]
    assert torch.equal(again(4, codes).logits, model(4, codes).logits)


SMALL = {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "block_size": 1024, "bias": False}
LARGE = {**SMALL, "hidden_size": 1024, "num_layers": 24, "num_heads": 16}
SEMANTIC = {"model_type": "semantic", "input_vocab_size": 129_600, "output_vocab_size": 10_048}
FINE = {"model_type": "fine_acoustics", "input_vocab_size": 1056, "output_vocab_size": 1056}
COARSE = {"model_type": "coarse_acoustics", "input_vocab_size": 12_096, "output_vocab_size": 12_096}


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (SMALL | SEMANTIC, 192_989_952),
        (SMALL | COARSE, 104_319_744),
        (LARGE | SEMANTIC, 446_088_192),
        (LARGE | COARSE, 327_861_248),
        (SMALL | FINE, 92_247_552),
        (LARGE | FINE, 311_789_568),
    ],
)
def test_the_published_number_of_parameters(config, count):
    spec = FAMILIES[config["model_type"]].read_spec(HFConfig(dict(config)), "language")
    assert sum(p.numel() for p in spec.on_meta().parameters()) == count
