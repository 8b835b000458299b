"""What a model makes of a clip: its tokens in time, the use of each codebook, bits of each stage, sound that plays.

    tokens = inspect_sound(open_audio_model("runs/music"), "clip.wav")
    tokens.write("look")                    # report.html: bands in time, reconstructions that play; tokens.json

The report is one HTML file without scripts. A band has a column for each hundredth of a second.
"""

from __future__ import annotations

import base64
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from headwater.audio.write import spectrogram, to_colors, wav_bytes
from headwater.audiolm.audio_model import AudioModel
from headwater.audiolm.crops import CropDataset
from headwater.audiolm.voice import Voice
from headwater.codecs.codebook import code_perplexity
from headwater.data.collate import IGNORE_INDEX, SpecialTokens
from headwater.i18n import _
from headwater.io.files import atomic_write
from headwater.tasks.audio_language_model import stage_parts
from headwater.tasks.batch import to_tensors
from headwater.variants.audiolm import STAGES

COLUMNS = 100  # a second
BAND = 18  # pixels of a band's height
MAX_SECONDS = 30.0
MOST_BITS = 14.0  # the brightest color of a band of bits
GOLDEN = 0.6180339887  # neighbouring ids get colors far from each other


@dataclass(frozen=True)
class CodebookUse:
    """How a clip uses a codebook: the number of different codes, and as if all were equally often."""

    used: int
    perplexity: float
    most_common: int


@dataclass(frozen=True, eq=False)
class SoundTokens:
    """The tokens of a clip. bits: for each stage those of its tokens, in order; empty without an AudioLM."""

    name: str
    voice: Voice
    codes: int
    semantic_rate: float
    frame_rate: float
    use: list[CodebookUse]
    bits: dict[str, np.ndarray] = field(default_factory=dict)
    sounds: list[tuple[str, Tensor]] = field(default_factory=list)  # what plays: label, samples
    sample_rate: int = 0

    @property
    def seconds(self) -> float:
        return len(self.voice.fine) / self.frame_rate

    def lines(self) -> list[str]:
        """The result as text."""
        lines = [
            _("{name}: {seconds:.1f} s, {semantic} semantic tokens, {frames} frames of {books} codes", name=self.name,
              seconds=self.seconds, semantic=len(self.voice.semantic), frames=len(self.voice.fine), books=len(self.use))
        ]  # fmt: skip
        for number, use in enumerate(self.use):
            lines.append(
                _(
                    "codebook {number}: {used} of {codes} codes, perplexity {perplexity:.1f}",
                    number=number,
                    used=use.used,
                    codes=self.codes,
                    perplexity=use.perplexity,
                )
            )
        for stage, bits in self.bits.items():
            if len(bits):
                lines.append(_("{stage}: {bits:.2f} bits a token", stage=stage, bits=float(bits.mean())))
        return [str(line) for line in lines]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "name": self.name,
            "seconds": round(self.seconds, 3),
            "semantic": self.voice.semantic.tolist(),
            "fine": self.voice.fine.T.tolist(),
            "codebooks": [vars(use) for use in self.use],
            "bits": {stage: bits.round(3).tolist() for stage, bits in self.bits.items()},
        }

    def bands(self) -> list[tuple[str, Image.Image]]:
        """Pictures of one width, to be seen one below the other: label, picture."""
        width = max(1, round(self.seconds * COLUMNS))
        bands: list[tuple[str, Image.Image]] = []
        if self.sounds:
            mels = spectrogram(self.sounds[0][1], self.sample_rate).numpy()[::-1]
            bands.append((str(_("spectrogram")), _picture(_stretch(mels, width), 1)))
        ids = [(str(_("semantic tokens")), self.voice.semantic)]
        ids += [(str(_("codebook {number}", number=n)), book) for n, book in enumerate(self.voice.fine.unbind(1))]
        for label, row in ids:
            values = (row.numpy() * GOLDEN) % 1.0
            bands.append((label, _picture(_stretch(values[None], width), BAND)))
        for stage, bits in self.bits.items():
            if len(bits):
                label = str(_("bits of the {stage} tokens", stage=stage))
                bands.append((label, _picture(_stretch(bits[None] / MOST_BITS, width), BAND)))
        return bands

    def write(self, folder: str | Path) -> list[Path]:
        """report.html and tokens.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        template = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
        html = template.get_template("sound_report.html.j2").render(
            title=self.name,
            lines=self.lines(),
            bands=[(label, _data_uri("image/png", _png(picture))) for label, picture in self.bands()],
            sounds=[
                (label, _data_uri("audio/wav", wav_bytes(samples, self.sample_rate))) for label, samples in self.sounds
            ],
            heading_sound=str(_("Sound")),
            heading_bands=str(_("Tokens in time")),
            explanation=str(
                _("One color for each id. In the bands of bits a bright place is one that the model did not expect.")
            ),
        )
        paths = [folder / "report.html", folder / "tokens.json"]
        for path, text in zip(paths, (html, json.dumps(self.to_dict())), strict=True):
            with atomic_write(path) as file:
                file.write(text.encode())
        return paths


@torch.inference_mode()
def inspect_sound(model: AudioModel, clip: str | Path) -> SoundTokens:
    """The tokens of a recording or of a token file, as an AudioLM sees them."""
    voice = model.encode(clip).first(model.tokens, MAX_SECONDS)
    use = []
    for book in voice.fine.unbind(1):
        counts = torch.bincount(book, minlength=model.tokens.codes)
        use.append(
            CodebookUse(int((counts > 0).sum()), code_perplexity(book, model.tokens.codes), int(counts.argmax()))
        )
    sounds: list[tuple[str, Tensor]] = []
    if model.codec is not None:
        for books in sorted({model.tokens.books, model.tokens.coarse_books, 1}, reverse=True):
            label = (
                _("decoded from {books} codebooks", books=books) if books > 1 else _("decoded from the first codebook")
            )
            sounds.append((str(label), model.decode(voice.fine[:, :books])))
    bits = {} if model.tokens.text_length else stage_bits(model, voice)
    return SoundTokens(
        Path(clip).name,
        voice,
        model.tokens.codes,
        model.tokens.semantic_rate,
        model.tokens.frame_rate,
        use,
        bits,
        sounds,
        model.sample_rate if model.codec is not None else 0,
    )


def stage_bits(model: AudioModel, voice: Voice) -> dict[str, np.ndarray]:
    """For each stage the bits of its tokens, in order; those of the fine stage are means over its codebooks."""
    dataset = CropDataset([voice], model.tokens, SpecialTokens(0, 0, 0), 1, 0, moving=False)
    batch = to_tensors(dataset.collate(np.arange(dataset.size), 0))
    bits: dict[str, list[np.ndarray]] = {stage: [] for stage in STAGES}
    for part in stage_parts(model.model, batch):
        losses = F.cross_entropy(
            part.model(part.ids).float().flatten(0, 1),
            part.targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        counted = part.targets.flatten() != IGNORE_INDEX
        bits[part.stage].append((losses[counted] / math.log(2)).numpy())
    return {stage: np.mean(np.stack(rows), 0) for stage, rows in bits.items()}


def _stretch(values: np.ndarray, width: int) -> np.ndarray:
    """Values [H, N] as [H, width], each repeated."""
    columns = np.minimum(np.arange(width) * values.shape[1] // width, values.shape[1] - 1)
    stretched: np.ndarray = values[:, columns]
    return stretched


def _picture(values: np.ndarray, height: int) -> Image.Image:
    return Image.fromarray(to_colors(values).repeat(height, 0))


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
