"""A small Whisper of random weights with the tokenizer of tiny.en, and sound for it."""

from __future__ import annotations

import math

import pytest
import torch

from headwater.errors import Unavailable
from headwater.families import FAMILIES
from headwater.families.hf_folder import LoadedModel
from headwater.families.hub import HUB, find_installed
from headwater.text.load import load_tokenizer
from headwater.transcription.speech_model import SpeechModel
from headwater.weights.hf_config import HFConfig

CONFIG = {
    "d_model": 32, "vocab_size": 51864, "num_mel_bins": 80, "encoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_layers": 2, "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "max_source_positions": 150, "max_target_positions": 448,
}  # fmt: skip


@pytest.fixture(scope="session")
def english():
    """The folder of tiny.en, for its tokenizer."""
    try:
        return find_installed("whisper-tiny.en")
    except Unavailable:
        pytest.skip(f"needs the package {HUB['whisper-tiny.en'].package}; make models installs it")


@pytest.fixture(scope="session")
def babbler(english) -> SpeechModel:
    """Three-second windows, and text that means nothing."""
    model = FAMILIES["whisper"].read_spec(HFConfig(CONFIG), "language").build(seed=0)
    for parameter in model.decoder.parameters():
        parameter.data *= 3
    return SpeechModel(LoadedModel(model, load_tokenizer(english), {"model_type": "whisper"}, english))


@pytest.fixture(scope="session")
def sound() -> torch.Tensor:
    """Ten seconds that rise and fall as speech does."""
    time = torch.arange(160_000) / 16_000
    noise = torch.randn(160_000, generator=torch.Generator().manual_seed(1))
    return 0.1 * noise * torch.sin(2 * math.pi * time).clamp(min=0) ** 2
