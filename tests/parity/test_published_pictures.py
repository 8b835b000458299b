"""Parity of DALL-E mini, VQGAN and OpenAI's dVAE with the public packages, through files on disk."""

from __future__ import annotations

import json
from pathlib import Path

import published_pictures as published  # beside this file, see conftest
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwater
from headwater.codecs import DVAE, VQGAN, load_codec, save_codec
from headwater.families import FAMILIES
from headwater.families.hf_folder import load_hf_folder, save_hf_folder
from headwater.weights.hf_config import HFConfig

LIMIT = 2e-5
SHOWS = 4e-4
ANSWERS = json.loads(published.ANSWERS.read_text())


def write(folder: Path, name: str, config: dict) -> dict[str, Tensor]:
    """The files of a published model with seeded weights."""
    tensors = {key: published.seeded(key, tuple(shape)) for key, shape in ANSWERS[name]["shapes"].items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def difference(mine: Tensor, answer: dict) -> float:
    """The largest difference to the answer's values."""
    assert list(mine.shape) == answer["shape"]
    flat = mine.flatten()
    return float((flat[:: max(1, len(flat) // 64)] - torch.tensor(answer["values"])).abs().max())


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    for name, config in (("dvae", published.DVAE), ("vqgan", published.VQGAN), ("dallebart", published.DALLEBART)):
        write(folder / name, name, config)
    (folder / "dallebart" / "vocab.json").write_text(json.dumps(published.vocabulary()))
    (folder / "dallebart" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(published.MERGES) + "\n")
    return {name: folder / name for name in ("dvae", "vqgan", "dallebart")}


@torch.inference_mode()
def test_the_dvae_equals_dall_e(folders):
    codec = load_codec(folders["dvae"])
    pictures = published.pictures()
    assert difference(codec.encoder(0.8 * pictures + 0.1), ANSWERS["dvae"]["logits"]) < LIMIT
    assert codec.encode(pictures).tolist() == ANSWERS["dvae"]["ids"]
    ids = published.ids("dvae", (2, 4, 4), 512)
    assert difference(codec.decode(ids), ANSWERS["dvae"]["decoded"]) < LIMIT
    assert torch.equal(codec.decode(ids.flatten(1)), codec.decode(ids))


@torch.inference_mode()
def test_vqgan_equals_taming(folders):
    codec = load_codec(folders["vqgan"])
    latents = codec.to_codes(codec.encoder(published.pictures()))
    assert difference(latents, ANSWERS["vqgan"]["latents"]) < LIMIT
    ids = published.ids("vqgan", (2, 8, 8), 40)
    assert difference(codec.decode(ids), ANSWERS["vqgan"]["decoded"]) < LIMIT

    # the id of a place is the nearest row of the table
    expected = torch.cdist(latents.flatten(2).transpose(1, 2), codec.codebook.weight).argmin(2)
    assert torch.equal(codec.encode(published.pictures()), expected)


@torch.inference_mode()
def test_dalle_mini_equals_min_dalle(folders):
    loaded = headwater.load(folders["dallebart"])
    assert [loaded.tokenizer.encode(text) for text in published.TEXTS] == ANSWERS["dallebart"]["tokens"]
    text = torch.ones(2, 64, dtype=torch.long)
    for row, words in zip(text, ("", published.TEXTS[0]), strict=True):
        ids = loaded.tokenizer.encode(words)
        row[: len(ids)] = torch.tensor(ids)
    picture = published.ids("picture", (1, 17), 50).expand(2, 17)
    logits = loaded.model(picture, source=text, source_attention_mask=text.ne(1))
    assert difference(logits, ANSWERS["dallebart"]["logits"]) < LIMIT


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("vqgan", "norm_eps", 1e-3),
        ("vqgan", "pixel_range", "signed"),
        ("vqgan", "attn_resolutions", [8, 16]),
        ("dvae", "n_blk_per_group", 1),
    ],
)
def test_another_setting_shows(folders, tmp_path, name, key, value):
    """A planted fault: what a config says is used, and what a file holds must fit."""
    original = json.loads((folders[name] / "config.json").read_text())
    tensors = load_file(folders[name] / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**original, key: value}))
    if key in ("attn_resolutions", "n_blk_per_group"):
        with pytest.raises(headwater.errors.BadFile):
            load_codec(tmp_path)
        return
    with torch.inference_mode():
        decoded = load_codec(tmp_path).decode(published.ids("vqgan", (2, 8, 8), 40))
    assert difference(decoded, ANSWERS["vqgan"]["decoded"]) > SHOWS


@torch.inference_mode()
def test_columns_before_rows_would_show(folders):
    codec = load_codec(folders["vqgan"])
    ids = published.ids("vqgan", (2, 8, 8), 40)
    assert difference(codec.decode(ids.transpose(1, 2)), ANSWERS["vqgan"]["decoded"]) > SHOWS


@torch.inference_mode()
def test_an_early_norm_of_dalle_mini_would_show(folders, tmp_path):
    tensors = load_file(folders["dallebart"] / "model.safetensors")
    tensors["decoder.layers.0.glu.ln1.weight"] += 0.01
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published.DALLEBART))
    text = torch.tensor([ANSWERS["dallebart"]["tokens"][0]])
    picture = published.ids("picture", (1, 17), 50)
    outputs = [load_hf_folder(folder).model(picture, source=text) for folder in (folders["dallebart"], tmp_path)]
    assert float((outputs[0] - outputs[1]).abs().max()) > SHOWS


