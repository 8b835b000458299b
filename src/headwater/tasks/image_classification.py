"""Image classification: a label for an image, by a Vision Transformer (ViT)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core import (
    Attention,
    Block,
    ClassificationHead,
    FeedForward,
    FirstToken,
    LayerNorm,
    Model,
    Normal,
    Pooled,
    Stack,
    Xavier,
    pre,
)
from headwater.core.base import choose
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens, TrainBatch, label_ids, label_names
from headwater.data.dataset import Dataset, evenly_spaced
from headwater.data.examples import EXAMPLE_FORMATS, LabeledImage
from headwater.errors import BadInput, BadSetting, Fault
from headwater.families.config_writers import find_part
from headwater.families.load import find_model, load_spec
from headwater.i18n import _
from headwater.tasks.base import TaskConfig, TaskData, TaskMetadata
from headwater.tasks.batch import TensorBatch
from headwater.tasks.labels import LabelTask, label_probabilities
from headwater.text.tokenizer import Tokenizer
from headwater.variants.conv_stem import CONV_INIT, conv_stem_for
from headwater.variants.patches import LinearProjection, Patches, PatchesLayer, PatchProjectionSpec
from headwater.variants.stochastic_depth import with_stochastic_depth
from headwater.variants.towers import Towers
from headwater.vision.augment import ImageAugmenter
from headwater.vision.images import read_image
from headwater.vision.pixel_cache import decode_images
from headwater.vision.processor import ImageProcessor, find_processor

SMALL_IMAGE = 48  # up to this side an image keeps its size, in patches of 4 pixels
SMALL_PATCH = 4
DEFAULT_SIZE = 64
DEFAULT_PATCH = 8
SIZE_SAMPLE = 64  # images whose sizes decide
MAX_PROBLEMS = 3  # unreadable files that a note names


class ImageSize(NamedTuple):
    """The side of the images of a model and of its patches, in pixels."""

    image: int
    patch: int


class PixelDataset(Dataset):
    """A dataset with images: their resized pixels, and the processor that makes a tensor of them."""

    pixels: np.ndarray  # [N, H, W, 3] uint8
    processor: ImageProcessor
    augmenter: ImageAugmenter | None = None


class ImageDataset(PixelDataset):
    """Images as pixels, with their classes; each as long as its patches and the class token."""

    def __init__(
        self,
        pixels: np.ndarray,
        labels: np.ndarray,
        processor: ImageProcessor,
        num_tokens: int,
        special_tokens: SpecialTokens,
        config: TaskConfig,
    ) -> None:
        batch_tokens = max(config.batch_tokens, num_tokens)
        super().__init__(np.full(len(pixels), num_tokens), special_tokens, batch_tokens, config.seed)
        self.pixels = pixels
        self.labels = labels
        self.processor = processor

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        slots = np.zeros((len(examples), int(self.lengths[0, 0])), np.int64)
        pixels = np.asarray(self.pixels[examples])
        mixed: dict[str, np.ndarray] = {}
        augmenter = self.augmenter
        if augmenter is not None:
            pixels = augmenter(pixels, examples, epoch)
        if augmenter is not None and augmenter.mixes:
            partners = augmenter.partners(examples, epoch, self.size)
            others = augmenter(np.asarray(self.pixels[partners]), partners, epoch)
            pixels, own_shares = augmenter.mix(pixels, others, examples, epoch)
            mixed = {"mixed_targets": self.labels[partners], "own_shares": own_shares}
        signal = self.processor.normalize(pixels).numpy()
        return TrainBatch(slots, np.ones(slots.shape, bool), self.labels[examples], signal=signal, **mixed)


class ImageClassification(LabelTask[LabeledImage]):
    """Classes of images, from a folder for each class or a table of paths and labels."""

    name = "image-classification"
    example_format = EXAMPLE_FORMATS["image-classification"]
    augmentable = True
    reads_text = False
    default_position = "learned"

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[LabeledImage],
        valid: Sequence[LabeledImage],
        labels: Sequence[str] = (),
    ) -> TaskData:
        names = tuple(labels) or label_names(row.label for row in train)
        if len(names) < 2:
            raise BadInput(
                _(
                    "classification needs at least two labels, all images have {name!r}; give a folder for each class",
                    name=names[0],
                )
            )
        if config.init_from and isinstance(load_spec(config.init_from), Towers):
            raise BadSetting(
                _(
                    "--init-from {init_from}: it must be a model of images alone, this one compares them with texts; "
                    "start from a ViT or a DeiT, or classify with headwater match {init_from} photo.jpg cat dog "
                    "--labels",
                    init_from=config.init_from,
                )
            )
        notes: list[str] = []
        size = resolve_size(config, [row.path for row in train], notes)
        processor = build_processor(config, size)
        num_tokens = 1 + (size.image // size.patch) ** 2
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)

        def build(split: str, rows: Sequence[LabeledImage]) -> tuple[ImageDataset, list[LabeledImage]]:
            pixels, readable = load_pixels([row.path for row in rows], processor, split, notes)
            kept = [rows[i] for i in readable]
            classes = label_ids([row.label for row in kept], names)
            return ImageDataset(pixels, classes, processor, num_tokens, special_tokens, config), kept

        train_set, _train_rows = build("train", train)
        train_set.augmenter = ImageAugmenter.from_settings(config.augment, config.seed)
        valid_set, valid_rows = build("valid", valid)
        tokens = int(train_set.lengths.sum())
        data = TaskData(self, tokenizer, train_set, valid_set, valid_rows, names, notes=notes, num_tokens=tokens)
        data.processor = processor
        data.settings = {"image_size": size.image, "patch_size": size.patch}
        return data

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return vit_spec(config, num_labels)

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        return adapt_image_size(model, config.image_size)

    # ------------------------------------------------------------------------------------------------------ loss

    def logits(self, model: Transformer, batch: TensorBatch) -> Tensor:
        logits: Tensor = model(batch["signal"])
        return logits.float()

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """Cross-entropy, of both classes where an image is mixed of two."""
        logits = self.logits(model, batch)
        first_loss = F.cross_entropy(logits, batch["targets"], reduction="none", label_smoothing=label_smoothing)
        if "mixed_targets" not in batch:
            return first_loss.sum()
        second_loss = F.cross_entropy(logits, batch["mixed_targets"], reduction="none", label_smoothing=label_smoothing)
        return (batch["own_shares"] * first_loss + (1 - batch["own_shares"]) * second_loss).sum()

    # ----------------------------------------------------------------------------------------------- predictions

    @torch.no_grad()
    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str | Path | np.ndarray],
        *args: Any,
        **options: Any,
    ) -> list[dict[str, float]]:
        """For each image file, or its pixels, the labels with their probabilities, the most probable first."""
        processor = ImageProcessor.from_config(metadata["processor"])
        images = [image if isinstance(image, np.ndarray) else read_image(image) for image in inputs]
        return label_probabilities(model(processor(images)), metadata["labels"])

    @property
    def command(self) -> str:
        return "headwater classify {run} photo.jpg"

    def format_input(self, example: LabeledImage) -> str:
        return "/".join(Path(example.path).parts[-2:])


# --------------------------------------------------------------------------------------------------- sizes and pixels


def vit_spec(config: TaskConfig, num_labels: int) -> Model:
    """A Vision Transformer: pre-norm, a class token, learned positions, stochastic depth that rises with the layer."""
    norm = LayerNorm(1e-6)
    attn = Attention(config.heads, bias="qkvo")
    block = Block((pre(norm, self_attn=attn), pre(norm, ffn=FeedForward(config.d_ff, "gelu"))), config.dropout)
    layers = with_stochastic_depth((block,) * config.layers, config.stochastic_depth)
    image = (config.image_size or DEFAULT_SIZE,) * 2
    patch = (config.patch_size or DEFAULT_PATCH,) * 2
    embed = Patches(image, patch, dropout=config.dropout, projection=patch_projection(config))
    stack = Stack(config.d_model, embed, layers, norm)
    head = ClassificationHead(num_labels, Pooled(FirstToken()))
    init = (*CONV_INIT, ("*.embed.*", Normal(0.02)), ("head.*", Normal(0.02)), ("*", Xavier()))
    return Model(head, encoder=stack, init=init)


PATCH_PROJECTIONS: Mapping[str, Callable[[int, int], PatchProjectionSpec]] = {  # (patch size, d_model)
    "linear": lambda patch_size, d_model: LinearProjection(),
    "conv-stem": conv_stem_for,
}


def patch_projection(config: TaskConfig) -> PatchProjectionSpec:
    """The projection that `patch_embedding` names, for the sizes of the model."""
    return choose(config.patch_embedding, PATCH_PROJECTIONS, "patch_embedding")(
        config.patch_size or DEFAULT_PATCH, config.d_model
    )


def resolve_size(config: TaskConfig, paths: Sequence[str], notes: list[str]) -> ImageSize:
    """The sizes of a pretrained model, those of the config, or from the sizes of some of the images."""
    if config.init_from:
        embed = find_part(load_spec(config.init_from), Patches)
        if embed is None:
            raise BadSetting(
                _(
                    "--init-from {init_from}: it must be a model of images; start from a ViT or a DeiT",
                    init_from=config.init_from,
                )
            )
        if config.patch_embedding != "linear" and embed.projection == LinearProjection():
            raise BadSetting(
                _(
                    "patch_embedding: --init-from {init_from} has a linear one, which {name} cannot replace; "
                    "leave one of the two out",
                    init_from=config.init_from,
                    name=config.patch_embedding,
                )
            )
        pretrained = ImageSize(embed.image_size[0], embed.patch_size[0])
        if config.image_size in (0, pretrained.image):
            return pretrained
        _check_size(config.image_size, pretrained.patch)
        notes.append(
            _(
                "{init_from} reads images of {own} x {own} pixels: its positions are interpolated for {size} x {size}",
                init_from=config.init_from,
                own=pretrained.image,
                size=config.image_size,
            )
        )
        return ImageSize(config.image_size, pretrained.patch)
    choose(config.patch_embedding, PATCH_PROJECTIONS, "patch_embedding")  # before any image is read
    side = config.image_size or _usual_side(paths)
    patch = config.patch_size or (SMALL_PATCH if side <= SMALL_IMAGE else DEFAULT_PATCH)
    if not config.image_size:
        side = max(patch, side // patch * patch) if side <= SMALL_IMAGE else DEFAULT_SIZE
    _check_size(side, patch)
    return ImageSize(side, patch)


def _check_size(side: int, patch: int) -> None:
    """Images of whole patches, of a size that can be trained."""
    if side % patch or side > 1024:
        raise BadSetting(
            _(
                "image_size must be a multiple of patch_size {patch} up to 1024, got {side}; {nearest} is one",
                patch=patch,
                side=side,
                nearest=max(patch, min(side, 1024) // patch * patch),
            )
        )


def _usual_side(paths: Sequence[str]) -> int:
    """The median of the shorter sides of some images; DEFAULT_SIZE where none can be read."""
    sides = []
    for i in evenly_spaced(len(paths), SIZE_SAMPLE):
        try:
            sides.append(min(read_image(paths[i]).shape[:2]))
        except Fault:
            continue
    return int(np.median(sides)) if sides else DEFAULT_SIZE


def adapt_image_size(model: Transformer, image_size: int) -> Transformer:
    """A pretrained model for images of another size, as its files will say."""
    stack = model.encoder
    assert stack is not None
    assert isinstance(stack.embed, PatchesLayer)
    if image_size not in (0, stack.embed.spec.image_size[0]):
        stack.embed.resize((image_size, image_size))
        stack.spec = replace(stack.spec, embed=stack.embed.spec)
        model.spec = replace(model.spec, encoder=stack.spec)
    return model


def build_processor(config: TaskConfig, size: ImageSize) -> ImageProcessor:
    """The image processor of a pretrained model at this size, or one that crops the middle."""
    known = find_processor(find_model(config.init_from)) if config.init_from else None
    mean, std = ((0.5,) * 3, (0.5,) * 3) if known is None else (known.mean, known.std)
    return ImageProcessor((size.image,), (size.image, size.image), 3, mean=mean, std=std, kind="CLIP")


def load_pixels(
    paths: Sequence[str], processor: ImageProcessor, split: str, notes: list[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of the images that can be read, and their indices; a note counts and names the others."""
    decoded = decode_images(paths, processor)
    if decoded.problems:
        notes.append(
            _(
                "{count:,} of {total:,} {split} images cannot be read and are left out: {problems}",
                count=len(decoded.problems),
                total=len(paths),
                split=split,
                problems="; ".join(decoded.problems[:MAX_PROBLEMS]),
            )
        )
    if not len(decoded.readable):
        raise BadInput(
            _(
                "{split}: no image can be read; {problem}",
                split=split,
                problem=(decoded.problems or [_("none given")])[0],
            )
        )
    return decoded.pixels, decoded.readable
