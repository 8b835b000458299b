"""Parity of Bark as a whole with transformers: text to semantic tokens, to coarse codes, to fine codes, to sound."""

from __future__ import annotations

import io
import json
import warnings
import zipfile

import numpy as np
import pytest
import torch

from headwater.audiolm.audio_model import open_audio_model
from headwater.audiolm.stages import write_coarse, write_fine, write_semantic
from headwater.audiolm.voice import Voice, read_voice, write_voice

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as T

PART = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "bias": False}
CODEC = {"num_filters": 2, "hidden_size": 4, "codebook_size": 8, "codebook_dim": 4, "upsampling_ratios": [2, 2],
         "sampling_rate": 16, "target_bandwidths": [0.06], "num_lstm_layers": 1}  # fmt: skip
LAYOUT = {
    "semantic_config": {"text_encoding_offset": 22, "text_pad_token": 38, "semantic_infer_token": 39,
                        "semantic_vocab_size": 20, "eos_token_id": 20, "max_input_semantic_length": 12,
                        "semantic_rate_hz": 5.0, "max_new_tokens": 30},
    "coarse_acoustics_config": {"coarse_semantic_pad_token": 36, "coarse_infer_token": 37, "coarse_rate_hz": 7.5,
                                "n_coarse_codebooks": 2, "max_coarse_input_length": 14, "max_coarse_history": 24,
                                "sliding_window_len": 6},
    "fine_acoustics_config": {"max_fine_history_length": 8, "max_fine_input_length": 20, "n_fine_codebooks": 5},
    "codebook_size": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def bark(tmp_path_factory):
    """transformers' Bark with random weights, and the folder it saves."""
    from transformers.models.bark.generation_configuration_bark import BarkGenerationConfig

    torch.manual_seed(3)
    config = T.BarkConfig(
        semantic_config={**PART, "block_size": 60, "input_vocab_size": 40, "output_vocab_size": 24},
        coarse_acoustics_config={**PART, "block_size": 60, "input_vocab_size": 40, "output_vocab_size": 36},
        fine_acoustics_config={**PART, "block_size": 20, "input_vocab_size": 9, "output_vocab_size": 9,
                               "n_codes_total": 5, "n_codes_given": 1},
        codec_config={"model_type": "encodec", **CODEC},
    )  # fmt: skip
    model = T.BarkModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.05 if "codec" in name else 0.5))
        for layer in model.codec_model.quantizer.layers:
            layer.codebook.embed.normal_()
    folder = tmp_path_factory.mktemp("bark")
    model.save_pretrained(folder)
    model.generation_config = BarkGenerationConfig(**LAYOUT)
    for name in LAYOUT.keys() - {"codebook_size"}:  # generate() wants these as they are in the file
        setattr(model.generation_config, name, LAYOUT[name])
    (folder / "generation_config.json").write_text(json.dumps(LAYOUT))
    return model, folder


