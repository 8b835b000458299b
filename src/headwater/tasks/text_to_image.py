"""Text to image: a decoder over the tokens of a text and then those of a picture, as DALL-E (Ramesh et al. 2021).

    <bos> text <eos> <pad> …            a fixed number of places
    codes of the picture, row by row    each the number of its code, after the ids of the text

In a part of the examples the text is left out, so that the model also knows pictures without a text: classifier-free
guidance needs that. The loss counts text tokens an eighth as much as picture tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headwater.codecs import PictureCodec, load_codec, read_codec_spec, save_codec
from headwater.codecs.folder import CODEC_FOLDER
from headwater.codecs.vqvae import VQVAE
from headwater.core import Embeddings, LMHead, Model
from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX, SpecialTokens, TrainBatch
from headwater.data.dataset import Dataset, evenly_spaced
from headwater.data.examples import EXAMPLE_FORMATS, CaptionedPicture
from headwater.data.ragged import Ragged, encode_rows
from headwater.errors import BadInput, BadSetting
from headwater.families.builders import decoder
from headwater.i18n import _
from headwater.parts import swap
from headwater.rng import uniform
from headwater.tasks.base import EvalBatch, Task, TaskConfig, TaskData, TaskMetadata, stack_sizes
from headwater.tasks.batch import TensorBatch, forward_hidden
from headwater.tasks.drawing import PictureModel, draw
from headwater.tasks.language_model import lm_head_loss
from headwater.tasks.picture_codec import load_pictures, to_pictures
from headwater.text.tokenizer import Tokenizer
from headwater.variants.text_image_positions import TextImagePositions
from headwater.vision.sheets import contact_sheet, to_pixels, write_png
from headwater.weights.native import save_native

DEFAULT_TEXT_PLACES = 24
TEXT_WEIGHT = 1 / 7  # of a text token's loss beside a picture token's: an eighth and seven eighths, as in DALL-E
WITHOUT_TEXT = 0.1  # the part of the examples whose text is left out
ENCODE_BATCH = 256
SHEET_PICTURES = 12


@dataclass
class PictureTaskData(TaskData):
    """The datasets, and the codec that made the picture tokens."""

    codec: PictureCodec | None = None


class TextImageDataset(Dataset):
    """Rows of text ids [N, T] and picture ids [N, P], both as the model sees them."""

    def __init__(
        self,
        texts: np.ndarray,
        pictures: np.ndarray,
        special_tokens: SpecialTokens,
        batch_tokens: int,
        seed: int,
        without_text: float = 0.0,
    ) -> None:
        length = texts.shape[1] + pictures.shape[1] - 1
        super().__init__(np.full(len(texts), length), special_tokens, max(batch_tokens, length), seed)
        self.texts = texts
        self.pictures = pictures
        self.without_text = without_text

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        texts = self.texts[examples]
        left_out = uniform(self.seed, epoch, examples, "without text") < self.without_text  # [B]
        texts = np.where(left_out[:, None], empty_text(texts.shape[1], self.special_tokens), texts)
        rows = np.concatenate([texts, self.pictures[examples]], 1)
        targets = rows[:, 1:].copy()
        in_text = targets[:, : texts.shape[1] - 1]
        in_text[(texts[:, 1:] == self.special_tokens.pad_id) | left_out[:, None]] = IGNORE_INDEX
        return TrainBatch(rows[:, :-1], np.ones(targets.shape, bool), targets)


def empty_text(places: int, special_tokens: SpecialTokens) -> np.ndarray:
    """[T] the ids of no text."""
    return text_rows(Ragged.from_rows([[]]), places, special_tokens)[0]


def text_rows(texts: Ragged, places: int, special_tokens: SpecialTokens) -> np.ndarray:
    """[N, T] <bos> text <eos> <pad> …; a longer text is cut."""
    rows = texts.truncate(places - 2).with_affixes([special_tokens.bos_id], [special_tokens.eos_id])
    padded = np.full((len(rows), places), special_tokens.pad_id, np.int64)
    for n in range(len(rows)):
        padded[n, : rows.lengths[n]] = rows[n]
    return padded


def text_places(config: TaskConfig) -> int:
    """The places of the text."""
    return config.max_length or DEFAULT_TEXT_PLACES


class TextToImage(Task[CaptionedPicture]):
    """Pictures from texts."""

    name = "text-to-image"
    verb = "draw"
    example_format = EXAMPLE_FORMATS["text-to-image"]
    default_position = "none"
    generates_text = True
    default_metric = "loss"
    default_steps = 2500
    stacks = (False, True)

    # ------------------------------------------------------------------------------------------------ data and model

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[CaptionedPicture],
        valid: Sequence[CaptionedPicture],
        labels: Sequence[str] = (),
    ) -> TaskData:
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)
        codec = open_codec(config)
        notes: list[str] = []

        def build(rows: Sequence[CaptionedPicture], without_text: float) -> tuple[Dataset, list[CaptionedPicture]]:
            pixels, good = load_pictures([row.path for row in rows], codec.size, notes)
            rows = [rows[i] for i in good]
            texts = encode_rows(tokenizer, (row.text for row in rows))
            long = int((texts.lengths > text_places(config) - 2).sum())
            if long:
                places = text_places(config)
                notes.append(_("{long:,} texts are cut to {places} tokens (--max-length)", long=long, places=places))
            dataset = TextImageDataset(
                text_rows(texts, text_places(config), special_tokens),
                encode_pictures(codec, pixels) + len(tokenizer),
                special_tokens,
                config.batch_tokens,
                config.seed,
                without_text,
            )
            return dataset, rows

        train_set, _train_rows = build(train, WITHOUT_TEXT)
        valid_set, valid_rows = build(valid, 0.0)
        num_tokens = int(train_set.lengths.sum())
        return PictureTaskData(
            self, tokenizer, train_set, valid_set, valid_rows, notes=notes, num_tokens=num_tokens, codec=codec
        )

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        """One vocabulary: the ids of the text, then the codes of the picture."""
        codec = cast(VQVAE, read_codec_spec(codec_folder(config)))
        side = codec.size // codec.factor
        positions = TextImagePositions(text_places(config), side, side)
        spec = decoder(vocab_size + codec.num_codes, activation="gelu", **stack_sizes(config))
        return swap(spec, Embeddings, lambda embed: replace(embed, position=positions))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec.head, LMHead)

    def save_model(self, folder: Path, model: Any, data: TaskData) -> None:
        save_native(folder, model, data.metadata)
        codec = cast(PictureTaskData, data).codec
        if codec is not None and not (folder / CODEC_FOLDER / "config.json").is_file():
            save_codec(codec, folder / CODEC_FOLDER)

    # ---------------------------------------------------------------------------------------------- loss and metrics

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """Cross-entropy of the picture tokens, and TEXT_WEIGHT of that of the text tokens.

        Scaled so that, divided by num_targets, it is a mean over picture tokens.
        """
        hidden_states, inputs = forward_hidden(model, batch)
        targets = batch["targets"]
        places = positions_of(model.spec)
        in_text = torch.arange(targets.shape[1], device=targets.device) < places.text - 1
        picture = targets.masked_fill(in_text, IGNORE_INDEX)
        text = targets.masked_fill(~in_text, IGNORE_INDEX)
        losses = [lm_head_loss(model.head, hidden_states, inputs, part, label_smoothing) for part in (picture, text)]
        return (losses[0] + TEXT_WEIGHT * losses[1]) * (targets.shape[1] / (places.rows * places.columns))

    def num_targets(self, batch: TensorBatch) -> int:
        """All places, whatever counts in them: see loss()."""
        return batch["targets"].numel()

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, Any]:
        return {}

    def format_input(self, example: CaptionedPicture) -> str:
        return example.text

    # -------------------------------------------------------------------------------------------------------- usage

    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str],
        *args: Any,
        **options: Any,
    ) -> list[Any]:
        raise BadInput(
            _("a model that draws needs its codec beside it; use `headwater draw RUN` or tasks.drawing.draw")
        )

    def write_pictures(self, folder: Path, model: Any, data: TaskData) -> None:
        """plots/drawings.png: what the model draws for texts of the validation set, under the pictures themselves."""
        codec = cast(PictureTaskData, data).codec
        if codec is None:
            return
        dataset = cast(TextImageDataset, data.valid)
        rows = evenly_spaced(dataset.size, SHEET_PICTURES)
        drawer = PictureModel(model, data.tokenizer, codec)
        drawn = draw(drawer, [data.valid_examples[row].text for row in rows], seed=0)
        ids = torch.from_numpy(dataset.pictures[rows] - len(data.tokenizer))
        with torch.no_grad():
            originals = codec.decode(ids)
        write_png(contact_sheet(to_pixels(torch.cat((originals, drawn))), len(rows)), folder / "drawings.png")


def positions_of(spec: Model) -> TextImagePositions:
    """The positions of a model that draws."""
    position = getattr(getattr(spec.decoder, "embed", None), "position", None)
    if not isinstance(position, TextImagePositions):
        raise BadSetting(_("draw: the model must have been trained with --task text-to-image; load another"))
    return position


# ----------------------------------------------------------------------------------------------------------- the codec


def codec_folder(config: TaskConfig) -> Path:
    """The folder of the codec that a config names: a model folder, or a run."""
    if not config.codec:
        raise BadSetting(_("text-to-image needs a picture codec; train one with --task picture-codec and give --codec"))
    path = Path(config.codec)
    return path / "model" if (path / "model" / "config.json").is_file() else path


def open_codec(config: TaskConfig) -> PictureCodec:
    """The codec that a config names."""
    codec = load_codec(codec_folder(config))
    if not isinstance(codec, PictureCodec):
        raise BadSetting(_("{codec} must be a picture codec, it is one of sounds", codec=config.codec))
    return codec


def encode_pictures(codec: PictureCodec, pixels: np.ndarray) -> np.ndarray:
    """Pixels [N, H, W, 3] to ids [N, P]."""
    batches = torch.from_numpy(pixels).split(ENCODE_BATCH)
    with torch.inference_mode():
        return np.concatenate([codec.encode(to_pictures(batch)).numpy() for batch in batches])