@pytest.mark.parametrize(("name", "layout"), [("dvae", "dall_e_dvae"), ("vqgan", "vqgan")])
def test_a_codec_is_written_as_it_was_published(folders, tmp_path, name, layout):
    codec = load_codec(folders[name])
    save_codec(codec, tmp_path / "published", layout)
    written = load_file(tmp_path / "published" / "model.safetensors")
    original = load_file(folders[name] / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)
    assert load_codec(tmp_path / "published").spec == codec.spec

    save_codec(codec, tmp_path / "native")
    again = load_codec(tmp_path / "native")
    assert again.spec == codec.spec
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), codec.parameters(), strict=True))


def test_dalle_mini_is_written_as_it_was_published(folders, tmp_path):
    save_hf_folder(load_hf_folder(folders["dallebart"]), tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    original = load_file(folders["dallebart"] / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)


def test_norms_without_a_scale_have_a_scale_of_one(folders, tmp_path):
    tensors = load_file(folders["dallebart"] / "model.safetensors")
    scales = [key for key in tensors if key.endswith(("pre_self_attn_layer_norm.weight", "ln1.weight", "ln0.weight"))]
    save_file({key: value for key, value in tensors.items() if key not in scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published.DALLEBART))
    model = load_hf_folder(tmp_path).model
    assert torch.equal(model.decoder.layers[1].ffn.norm.weight, torch.ones(40))

    del tensors["decoder.layers.0.glu.fc0.weight"]  # any other tensor must be there
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(headwater.errors.BadFile, match=r"1 missing: .decoder.layers.0.ffn.gate.weight"):
        load_hf_folder(tmp_path)


def test_another_form_of_dalle_mini_is_refused():
    config = HFConfig({**published.DALLEBART, "ln_positions": "swinv2"})
    with pytest.raises(headwater.errors.BadFile, match=r"ln_positions must be normformer, got 'swinv2'"):
        FAMILIES["dallebart"].read_spec(config, "language")


MEGA = {"encoder_vocab_size": 50272, "image_vocab_size": 16415, "d_model": 2048, "encoder_layers": 24,
        "decoder_layers": 24, "encoder_attention_heads": 32, "decoder_attention_heads": 32, "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096}  # fmt: skip


@pytest.mark.parametrize(("config", "count"), [({}, 437_962_720), (MEGA, 2_587_967_488)])
def test_dalle_mini_has_the_published_number_of_parameters(config, count):
    spec = FAMILIES["dallebart"].read_spec(HFConfig({"model_type": "dallebart", **config}), "language")
    assert sum(p.numel() for p in spec.on_meta().parameters()) == count


@pytest.mark.parametrize(("spec", "count"), [(DVAE(), 97_616_006), (VQGAN(encoder=False), 46_709_891)])
def test_codecs_have_the_published_number_of_parameters(spec, count):
    assert sum(p.numel() for p in spec.on_meta().parameters()) == count