def a_voice(frames=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    return Voice(draw(20, round(frames / 1.5)), draw(8, frames, 5))


def prompt_of(voice):
    """A voice as transformers takes it."""
    fine = voice.fine.T.clone()
    return {"semantic_prompt": voice.semantic.clone(), "coarse_prompt": fine[:2].clone(), "fine_prompt": fine}


def configs(model):
    own = model.generation_config
    names = ("semantic_config", "coarse_acoustics_config", "fine_acoustics_config")
    public = __import__("transformers.models.bark.generation_configuration_bark", fromlist=["x"])
    classes = (public.BarkSemanticGenerationConfig, public.BarkCoarseGenerationConfig, public.BarkFineGenerationConfig)
    return [kind(**getattr(own, name)) if isinstance(getattr(own, name), dict) else getattr(own, name)
            for kind, name in zip(classes, names, strict=True)]  # fmt: skip


@pytest.mark.parametrize("frames", [0, 3, 40], ids=["no voice", "a short voice", "a long voice"])
@torch.inference_mode()
def test_every_stage_writes_what_transformers_writes(bark, frames):
    model, folder = bark
    semantic_config, coarse_config, fine_config = configs(model)
    loaded = open_audio_model(folder)
    voice = a_voice(frames) if frames else Voice.empty(5)
    prompt = prompt_of(voice) if frames else None
    text = torch.tensor([3, 1, 4, 1, 5])
    padded = torch.nn.functional.pad(text, (0, 7))[None]
    mask = (torch.arange(12) < 5).long()[None]

    expected = model.semantic.generate(padded, semantic_config, history_prompt=prompt, attention_mask=mask)
    semantic = write_semantic(loaded.model, loaded.tokens, voice, text=text.tolist())
    assert semantic.tolist() == [id for id in expected[0].tolist() if id < 20]
    semantic = torch.arange(23) % 20  # long enough for several windows

    expected = model.coarse_acoustics.generate(
        semantic[None].clone(), semantic_config, coarse_config, codebook_size=8, history_prompt=prompt
    )
    coarse = write_coarse(loaded.model, loaded.tokens, semantic, voice)
    assert ((expected[0] - 20) % 8).tolist() == coarse.flatten().tolist()

    expected = model.fine_acoustics.generate(
        expected, semantic_config, coarse_config, fine_config, codebook_size=8, history_prompt=prompt
    )
    fine = write_fine(loaded.model, loaded.tokens, coarse, voice)
    assert torch.equal(fine.T, expected[0])
    sound = model.codec_decode(expected)[0]
    assert float((loaded.decode(fine) - sound).abs().max()) < 2e-5
    with torch.no_grad():  # a planted fault: each code given to the next codebook
        assert float((loaded.decode(fine.roll(1, 1)) - sound).abs().max()) > 4e-4


def test_the_whole_pipeline_from_a_text(bark, tmp_path):
    """text -> wav, in the voice of a file."""
    model, folder = bark
    write_voice(tmp_path / "voice.npz", a_voice(), 2)
    voice = read_voice(tmp_path / "voice.npz")
    expected = model.generate(
        input_ids=torch.tensor([[2, 7, 1, *[0] * 9]]), attention_mask=(torch.arange(12) < 3).long()[None],
        history_prompt=prompt_of(voice),
    )  # fmt: skip
    loaded = open_audio_model(folder)
    fine = loaded.speak([2, 7, 1], voice).fine
    if not len(fine):
        pytest.skip("the random weights end at once")
    assert float((loaded.decode(fine) - expected[0]).abs().max()) < 2e-5


def test_a_folder_without_a_codec_says_so(bark, tmp_path):
    from safetensors.torch import load_file, save_file

    from headwater.errors import NotFound

    _model, folder = bark
    tensors = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith("codec_model")}
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        (tmp_path / name).write_text(json.dumps({k: v for k, v in config.items() if k != "codec_config"}))
    loaded = open_audio_model(tmp_path)
    assert loaded.speak([1, 2], a_voice()).fine.shape[1] == 5
    with pytest.raises(NotFound, match="codec"):
        loaded.decode(torch.zeros(3, 5, dtype=torch.long))


def test_voice_files_are_checked(tmp_path):
    from headwater.errors import BadFile

    path = tmp_path / "voice.npz"
    np.savez(
        path,
        semantic_prompt=np.array([object()]),
        coarse_prompt=np.zeros((2, 3), int),
        fine_prompt=np.zeros((8, 3), int),
    )
    with pytest.raises(BadFile, match="without pickles"):
        read_voice(path)
    np.savez(path, semantic_prompt=np.zeros(3), coarse_prompt=np.zeros((2, 3), int), fine_prompt=np.zeros((8, 3), int))
    with pytest.raises(BadFile, match="integers"):
        read_voice(path)
    np.savez(
        path, semantic_prompt=np.zeros(3, int), coarse_prompt=np.ones((2, 3), int), fine_prompt=np.zeros((8, 3), int)
    )
    with pytest.raises(BadFile, match="first rows"):
        read_voice(path)
    path.write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(BadFile, match="damaged"):
        read_voice(path)


def test_a_voice_file_with_any_damage_is_a_voice_or_refused(tmp_path):
    from headwater.errors import BadFile

    path = tmp_path / "voice.npz"
    fine = np.arange(240).reshape(8, 30)
    np.savez_compressed(path, semantic_prompt=np.arange(500) % 7, coarse_prompt=fine[:2], fine_prompt=fine)
    whole = path.read_bytes()
    draw = np.random.default_rng(0)
    refused = 0
    for _trial in range(300):
        damaged = np.frombuffer(whole, np.uint8).copy()
        damaged[draw.integers(len(damaged), size=2)] = draw.integers(256, size=2)
        path.write_bytes(damaged.tobytes())
        try:
            read_voice(path)
        except BadFile:
            refused += 1
    assert refused > 200


def test_a_voice_file_that_claims_a_size_it_has_not_is_refused(tmp_path):
    from headwater.errors import BadFile

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**13,)})
    with zipfile.ZipFile(tmp_path / "voice.npz", "w") as archive:
        for name in ("semantic_prompt", "coarse_prompt", "fine_prompt"):
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(80))
    with pytest.raises(BadFile, match="damaged"):
        read_voice(tmp_path / "voice.npz")
