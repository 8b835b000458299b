"""SpeechModel: a loaded Whisper with its special tokens, its encoder, and the keys and values of a window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headwater.audio.frames import Frames
from headwater.core.cache import CacheKey, KVPair
from headwater.core.embeddings import ModelInputs
from headwater.core.model import Transformer
from headwater.errors import BadInput, BadSetting
from headwater.families.hf_folder import LoadedModel
from headwater.families.load import load
from headwater.families.whisper import FRAMES_PER_SLOT, alignment_heads, window_slots
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.native import NativeDecoder
from headwater.i18n import _
from headwater.quantization.int8 import quantize_int8
from headwater.quantization.layers import quantize
from headwater.transcription.tokens import SpeechTokens, speech_tokens

PRECISIONS = ("float32", "int8")


@dataclass
class EncodedWindow:
    """The encoder's output [1, S, D] for one window, and the keys and values that cross-attention made of it."""

    memory: ModelInputs
    cross_kv: dict[CacheKey, KVPair]


class SpeechModel:
    """A Whisper that is ready to transcribe."""

    def __init__(self, loaded: LoadedModel) -> None:
        encoder = loaded.spec.encoder
        if encoder is None or loaded.spec.decoder is None or not isinstance(encoder.embed, Frames):
            raise BadInput(
                _(
                    "{path}: it does not read sound; transcribe needs a speech model such as whisper-base",
                    path=loaded.path,
                )
            )
        self.loaded = loaded
        self.transformer: Transformer = loaded.model.eval()
        self.tokens: SpeechTokens = speech_tokens(loaded)
        self.mels = encoder.embed.mels
        self.frames = FRAMES_PER_SLOT * window_slots(loaded.spec)  # of a window
        self.max_positions = loaded.spec.decoder.max_positions or 448
        heads = loaded.generation_setting("alignment_heads") or alignment_heads(loaded.spec)
        self.alignment_heads = [(int(layer), int(head)) for layer, head in heads]
        self._native = NativeDecoder.try_build(self.transformer)

    @torch.inference_mode()
    def encode(self, mel: Tensor) -> EncodedWindow:
        """Encode a window [mels, frames]."""
        return EncodedWindow(self.transformer.encode(mel[None]), {})

    def new_cache(self, window: EncodedWindow) -> BatchKVCache:
        """A KV cache of one row that reads the window."""
        cache = BatchKVCache(self.transformer, [0], self.max_positions)
        cache.set_encoder_output(window.memory)
        cache.cross_kv = window.cross_kv  # computed by the first decoding, used by all
        cache.native_decoder = (self.transformer, self._native)
        return cache

    def detect_language(self, window: EncodedWindow) -> dict[str, float]:
        """The probability of each language, the most probable first: what would follow the start of the transcript."""
        from headwater.generation.forward import forward_last

        if self.tokens.only_language:
            return {self.tokens.only_language: 1.0}
        logits = forward_last(self.transformer, self.new_cache(window), [[self.tokens.start]])[0]
        codes = list(self.tokens.languages)
        probabilities = logits[list(self.tokens.languages.values())].softmax(0).tolist()
        return dict(sorted(zip(codes, probabilities, strict=True), key=lambda pair: -pair[1]))


def load_speech_model(name: str | Path | LoadedModel | SpeechModel, precision: str = "float32") -> SpeechModel:
    """The speech model of a name, a folder or a file; precision "int8" quantizes its linear layers."""
    if isinstance(name, SpeechModel):
        return name
    if precision not in PRECISIONS:
        raise BadSetting(
            _("precision must be float32 or int8, got {precision!r}; choose one", precision=str(precision)[:40])
        )
    loaded = name if isinstance(name, LoadedModel) else load(name)
    if precision == "int8":
        quantize_speech(loaded.model)
    return SpeechModel(loaded)


def quantize_speech(model: Transformer) -> None:
    """Quantize in place: in rows what reads the whole spectrogram, and the head; in blocks the decoder."""
    quantize_int8(model, ("encoder.*", "decoder.*.cross_attn.k", "decoder.*.cross_attn.v", "head.out"))
    quantize(model, "int8")
