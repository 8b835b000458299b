"""Matching of images and texts (CLIP, Radford et al. 2021): two towers, trained by a contrastive loss on captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headwater.core import (
    Attention,
    Bidirectional,
    Block,
    Causal,
    Embeddings,
    FeedForward,
    FirstToken,
    LayerNorm,
    Learned,
    Model,
    Stack,
    pre,
)
from headwater.core.masks import MaskRule
from headwater.core.model import Transformer
from headwater.data.collate import SpecialTokens, TrainBatch
from headwater.data.examples import EXAMPLE_FORMATS, CaptionedPicture
from headwater.data.ragged import Ragged, encode_rows
from headwater.errors import BadInput, BadSetting
from headwater.families.clip import clip_init
from headwater.families.load import load_spec
from headwater.families.matching import Matcher
from headwater.i18n import _
from headwater.parts import swap
from headwater.tasks.base import EvalBatch, Predictions, Task, TaskConfig, TaskData, TaskMetadata
from headwater.tasks.batch import TensorBatch
from headwater.tasks.contrastive import contrastive_step_loss, prepare_contrastive_step, vectors_of
from headwater.tasks.image_classification import (
    ImageSize,
    PixelDataset,
    adapt_image_size,
    build_processor,
    load_pixels,
    patch_projection,
    resolve_size,
)
from headwater.text.tokenizer import Tokenizer
from headwater.variants.conv_stem import CONV_INIT
from headwater.variants.image_heads import FirstTokenOf, ProjectionHead
from headwater.variants.patches import Patches
from headwater.variants.stochastic_depth import with_stochastic_depth
from headwater.variants.towers import Towers, TwoTowers
from headwater.vision.augment import ImageAugmenter
from headwater.vision.images import is_image_name, read_image
from headwater.vision.processor import ImageProcessor

MAX_CAPTION = 77  # tokens of a caption, with <bos> and <eos>, as in CLIP
DEFAULT_IMAGE = 64
DEFAULT_PATCH = 8


class ImageTextDataset(PixelDataset):
    """Captioned images: their lengths are patches and tokens. Rows may share an image: ids.images says which it is."""

    def __init__(
        self,
        pixels: np.ndarray,
        captions: Ragged,
        ids: CaptionIds,
        processor: ImageProcessor,
        special_tokens: SpecialTokens,
        config: TaskConfig,
        num_patches: int,
    ) -> None:
        lengths = np.stack((np.full(len(ids.images), num_patches), captions.lengths), 1)
        super().__init__(lengths, special_tokens, max(config.batch_tokens, int(lengths.sum(1).max())), config.seed)
        self.pixels = pixels
        self.captions = captions
        self.ids = ids
        self.processor = processor

    def collate(self, examples: np.ndarray, epoch: int) -> TrainBatch:
        captions = self.captions.take(examples)
        ids = captions.to_padded(self.special_tokens.pad_id)
        mask = np.arange(ids.shape[1]) < captions.lengths[:, None]
        images = self.ids.images[examples]
        pixels = np.asarray(self.pixels[images])
        if self.augmenter is not None:
            pixels = self.augmenter(pixels, examples, epoch)
        signal = self.processor.normalize(pixels).numpy()
        return TrainBatch(ids, mask, self.ids.texts[examples], signal=signal, image_ids=images)


class CaptionIds(NamedTuple):
    """Equal where two rows have the same caption, or the same image. An image's id is its place among the pixels."""

    texts: np.ndarray  # [N]
    images: np.ndarray  # [N]


class Retrieved(NamedTuple):
    """What was found for a captioned image: the image nearest to its caption, the caption nearest to its image."""

    path: str
    text: str
    image_is_right: bool
    text_is_right: bool


