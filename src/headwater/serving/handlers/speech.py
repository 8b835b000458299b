"""Handler for a recording: the words of a speech model at their times, its spectrogram, and its cross-attention."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import torch

from headwater.audio.frames import Frames
from headwater.core.model import Transformer
from headwater.errors import BadInput
from headwater.families.hf_folder import LoadedModel
from headwater.i18n import _
from headwater.inspection.speech import VISIBLE_WEIGHT, align_speech
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import SpeechRequest
from headwater.transcription.speech_model import SpeechModel, load_speech_model


def reads_sound(model: Transformer) -> bool:
    """Whether a model makes text of spectrograms."""
    encoder = model.spec.encoder
    return encoder is not None and model.decoder is not None and isinstance(encoder.embed, Frames)


def speech(open_model: OpenModel, request: SpeechRequest) -> dict[str, Any]:
    """Words and tokens with their times; the spectrogram and the attention weights as bytes, 0 to 255, in base64."""
    alignment = align_speech(decode_samples(request.samples), _speech_model(open_model), request.language)
    spectrogram = _every_second(alignment.spectrogram[::-1])  # low frequencies at the bottom; a column every 0.02 s
    highest = float(np.quantile(alignment.weights, VISIBLE_WEIGHT))
    return {
        "seconds": alignment.seconds,
        "spectrogram": _to_bytes(spectrogram, float(spectrogram.min()), float(spectrogram.max())),
        "tokens": list(alignment.tokens),
        "weights": _to_bytes(alignment.weights, 0.0, highest),
        "words": [{"text": word.text, "start": word.start, "end": word.end} for word in alignment.words],
    }


def decode_samples(text: str) -> torch.Tensor:
    """The samples in [-1, 1] of a request: 16 bits, little-endian, 16 kHz, mono, in base64."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b"?"
    if len(raw) % 2:
        raise BadInput(_("the samples must be 16-bit integers in base64; send them as the page does"))
    return torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.float32) / 32768)


def _speech_model(open_model: OpenModel) -> SpeechModel:
    stored = open_model.stored
    if not reads_sound(open_model.inspected.model) or stored.path is None:
        raise BadInput(
            _("{path}: it does not read sound; transcribe needs a speech model such as whisper-base", path=stored.name)
        )
    loaded = open_model.loaded
    return load_speech_model(loaded if isinstance(loaded, LoadedModel) else stored.path)


def _every_second(columns: np.ndarray) -> np.ndarray:
    """The larger of every two columns."""
    even = columns[:, : columns.shape[1] // 2 * 2]
    return np.maximum(even[:, ::2], even[:, 1::2])


def _to_bytes(values: np.ndarray, low: float, high: float) -> dict[str, Any]:
    """Values [rows, columns] from low to high as bytes."""
    scaled = np.clip((values - low) / max(high - low, 1e-9), 0, 1) * 255
    data = base64.b64encode(scaled.round().astype(np.uint8).tobytes()).decode()
    return {"rows": values.shape[0], "columns": values.shape[1], "data": data}
