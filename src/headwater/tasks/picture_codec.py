"""A picture codec: pictures to token ids and back. Trained before text to image, or alone.

The data is decoded once, resized and kept as bytes. The plots folder shows originals above their reconstructions, and
what each code of the codebook looks like where it fills the picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headwater.codecs import PictureCodec, save_codec
from headwater.codecs.codebook import code_perplexity
from headwater.codecs.vqvae import VQVAE, VQVAECodec, psnr
from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.data.dataset import Dataset, evenly_spaced
from headwater.data.examples import EXAMPLE_FORMATS, CaptionedPicture
from headwater.errors import BadFile, BadInput, NotFound
from headwater.i18n import _
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData, TaskMetadata
from headwater.tasks.batch import TensorBatch
from headwater.text.tokenizer import Tokenizer
from headwater.vision.images import read_image
from headwater.vision.processor import ImageProcessor
from headwater.vision.sheets import contact_sheet, to_pixels, write_png

DEFAULT_IMAGE_SIZE = 32
DEFAULT_CODES = 256
FACTOR = 4  # pixels of a side that one token stands for
MAX_PIXEL_BYTES = 4 << 30
BICUBIC = 3
SHEET_PICTURES = 12


# ------------------------------------------------------------------------------------------------------------- pictures


def load_pictures(paths: Sequence[str], size: int, notes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [N, size, size, 3] uint8 of the files that can be read, and their indices; a note names the others."""
    needed = len(paths) * size * size * 3
    if needed > MAX_PIXEL_BYTES:
        raise BadInput(
            _(
                "pictures: {count:,} of {size} x {size} pixels need {needed:.1f} GB; give fewer, or a smaller size",
                count=len(paths),
                size=size,
                needed=needed / 1e9,
            )
        )
    processor = ImageProcessor(size=(size, size), resample=BICUBIC)
    pixels = np.empty((len(paths), size, size, 3), np.uint8)
    good: list[int] = []
    bad: list[str] = []
    for n, path in enumerate(paths):
        try:
            pixels[len(good)] = processor.resize(read_image(path))
        except (BadFile, NotFound) as fault:
            bad.append(str(fault))
        else:
            good.append(n)
    if bad:
        notes.append(_("{count:,} pictures cannot be read and are left out: {first}", count=len(bad), first=bad[0]))
    if not good:
        raise BadInput(_("no picture can be read: {first}", first=bad[0] if bad else "-"))
    return pixels[: len(good)], np.array(good)


def to_pictures(pixels: Tensor) -> Tensor:
    """Pixels [B, H, W, 3] uint8 to [B, 3, H, W] in 0 … 1."""
    return pixels.permute(0, 3, 1, 2).float() / 255


def image_size(config: TaskConfig) -> int:
    """Pixels of a side of the pictures."""
    size = config.image_size or DEFAULT_IMAGE_SIZE
    if size % FACTOR or not FACTOR <= size <= 1024:
        raise BadInput(
            _("image_size must be a multiple of {factor} up to 1024, got {size}; 32 is usual", factor=FACTOR, size=size)
        )
    return size