class ImageText(Task[CaptionedPicture]):
    """Matching of images and captions, from a table with a path and a caption."""

    name = "image-text"
    verb = "match"
    example_format = EXAMPLE_FORMATS["image-text"]
    augmentable = True
    default_position = "learned"
    default_metric = "retrieval"

    def build_data(
        self,
        config: TaskConfig,
        tokenizer: Tokenizer,
        train: Sequence[CaptionedPicture],
        valid: Sequence[CaptionedPicture],
        labels: Sequence[str] = (),
    ) -> TaskData:
        check_pairs(config, train)
        notes: list[str] = []
        size = resolve_size(config, [row.path for row in train], notes)
        processor = build_processor(config, size)
        special_tokens = SpecialTokens.from_tokenizer(tokenizer)

        def build(split: str, rows: Sequence[CaptionedPicture]) -> tuple[ImageTextDataset, list[CaptionedPicture]]:
            paths = list(dict.fromkeys(row.path for row in rows))  # an image with several captions is decoded once
            pixels, readable = load_pixels(paths, processor, split, notes)
            place = {paths[i]: n for n, i in enumerate(readable)}
            kept = [row for row in rows if row.path in place]
            images = np.array([place[row.path] for row in kept])
            captions = encode_captions(tokenizer, special_tokens, kept, config, split, notes)
            texts = np.unique([row.text for row in kept], return_inverse=True)[1]
            repeated = len(kept) - len(np.unique(texts))
            if repeated:
                notes.append(
                    _(
                        "{count:,} {split} captions repeat others: all their images are positives",
                        count=repeated,
                        split=split,
                    )
                )
            ids = CaptionIds(texts.reshape(-1), images)
            num_patches = 1 + (size.image // size.patch) ** 2
            return ImageTextDataset(pixels, captions, ids, processor, special_tokens, config, num_patches), kept

        train_set, _train_rows = build("train", train)
        train_set.augmenter = ImageAugmenter.from_settings(config.augment, config.seed)
        if train_set.augmenter.mixes:
            raise BadInput(_("augment: mixup and cutmix mix labels, captions cannot be mixed; leave them out"))
        valid_set, valid_rows = build("valid", valid)
        tokens = int(train_set.lengths.sum())
        data = TaskData(self, tokenizer, train_set, valid_set, valid_rows, notes=notes, num_tokens=tokens)
        data.processor = processor
        data.settings = {"image_size": size.image, "patch_size": size.patch}
        return data

    def model_spec(self, config: TaskConfig, vocab_size: int, num_labels: int) -> Model:
        return towers_spec(config, vocab_size)

    def adapt_spec(self, spec: Model, data: TaskData) -> Model:
        """The text tower pools the end of text of this tokenizer."""
        eos_id = SpecialTokens.from_tokenizer(data.tokenizer).eos_id
        return swap(spec, FirstTokenOf, lambda pooling: replace(pooling, token_id=eos_id))

    def can_keep_head(self, spec: Model, metadata: TaskMetadata, labels: Sequence[str]) -> bool:
        return isinstance(spec, Towers)

    def adapt_model(self, model: Transformer, config: TaskConfig) -> Transformer:
        assert isinstance(model, TwoTowers)
        assert isinstance(model.spec, Towers)
        adapt_image_size(model.image, config.image_size)
        model.spec = replace(model.spec, image=model.image.spec)
        return model

    # ------------------------------------------------------------------------------------------------------ loss

    def loss(self, model: Transformer, batch: TensorBatch, label_smoothing: float) -> Tensor:
        """The contrastive loss of a batch; of a micro-batch its part of that of the whole batch."""
        assert isinstance(model, TwoTowers)
        return contrastive_step_loss(model, batch)

    # the gradient of the whole batch, for several micro-batches or processes
    prepare_step = staticmethod(prepare_contrastive_step)

    # ----------------------------------------------------------------------------------------------- predictions

    @torch.no_grad()
    def predict(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        metadata: TaskMetadata,
        inputs: Sequence[str | np.ndarray],
        *args: Any,
        **options: Any,
    ) -> list[list[float]]:
        """The unit vector of each text, image file or image."""
        assert isinstance(model, TwoTowers)
        matcher = Matcher(model, tokenizer, ImageProcessor.from_config(metadata["processor"]))

        def vector(item: str | np.ndarray) -> Tensor:
            if isinstance(item, np.ndarray):
                return matcher.image_vectors([item])[0]
            return (
                matcher.image_vectors([read_image(item)])[0] if is_image_name(item) else matcher.text_vectors([item])[0]
            )

        return [vector(item).tolist() for item in inputs]

    def predict_rows(
        self, model: Transformer, data: TaskData, batches: Iterable[EvalBatch], beam: int = 1
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """The vectors of each row's caption and image."""
        assert isinstance(model, TwoTowers)
        outputs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        with torch.no_grad():
            for rows, batch in batches:
                texts, images = (side.cpu().numpy() for side in vectors_of(model, batch))
                outputs |= {int(row): (texts[n], images[n]) for n, row in enumerate(rows)}
        return outputs

    def collect_predictions(self, outputs: Mapping[int, Any], data: TaskData) -> Predictions:
        """For each row the nearest image of its caption and the nearest caption of its image, among these rows."""
        rows = sorted(outputs)
        examples = [data.valid_examples[row] for row in rows]
        if not rows:
            return Predictions([], [], [])
        texts, images = (np.stack(side) for side in zip(*(outputs[row] for row in rows), strict=True))
        cosines = texts @ images.T  # [T, I]
        nearest_images = cosines.argmax(1)
        nearest_texts = cosines.argmax(0)
        retrieved = [
            Retrieved(
                examples[i].path,
                examples[j].text,
                _match(examples[row], examples[i]),
                _match(examples[row], examples[j]),
            )
            for row, (i, j) in enumerate(zip(nearest_images, nearest_texts, strict=True))
        ]
        return Predictions(rows, retrieved, [Retrieved(each.path, each.text, True, True) for each in examples])

    def metrics(self, outputs: list[Retrieved], references: list[Retrieved], data: TaskData) -> dict[str, float]:
        """Retrieval at 1, in percent: images by their captions, captions by their images, and the mean of both."""
        if not outputs:
            return {}
        image_by_text = 100 * sum(each.image_is_right for each in outputs) / len(outputs)
        text_by_image = 100 * sum(each.text_is_right for each in outputs) / len(outputs)
        mean = (image_by_text + text_by_image) / 2
        return {"retrieval": mean, "image_by_text": image_by_text, "text_by_image": text_by_image}

    @property
    def command(self) -> str:
        return 'headwater match {run} photo.jpg "a cat" "a dog"'

    def format_input(self, example: CaptionedPicture) -> str:
        return Path(example.path).name

    def format_output(self, example: CaptionedPicture, output: Retrieved) -> str:
        return output.text


# ------------------------------------------------------------------------------------------------------------ helpers


def check_pairs(config: TaskConfig, train: Sequence[CaptionedPicture]) -> None:
    """Refuse a training set with one caption, and a start from a model that compares nothing."""
    if len({row.text for row in train}) < 2:
        raise BadInput(
            _(
                "matching learns from at least two different captions, all in the training set are {text!r}; "
                "give more captions, or --valid FILE",
                text=train[0].text[:60],
            )
        )
    if config.init_from and not isinstance(load_spec(config.init_from), Towers):
        raise BadSetting(
            _(
                "--init-from {init_from}: it must compare images with texts; start from a CLIP or SigLIP folder, "
                "or from a run of images and captions",
                init_from=config.init_from,
            )
        )


def _match(one: CaptionedPicture, other: CaptionedPicture) -> bool:
    return one.text == other.text or one.path == other.path


def encode_captions(
    tokenizer: Tokenizer,
    special_tokens: SpecialTokens,
    rows: Sequence[CaptionedPicture],
    config: TaskConfig,
    split: str,
    notes: list[str],
) -> Ragged:
    """Token ids of the captions between <bos> and <eos>; longer ones are cut, which a note says."""
    captions = encode_rows(tokenizer, (row.text for row in rows))
    limit = max_caption(config) - 2
    too_long = int((captions.lengths > limit).sum())
    if too_long:
        notes.append(
            _("{count:,} {split} captions are cut to {limit} tokens", count=too_long, split=split, limit=limit)
        )
    return captions.truncate(limit).with_affixes([special_tokens.bos_id], [special_tokens.eos_id])


def max_caption(config: TaskConfig) -> int:
    """Tokens of a caption, with <bos> and <eos>."""
    return min(config.max_length + 2, MAX_CAPTION) if config.max_length else MAX_CAPTION


def towers_spec(config: TaskConfig, vocab_size: int) -> Model:
    """Two towers of one size as in CLIP: a causal one of texts, pooled at <eos>, and one of images."""
    norm = LayerNorm(1e-5)
    ffn = FeedForward(config.d_ff, "gelu")
    init = (*CONV_INIT, *clip_init(config.d_model, config.layers))
    size = ImageSize(config.image_size or DEFAULT_IMAGE, config.patch_size or DEFAULT_PATCH)

    def block(mask: MaskRule) -> Block:
        attn = Attention(config.heads, bias="qkvo", mask=mask)
        return Block((pre(norm, self_attn=attn), pre(norm, ffn=ffn)), config.dropout)

    embed = Embeddings(vocab_size, Learned(max_caption(config)), dropout=config.dropout)
    text = Stack(config.d_model, embed, (block(Causal()),) * config.layers, norm)
    image_layers = with_stochastic_depth((block(Bidirectional()),) * config.layers, config.stochastic_depth)
    projection = patch_projection(config)
    patches = Patches(
        (size.image,) * 2, (size.patch,) * 2, bias=False, norm=norm, dropout=config.dropout, projection=projection
    )
    image = Stack(config.d_model, patches, image_layers)
    return Towers(
        text=Model(ProjectionHead(config.d_model, FirstTokenOf(0)), encoder=text, init=init),
        image=Model(ProjectionHead(config.d_model, FirstToken(), norm), encoder=image, init=init),
    )
