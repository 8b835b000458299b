"""What a speech model attends to: the spectrogram of a window, its words, and the cross-attention of each token.

alignment = align_speech("talk.wav", "whisper-base")
alignment.words                                 the words with their times
alignment.weights                               [tokens, positions], the alignment heads averaged; 0.02 s a position
alignment.plot("talk.png")
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headwater.audio.files import read_audio
from headwater.audio.mel import FRAMES_PER_SECOND, LogMel
from headwater.errors import BadInput
from headwater.families.hf_folder import LoadedModel
from headwater.families.whisper import FRAMES_PER_SLOT
from headwater.i18n import _
from headwater.inspection.plot_style import (
    BLUE,
    SEQUENTIAL,
    figure_to_bytes,
    image_format_of,
    label_ticks,
    new_figure,
    style,
    write_image,
)
from headwater.transcription.search import SearchSettings, decode_window
from headwater.transcription.speech_model import SpeechModel, load_speech_model
from headwater.transcription.tokens import SECONDS_PER_STAMP
from headwater.transcription.transcript import Word
from headwater.transcription.windows import WindowSettings, split_segments
from headwater.transcription.words import align_words, attention_over_speech

VISIBLE_WEIGHT = 0.98  # the colors end at this quantile: a few weights are far larger than the others


@dataclass(frozen=True, eq=False)
class SpeechAlignment:
    """The first window of a recording: its spectrogram [mels, frames], tokens, attention weights and words."""

    spectrogram: np.ndarray
    tokens: tuple[str, ...]
    weights: np.ndarray  # [tokens, positions]
    words: tuple[Word, ...]
    seconds: float

    def plot(self, path: str | Path) -> Path:
        """Draw the spectrogram with the words over it, and below the attention of each token at the same times."""
        with style():
            figure = new_figure(min(24.0, 4 + self.seconds), 4 + 0.16 * len(self.tokens))
            top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.16 * len(self.tokens) + 1])
            self._draw_spectrogram(top)
            self._draw_attention(bottom)
        return write_image(figure_to_bytes(figure, image_format_of(path)), path)

    def _draw_spectrogram(self, axis: Any) -> None:
        axis.imshow(self.spectrogram, origin="lower", aspect="auto", cmap="gray_r", extent=(0, self.seconds, 0, 1))
        for number, word in enumerate(self.words):
            axis.axvspan(word.start, word.end, color=BLUE, alpha=0.12 if number % 2 else 0.3, linewidth=0)
            middle = (word.start + word.end) / 2
            axis.text(middle, 1.02, word.text.strip(), rotation=60, fontsize=7, parse_math=False)
        axis.set_yticks([])
        axis.set_ylabel(str(_("mel")))

    def _draw_attention(self, axis: Any) -> None:
        highest = float(np.quantile(self.weights, VISIBLE_WEIGHT))
        extent = (0, self.seconds, len(self.tokens) - 0.5, -0.5)
        axis.imshow(self.weights, aspect="auto", cmap=SEQUENTIAL, vmax=highest, extent=extent, interpolation="nearest")
        label_ticks(axis, rows=self.tokens)
        axis.set_xlabel(str(_("seconds")))


def align_speech(
    audio: str | Path | torch.Tensor, model: str | Path | LoadedModel | SpeechModel, language: str | None = None
) -> SpeechAlignment:
    """Transcribe the first window of a recording, and take the attention weights of its text tokens."""
    speech_model = load_speech_model(model)
    samples = audio if isinstance(audio, torch.Tensor) else read_audio(audio)
    mel = LogMel(samples, speech_model.mels)
    size = min(speech_model.frames, mel.frames)
    if size < FRAMES_PER_SLOT:
        raise BadInput(_("inspect: the recording must last at least 0.02 s, it is shorter; give another"))
    spectrogram = mel.window(0, size)
    window = speech_model.encode(torch.nn.functional.pad(spectrogram, (0, speech_model.frames - size)))
    known = next(iter(speech_model.detect_language(window))) if language is None else None
    settings = WindowSettings(known or speech_model.tokens.find_language(str(language)), timestamps="word")

    # the text, its words and the weights of its tokens
    tokens = speech_model.tokens
    output = decode_window(speech_model, window, tokens.prompt((), settings.language), SearchSettings(beam_size=5))
    segments, _next_window = split_segments(speech_model, output, 0, size)
    segments = align_words(speech_model, window, segments, settings, 0, size, 0.0)
    text_ids = [token for segment in segments for token in segment.tokens if token < tokens.end]
    if not text_ids:
        raise BadInput(_("inspect: the model finds no speech in the first window; give another recording"))
    start = tokens.prompt((), settings.language, settings.task, timestamps=False)
    weights, _probabilities = attention_over_speech(speech_model, window, start, text_ids, size // FRAMES_PER_SLOT)
    return SpeechAlignment(
        spectrogram.numpy(),
        tuple(tokens.tokenizer.piece(token) for token in text_ids),
        weights.mean(0)[len(start) - 1 : -2].numpy(),  # those with which each token was predicted
        tuple(word for segment in segments for word in segment.words),
        max(size // FRAMES_PER_SLOT * SECONDS_PER_STAMP, size / FRAMES_PER_SECOND),
    )