class PictureDataset(Dataset):
    """Pictures as pixels, each as long as its tokens."""

    def __init__(self, pixels: np.ndarray, special_tokens: SpecialTokens, batch_tokens: int, seed: int) -> None:
        tokens = (pixels.shape[1] // FACTOR) ** 2
        super().__init__(np.full(len(pixels), tokens), special_tokens, max(batch_tokens, tokens), seed)
        self.pixels = pixels

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        slots = np.zeros((len(examples), int(self.lengths[0, 0])), np.int64)
        return TrainBatch(
            slots, np.ones(slots.shape, bool), np.zeros(len(examples), np.int64), signal=self.pixels[examples]
        )


# ----------------------------------------------------------------------------------------------------------------- task


class Reconstruction(NamedTuple):
    """How well a picture is reconstructed, in decibels, and its ids."""

    psnr: float
    ids: tuple[int, ...]


class PictureCodecTask(Task[CaptionedPicture]):
    """A codec that reconstructs pictures from token ids."""

    name = "picture-codec"
    example_format = EXAMPLE_FORMATS["picture-codec"]
    default_metric = "psnr"
    default_steps = 1500
    reads_text = False

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[CaptionedPicture],
        valid: Sequence[CaptionedPicture],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        notes: list[str] = []

        def build(rows: Sequence[CaptionedPicture]) -> tuple[PictureDataset, list[CaptionedPicture]]:
            pixels, good = load_pictures([row.path for row in rows], image_size(config), notes)
            dataset = PictureDataset(pixels, special_tokens, config.batch_tokens, config.seed)
            return dataset, [rows[i] for i in good]

        train_set, _train_rows = build(train)
        valid_set, valid_rows = build(valid)
        num_tokens = int(train_set.lengths.sum())
        return TaskData(self, tokenizer, train_set, valid_set, valid_rows, notes=notes, num_tokens=num_tokens)

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Any:
        """Channels and residual blocks are d_model and layers of the config; vocab is the number of codes."""
        return VQVAE(
            size=image_size(config),
            factor=FACTOR,
            channels=config.d_model,
            blocks=config.layers,
            num_codes=config.vocab or DEFAULT_CODES,
        )

    def describe_model(self, model: Any) -> str:
        spec = cast(VQVAE, model.spec)
        return _(
            "VQ-VAE, {size} x {size} pixels as {rows} x {rows} of {codes} codes, {channels} channels",
            size=spec.size,
            rows=spec.size // spec.factor,
            codes=spec.num_codes,
            channels=spec.channels,
        )

    def save_model(self, folder: Path, model: Any, data: TaskData) -> None:
        save_codec(model, folder, metadata=dict(data.metadata))

    # ---------------------------------------------------------------------------------------------- loss and metrics

    def loss(self, model: Any, batch: TensorBatch, label_smoothing: float) -> Tensor:
        codec = cast(VQVAECodec, model)
        pictures = to_pictures(batch["signal"])
        return codec.loss(pictures) * len(pictures)

    def predict_rows(
        self, model: Any, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, Reconstruction]:
        outputs: dict[int, Reconstruction] = {}
        for rows, batch in batches:
            pictures = to_pictures(batch["signal"])
            with torch.no_grad():
                ids = model.encode(pictures)
                decibels = psnr(model.decode(ids), pictures)
            for row, value, codes in zip(rows, decibels.tolist(), ids.tolist(), strict=True):
                outputs[int(row)] = Reconstruction(value, tuple(codes))
        return outputs

    def reference(self, example: CaptionedPicture) -> str:
        return example.path

    def metrics(self, outputs: list[Reconstruction], references: list[str], data: TaskData) -> dict[str, float]:
        if not outputs:
            return {}
        ids = torch.tensor([codes for _value, codes in outputs])
        mean = sum(value for value, _codes in outputs) / len(outputs)
        return {"psnr": mean, "code_perplexity": code_perplexity(ids, int(ids.max()) + 1)}

    def format_input(self, example: CaptionedPicture) -> str:
        return Path(example.path).name

    def format_output(self, example: CaptionedPicture, output: Any) -> str:
        return f"{output.psnr:.1f} dB" if isinstance(output, Reconstruction) else Path(str(output)).name

    # -------------------------------------------------------------------------------------------------------- usage

    def predict(
        self,
        model: Any,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str],
        *args: Any,
        **options: Any,
    ) -> list[list[int]]:
        """The token ids of picture files."""
        codec = cast(PictureCodec, model)
        notes: list[str] = []
        pixels, good = load_pictures([str(path) for path in inputs], codec.size, notes)
        if len(good) < len(inputs):
            raise BadFile(notes[0])
        with torch.no_grad():
            return codec.encode(to_pictures(torch.from_numpy(pixels))).tolist()

    @property
    def command(self) -> str:
        return "headwater train pairs.csv --task text-to-image --codec {run}"

    def write_pictures(self, folder: Path, model: Any, data: TaskData) -> None:
        """plots/reconstructions.png and plots/codebook.png"""
        dataset = cast(PictureDataset, data.valid)
        rows = evenly_spaced(dataset.size, SHEET_PICTURES)
        pictures = to_pictures(torch.from_numpy(dataset.pixels[rows])).to(next(model.parameters()).device)
        with torch.no_grad():
            both = torch.cat((pictures, model.decode(model.encode(pictures))))
        write_png(contact_sheet(to_pixels(both), len(rows)), folder / "reconstructions.png")
        write_png(codebook_sheet(cast(PictureCodec, model)), folder / "codebook.png")


def codebook_sheet(codec: PictureCodec, max_codes: int = 1024) -> Any:
    """What each code looks like: the middle of a picture of that code alone."""
    count = min(codec.num_codes, max_codes)
    grid = torch.arange(count, device=next(codec.parameters()).device)[:, None, None].expand(-1, 3, 3)
    with torch.no_grad():
        tiles = codec.decode(grid)[:, :, codec.factor : -codec.factor, codec.factor : -codec.factor]
    return contact_sheet(to_pixels(tiles), columns=round(count**0.5), enlarge=max(1, 16 // codec.factor))
