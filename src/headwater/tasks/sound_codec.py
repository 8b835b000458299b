"""A sound codec: sounds to token ids and back. Trained before AudioLM, or alone.

Recordings are decoded once, at 16 kHz, and kept as 16-bit samples; a batch holds crops of half a second. The plots
folder has the spectrograms of validation recordings above their reconstructions, both as WAV files, and how often each
code of each codebook is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headwater.audio.files import read_audio
from headwater.audio.mel import SAMPLE_RATE
from headwater.audio.write import spectrogram_image, to_colors, write_wav
from headwater.codecs import Codec, save_codec
from headwater.codecs.codebook import code_perplexity
from headwater.codecs.encodec import EnCodecModel
from headwater.codecs.sound_codec import SoundCodec, SoundCodecModel, snr, spectrum_decibels
from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.data.dataset import Dataset, evenly_spaced
from headwater.data.recordings import SoundFile, sound_format
from headwater.errors import BadInput, Fault
from headwater.i18n import _
from headwater.rng import uniform
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData, TaskMetadata
from headwater.tasks.batch import TensorBatch
from headwater.text.tokenizer import Tokenizer
from headwater.vision.sheets import write_png

DEFAULT_CODES = 256
CROP = 8000  # samples of an example: half a second
HOP = 320  # samples of a frame
WIDTH_FACTOR = 4  # d_model for each channel of the first convolution
MIN_FILTERS = 4
SILENCE = 1e-4  # the loudest sample of a recording that is left out
MAX_SAMPLE_BYTES = 2 << 30
EXAMPLES = 4  # validation recordings in the plots folder
EXAMPLE_SECONDS = 4


# --------------------------------------------------------------------------------------------------------------- sounds


def load_sounds(paths: Sequence[str], notes: list[str]) -> list[np.ndarray]:
    """Samples [n] int16 at 16 kHz of the recordings that can be read; a note names the others."""
    sounds: list[np.ndarray] = []
    bad: list[str] = []
    bytes_left = MAX_SAMPLE_BYTES
    for path in paths:
        try:
            samples = read_audio(path, max_seconds=bytes_left / 2 / SAMPLE_RATE)
        except Fault as fault:
            bad.append(str(fault))
            continue
        if float(samples.abs().max()) < SILENCE:
            bad.append(_("{path}: it is silent", path=path))
            continue
        sounds.append((samples.clamp(-1, 1) * 32767).round().short().numpy())
        bytes_left -= 2 * len(samples)
    if bad:
        notes.append(_("{count:,} recordings cannot be used and are left out: {first}", count=len(bad), first=bad[0]))
    if not sounds:
        raise BadInput(_("no recording can be used: {first}", first=bad[0] if bad else "-"))
    return sounds


def to_sounds(samples: Tensor) -> Tensor:
    """Samples [B, T] int16 to sounds [B, 1, T] in -1 … 1."""
    return samples[:, None].float() / 32767


class SoundCropDataset(Dataset):
    """Crops of recordings. In training they begin anywhere, in validation one where the last one ended."""

    def __init__(
        self, sounds: Sequence[np.ndarray], special_tokens: SpecialTokens, batch_tokens: int, seed: int, moving: bool
    ) -> None:
        self.sounds = sounds
        counts = [max(1, len(sound) // CROP) for sound in sounds]
        self.owners = np.repeat(np.arange(len(sounds)), counts)  # example -> recording
        self.numbers = np.concatenate([np.arange(count) for count in counts])  # example -> its place in the recording
        self.moving = moving
        tokens = CROP // HOP * 8  # a code for each frame and codebook
        super().__init__(np.full(len(self.owners), tokens), special_tokens, max(batch_tokens, tokens), seed)

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        crops = np.zeros((len(examples), CROP), np.int16)
        shifts = uniform(self.seed, epoch, examples, "crop") if self.moving else np.zeros(len(examples))
        for row, (example, shift) in enumerate(zip(examples, shifts, strict=True)):
            sound = self.sounds[self.owners[example]]
            last = max(0, len(sound) - CROP)
            start = int(shift * (last + 1)) if self.moving else min(last, int(self.numbers[example]) * CROP)
            crop = sound[start : start + CROP]
            crops[row, : len(crop)] = crop
        slots = np.zeros((len(examples), CROP // HOP), np.int64)
        return TrainBatch(slots, np.ones(slots.shape, bool), np.zeros(len(examples), np.int64), signal=crops)


# ----------------------------------------------------------------------------------------------------------------- task


class SoundReconstruction(NamedTuple):
    """How well a sound is reconstructed: signal-to-noise ratio and difference of the spectra, both in decibels."""

    snr: float
    spectrum: float
    ids: np.ndarray  # [frames, K]


class SoundCodecTask(Task[SoundFile]):
    """A codec that reconstructs sounds from token ids."""

    name = "sound-codec"
    example_format = sound_format("sound-codec")
    default_metric = "snr"
    default_steps = 1500
    lr_factor = 0.3  # its codebooks follow the latents, which must not run away from them
    reads_text = False

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[SoundFile],
        valid: Sequence[SoundFile],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []

        def build(rows: Sequence[SoundFile], moving: bool) -> SoundCropDataset:
            sounds = load_sounds([row.path for row in rows], notes)
            return SoundCropDataset(sounds, special_tokens, config.batch_tokens, config.seed, moving)

        train_set = build(train, moving=True)
        valid_set = build(valid, moving=False)
        examples = [SoundFile(f"{owner}") for owner in valid_set.owners]
        num_tokens = sum(len(sound) for sound in train_set.sounds) // HOP
        return TaskData(self, tokenizer, train_set, valid_set, examples, notes=notes, num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Any:
        """The channels follow d_model of the config; vocab is the number of codes of a codebook."""
        filters = max(MIN_FILTERS, config.d_model // WIDTH_FACTOR)
        return SoundCodec(filters=filters, num_codes=config.vocab or DEFAULT_CODES)

    def describe_model(self, model: Any) -> str:
        spec = cast(SoundCodec, model.spec)
        return _(
            "sound codec, {rate:g} frames a second in {books} codebooks of {codes} codes, {filters} channels",
            rate=spec.sampling_rate / spec.hop,
            books=spec.num_books,
            codes=spec.num_codes,
            filters=spec.filters,
        )

    def save_model(self, folder: Path, model: Any, data: TaskData) -> None:
        save_codec(model, folder, metadata=dict(data.metadata))

    # ---------------------------------------------------------------------------------------------- loss and metrics

    def loss(self, model: Any, batch: TensorBatch, label_smoothing: float) -> Tensor:
        codec = cast(SoundCodecModel, model)
        sounds = to_sounds(batch["signal"])
        return codec.loss(sounds) * len(sounds)

    def predict_rows(
        self, model: Any, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, SoundReconstruction]:
        outputs: dict[int, SoundReconstruction] = {}
        for rows, batch in batches:
            sounds = to_sounds(batch["signal"])
            with torch.no_grad():
                ids = model.encode(sounds)
                decoded = model.decode(ids)
            ratios, spectra = (measure(sounds, decoded).tolist() for measure in (snr, spectrum_decibels))
            for n, row in enumerate(rows):
                outputs[int(row)] = SoundReconstruction(ratios[n], spectra[n], ids[n].cpu().numpy())
        return outputs

    def reference(self, example: SoundFile) -> str:
        return example.path

    def metrics(self, outputs: list[SoundReconstruction], references: list[str], data: TaskData) -> dict[str, float]:
        """Means over crops, and the perplexity of each codebook: how many of its codes are in use."""
        if not outputs:
            return {}
        ids = torch.from_numpy(np.concatenate([each.ids for each in outputs]))  # [N, K]
        perplexities = [code_perplexity(book, int(book.max()) + 1) for book in ids.unbind(1)]
        metrics = {"snr": float(np.mean([each.snr for each in outputs]))}
        metrics["spectrum_db"] = float(np.mean([each.spectrum for each in outputs]))
        return metrics | {f"code_perplexity_{k}": value for k, value in enumerate(perplexities)}

    def format_input(self, example: SoundFile) -> str:
        return _("recording {number}", number=example.path)

    def format_output(self, example: SoundFile, output: Any) -> str:
        return f"{output.snr:.1f} dB" if isinstance(output, SoundReconstruction) else str(output)

    # -------------------------------------------------------------------------------------------------------- usage

    def predict(
        self,
        model: Any,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str],
        *args: Any,
        **options: Any,
    ) -> list[list[list[int]]]:
        """The token ids [frames, K] of recordings."""
        codec = cast(Codec, model)
        with torch.no_grad():
            return [codec.encode(read_audio(path)[None, None])[0].tolist() for path in inputs]

    @property
    def command(self) -> str:
        return "headwater train sounds/ --task audio-language-model --codec {run}"

    def write_pictures(self, folder: Path, model: Any, data: TaskData) -> None:
        """plots/reconstructions.png with sounds beside it, and plots/codebooks.png"""
        dataset = cast(SoundCropDataset, data.valid)
        codec = cast(EnCodecModel, model)
        device = next(model.parameters()).device
        pairs: list[Tensor] = []
        ids: list[Tensor] = []
        for n, place in enumerate(evenly_spaced(len(dataset.sounds), EXAMPLES)):
            samples = torch.from_numpy(dataset.sounds[place][: EXAMPLE_SECONDS * SAMPLE_RATE]).float() / 32767
            with torch.no_grad():
                codes = codec.encode(samples[None, None].to(device))
                decoded = codec.decode(codes)[0, 0, : len(samples)].cpu()
            ids.append(codes[0].cpu())
            pairs += [samples, decoded]
            write_wav(folder / f"sound-{n}.wav", samples, SAMPLE_RATE)
            write_wav(folder / f"sound-{n}-decoded.wav", decoded, SAMPLE_RATE)
        write_png(spectrogram_image(pairs, SAMPLE_RATE), folder / "reconstructions.png")
        write_png(codebook_use(torch.cat(ids), codec.num_codes), folder / "codebooks.png")


def codebook_use(ids: Tensor, num_codes: int) -> Any:
    """How often each code is used, a band for each codebook, its codes sorted: the brighter, the more often."""
    from PIL import Image

    bands = []
    for book in ids.unbind(-1):
        counts = torch.bincount(book.flatten(), minlength=num_codes).sort(descending=True).values.double()
        bands.append((counts / counts.max().clamp(min=1)).sqrt().numpy())
    width = max(1, 768 // num_codes)
    pixels = to_colors(np.stack(bands).repeat(width, 1).repeat(14, 0))
    pixels[::14] = 255  # a line between codebooks
    return Image.fromarray(pixels)
