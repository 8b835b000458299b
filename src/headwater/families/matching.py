"""Matching of texts and images by two towers (CLIP, SigLIP): unit vectors, similarities, zero-shot classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.errors import BadInput, BadSetting
from headwater.families.config_writers import find_part
from headwater.families.load import load
from headwater.i18n import _
from headwater.text.tokenizer import Tokenizer
from headwater.variants.image_heads import FinalToken
from headwater.variants.towers import TwoTowers
from headwater.vision.images import Pixels
from headwater.vision.processor import ImageProcessor

BATCH_SIZE = 32
# Templates of zero-shot classification: their vectors are averaged for each label.
TEMPLATES = ("a photo of a {}.", "a picture of a {}.", "a drawing of a {}.", "an image of the {}.", "{}")


class Matcher:
    """Two towers with their tokenizer and image processor."""

    def __init__(self, model: TwoTowers, tokenizer: Tokenizer, processor: ImageProcessor) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.processor = processor

    @torch.inference_mode()
    def text_vectors(self, texts: Sequence[str]) -> Tensor:
        """Texts -> unit vectors [T, W]."""
        rows = [self.model.text_vectors(self.encode(texts[i : i + BATCH_SIZE])) for i in _steps(texts)]
        return torch.cat(rows)

    @torch.inference_mode()
    def image_vectors(self, images: Sequence[Pixels]) -> Tensor:
        """RGB pixels [H, W, 3] -> unit vectors [I, W]."""
        rows = [self.model.image_vectors(self.processor(images[i : i + BATCH_SIZE])) for i in _steps(images)]
        return torch.cat(rows)

    @torch.inference_mode()
    def label_vectors(self, labels: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
        """Labels -> unit vectors [L, W]: the mean over the templates, as in CLIP's zero-shot classification."""
        for template in templates:
            if "{}" not in template:
                raise BadSetting(
                    _("a template must have {{}} in the place of the label, got {template!r}", template=template)
                )
        vectors = [self.text_vectors([template.replace("{}", label) for template in templates]) for label in labels]
        return F.normalize(torch.stack(vectors).mean(1), dim=-1)

    @torch.inference_mode()
    def probabilities(self, texts: Tensor, images: Tensor) -> Tensor:
        """[I, T] for each image a probability for each text: of one of them, or of each alone (SigLIP)."""
        logits = self.model.similarity(texts, images).T
        return logits.softmax(-1) if self.model.logit_offset is None else logits.sigmoid()

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Token ids [T, Q], cut to the model's positions with the end of text last, padded on the right."""
        limit = self.model.max_text
        rows = [self.tokenizer.encode(text) for text in texts]
        rows = [row if len(row) <= limit else [*row[: limit - 1], row[-1]] for row in rows]
        fixed = find_part(self.model.text.spec.head, FinalToken) is not None
        length = limit if fixed else max(map(len, rows))
        pad_id = self.tokenizer.pad_id
        pad_id = (self.tokenizer.eos_id or 0) if pad_id is None else pad_id
        return torch.tensor([row + [pad_id] * (length - len(row)) for row in rows])


def load_matcher(model: str | Path) -> Matcher:
    """The matcher of a public CLIP or SigLIP folder, or of a run that was trained on images and captions."""
    loaded = load(model)
    if not isinstance(loaded.model, TwoTowers):
        raise BadInput(
            _(
                "{model} does not compare texts with images; give a CLIP or SigLIP folder, or a run of "
                "headwater train pairs.csv with the columns path and caption",
                model=model,
            )
        )
    for part, name in ((loaded.tokenizer, "tokenizer.json"), (loaded.processor, "preprocessor_config.json")):
        if part is None:
            raise BadInput(
                _("{model} must hold {name} to read texts and images; it is missing", model=model, name=name)
            )
    assert loaded.tokenizer is not None
    assert loaded.processor is not None
    return Matcher(loaded.model, loaded.tokenizer, loaded.processor)


def _steps(items: Sequence[object]) -> range:
    return range(0, len(items), BATCH_SIZE)
