"""Handler for an image: what an image model sees in it, over the patches, and the labels it gives."""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.inspection.image_maps import image_maps
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import ImageRequest
from headwater.vision.images import Pixels, decode_image
from headwater.vision.processor import ImageProcessor

MAX_LABELS = 10
DIGITS = 5


def inspect_image(open_model: OpenModel, request: ImageRequest) -> dict[str, Any]:
    """The image as the model sees it, its maps [layers, heads, rows, columns], and the most probable labels."""
    processor = processor_of(open_model)
    model = open_model.inspected.model
    pixels = decode_image(decode_base64(request.image), _("the image"))
    maps = image_maps(model, processor([pixels]), request.patch)
    return {
        "image": encode_png(processor.resize(pixels)),
        "attention": maps.attention.round(DIGITS).tolist(),
        "rollout": maps.rollout.round(DIGITS).tolist(),
        "attribution": maps.attribution.round(DIGITS).tolist(),
        "best": _label(open_model, maps.best),
        "labels": probable_labels(open_model, maps.output),
    }


def processor_of(open_model: OpenModel) -> ImageProcessor:
    """The image processor of a folder or of a run."""
    processor = getattr(open_model.loaded, "processor", None)
    if processor is not None:
        return processor
    config = open_model.inspected.metadata.get("processor")
    if config is None:
        raise BadInput(_("{model} has no preprocessor_config.json, so it takes no image", model=open_model.stored.name))
    return ImageProcessor.from_config(config)


def decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise BadInput(_("image must be a file in base64, it is not; choose an image file")) from None


def encode_png(pixels: Pixels) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def probable_labels(open_model: OpenModel, logits: np.ndarray) -> list[dict[str, Any]]:
    """The most probable labels with their probabilities; none of a model that gives vectors."""
    if len(logits) != len(open_model.inspected.labels):
        return []
    probabilities = torch.from_numpy(logits).softmax(-1)
    values, order = probabilities.topk(min(MAX_LABELS, len(probabilities)))
    rows = zip(order.tolist(), values.tolist(), strict=True)
    return [{"label": _label(open_model, n), "probability": round(p, DIGITS)} for n, p in rows]


def _label(open_model: OpenModel, number: int) -> str:
    labels = open_model.inspected.labels
    return labels[number] if number < len(labels) else str(number)
