"""Write sounds: WAV files, and pictures of their spectrograms."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import Tensor

from headwater.audio.mel import SAMPLE_RATE, LogMel
from headwater.audio.resample import Resampler
from headwater.errors import BadInput
from headwater.i18n import _
from headwater.io.files import atomic_write

MELS = 80
GAP = 6  # pixels between spectrograms
MAX_COLUMNS = 1600
LINE = (255, 64, 64)  # the color of a mark
# dark blue, violet, orange, yellow: even steps of lightness, for eyes of every kind
COLORS = np.array([[0, 0, 20], [60, 15, 110], [150, 40, 110], [225, 95, 50], [250, 180, 40], [252, 250, 200]], float)


def wav_bytes(samples: Tensor, rate: int) -> bytes:
    """Mono samples [N] in -1 … 1 as a WAV file of 16 bits; louder ones are cut."""
    if samples.dim() != 1 or not len(samples) or not bool(samples.isfinite().all()):
        raise BadInput(_("a sound file needs at least one sample, and all of them finite numbers"))
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.detach().clamp(-1, 1).cpu().numpy(), rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def write_wav(path: str | Path, samples: Tensor, rate: int) -> Path:
    """Write a WAV file; after a crash it is complete or absent."""
    content = wav_bytes(samples, rate)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(Path(path)) as file:
        file.write(content)
    return Path(path)


def spectrogram(samples: Tensor, rate: int) -> Tensor:
    """The log-mel spectrogram [mels, frames] of samples [N] at any rate, 100 frames a second, from 0 to 1."""
    if rate != SAMPLE_RATE:
        resampler = Resampler(rate, SAMPLE_RATE)
        samples = torch.cat((resampler.push(samples.float()), resampler.finish()))
    mels = LogMel(samples, MELS)
    picture = mels.window(0, max(1, mels.frames))
    return ((picture - picture.max() + 2) / 2).clamp(0, 1)


def spectrogram_image(
    sounds: Sequence[Tensor], rate: int, mark_seconds: float | None = None, height: int = 2
) -> Image.Image:
    """Spectrograms of sounds [N], one above the other, low frequencies below; a line where a continuation begins."""
    pictures = [spectrogram(sound, rate) for sound in sounds]
    longest = max(picture.shape[1] for picture in pictures)
    step = -(-longest // MAX_COLUMNS)
    rows: list[np.ndarray] = []
    for picture in pictures:
        values = np.zeros((MELS, longest))
        values[:, : picture.shape[1]] = picture.numpy()
        pixels = to_colors(values[::-1, ::step]).repeat(height, 0)
        if mark_seconds is not None:
            column = round(mark_seconds * 100) // step
            pixels[:, max(0, column - 1) : column + 1] = LINE
        rows += [pixels, np.full((GAP, pixels.shape[1], 3), 255, np.uint8)]
    return Image.fromarray(np.concatenate(rows[:-1]))


def to_colors(values: np.ndarray) -> np.ndarray:
    """Values [H, W] from 0 to 1 as pixels [H, W, 3]."""
    at = np.clip(values, 0, 1) * (len(COLORS) - 1)
    below = np.minimum(at.astype(int), len(COLORS) - 2)
    part = (at - below)[..., None]
    mixed: np.ndarray = (COLORS[below] * (1 - part) + COLORS[below + 1] * part).round().astype(np.uint8)
    return mixed
