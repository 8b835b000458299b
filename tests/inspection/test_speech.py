"""The alignment of a speech model: weights that sum to one, words within the window, a picture."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headwater.errors import BadInput, BadSetting, Unavailable
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel
from headwater.families.hub import HUB, find_installed
from headwater.inspection.speech import align_speech
from headwater.text.load import load_tokenizer
from headwater.transcription import search
from headwater.transcription.speech_model import SpeechModel
from headwater.weights.hf_config import HFConfig

CONFIG = {
    "d_model": 32, "vocab_size": 51864, "encoder_layers": 1, "encoder_ffn_dim": 32, "decoder_layers": 2,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 150,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    try:
        folder = find_installed("whisper-tiny.en")
    except Unavailable:
        pytest.skip(f"needs the package {HUB['whisper-tiny.en'].package}; make models installs it")
    built = FAMILIES["whisper"].read_spec(HFConfig(CONFIG), "language").build(seed=0)
    for parameter in built.decoder.parameters():
        parameter.data *= 3
    return SpeechModel(LoadedModel(built, load_tokenizer(folder), {"model_type": "whisper"}, folder))


@pytest.fixture(autouse=True)
def short_outputs(monkeypatch):
    monkeypatch.setattr(search, "MAX_OUTPUT_TOKENS", 8)


def test_alignment_and_picture(model, tmp_path):
    time = torch.arange(32_000) / 16_000
    alignment = align_speech(0.3 * torch.sin(900 * time) * torch.sin(2 * math.pi * time), model)
    assert alignment.spectrogram.shape == (80, 200)
    assert alignment.weights.shape == (len(alignment.tokens), 100)
    assert np.allclose(alignment.weights.sum(1), 1.0, atol=1e-5)
    assert "".join(word.text for word in alignment.words) == "".join(alignment.tokens)
    assert all(0 <= word.start <= word.end <= alignment.seconds + 0.02 for word in alignment.words)
    assert alignment.plot(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadSetting, match=r"\.png, \.svg or \.pdf"):
        alignment.plot(tmp_path / "a.gif")


def test_too_short_a_recording_is_refused(model):
    with pytest.raises(BadInput, match=r"at least 0\.02 s"):
        align_speech(torch.zeros(200), model)
