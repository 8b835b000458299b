"""preprocessor_config.json of a speech model: the spectrogram that transformers' WhisperFeatureExtractor computes."""

from __future__ import annotations

from typing import Any

from headwater.audio.mel import FFT_SIZE, FRAMES_PER_SECOND, HOP, SAMPLE_RATE


def feature_extractor_config(mels: int, frames: int) -> dict[str, Any]:
    """The settings for spectrograms [mels, frames]; chunk_length counts whole seconds, rounded up."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": mels,
        "sampling_rate": SAMPLE_RATE,
        "hop_length": HOP,
        "n_fft": FFT_SIZE,
        "chunk_length": -(-frames // FRAMES_PER_SECOND),
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
