"""The contrastive loss of a whole batch (CLIP), in micro-batches and processes.

The loss compares every text of a batch with every image, so gradient accumulation needs all of them: the vectors of
all micro-batches are computed first, without gradients; the gradient of the loss with respect to the vectors is
exact for the whole batch; then each micro-batch goes forward again and passes its part of it back (Gao et al. 2021).
Several processes gather the vectors of all of them, so that their gradient is that of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from headwater.core.model import Transformer
from headwater.data.collate import IGNORE_INDEX
from headwater.tasks.batch import Ranks, TensorBatch
from headwater.tasks.losses import contrastive_loss
from headwater.variants.towers import TwoTowers


def contrastive_step_loss(model: TwoTowers, batch: TensorBatch) -> Tensor:
    """The loss of a batch; of a micro-batch that was prepared its part of that of the whole batch."""
    model.clamp_scale()
    texts, images = vectors_of(model, batch)
    if "text_grads" not in batch:
        return contrastive_loss(model.similarity(texts, images), positives_of(batch["targets"], batch["image_ids"]))
    # the value of the whole loss once, and the gradient of this micro-batch's vectors
    passed_back = (texts * batch["text_grads"]).sum() + (images * batch["image_grads"]).sum()
    for name, grad in (("logit_scale", "scale_grad"), ("logit_offset", "offset_grad")):
        if grad in batch:
            passed_back = passed_back + getattr(model, name) * batch[grad]
    return batch["whole_loss"] + passed_back - passed_back.detach()


def prepare_contrastive_step(
    model: Transformer,
    micro_batches: list[dict[str, Tensor]],
    forward_context: Callable[[int], AbstractContextManager[object]],
    ranks: Ranks,
) -> None:
    """Give each micro-batch the gradient of the whole batch's loss with respect to its vectors."""
    if len(micro_batches) < 2 and ranks.world_size == 1:
        return
    assert isinstance(model, TwoTowers)
    model.clamp_scale()
    local: list[Pairs] = []
    for index, micro_batch in enumerate(micro_batches):
        with torch.no_grad(), forward_context(index):
            texts, images = vectors_of(model, micro_batch)
        local.append(Pairs(texts.float(), images.float(), micro_batch["targets"], micro_batch["image_ids"]))
    by_rank = ranks.all_gather_object([pairs.to("cpu") for pairs in local])
    grads = whole_batch_gradient(model, [pairs for rank in by_rank for pairs in rank])

    # each micro-batch its own gradient; the first of all ranks has the value of the loss and the gradient of the scale
    first = sum(map(len, by_rank[: ranks.rank]))
    for index, micro_batch in enumerate(micro_batches, start=first):
        text_grads, image_grads = grads.of_pairs[index]
        micro_batch |= {"text_grads": text_grads, "image_grads": image_grads}
        micro_batch["whole_loss"] = torch.zeros_like(grads.loss) if index else grads.loss
        if index == 0:
            micro_batch |= grads.of_scale


def vectors_of(model: TwoTowers, batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """The unit vectors of the captions and of the images of a batch."""
    return model.text_vectors(batch["ids"]), model.image_vectors(batch["signal"])


class Pairs(NamedTuple):
    """The vectors of the captions and images of a micro-batch, and the numbers of each (CaptionIds)."""

    texts: Tensor  # [N, W]
    images: Tensor  # [N, W]
    text_ids: Tensor  # [N], IGNORE_INDEX in a filler
    image_ids: Tensor  # [N]

    def to(self, device: str | torch.device) -> Pairs:
        return Pairs(*(tensor.to(device) for tensor in self))


class WholeBatchGradient(NamedTuple):
    """The loss of a whole batch, its gradients with respect to the vectors of each micro-batch and to the scale."""

    loss: Tensor
    of_pairs: list[tuple[Tensor, Tensor]]
    of_scale: dict[str, Tensor]


def whole_batch_gradient(model: TwoTowers, micro_batches: list[Pairs]) -> WholeBatchGradient:
    """The contrastive loss of all pairs. A filler (training.distributed) is no part of it: its gradient is 0."""
    micro_batches = [pairs.to(model.logit_scale.device) for pairs in micro_batches]
    texts, images, text_ids, image_ids = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    real = text_ids != IGNORE_INDEX
    texts.requires_grad_()
    images.requires_grad_()
    learned: dict[str, Tensor] = {"scale_grad": model.logit_scale}
    if model.logit_offset is not None:
        learned["offset_grad"] = model.logit_offset
    loss = contrastive_loss(model.similarity(texts[real], images[real]), positives_of(text_ids[real], image_ids[real]))
    text_grads, image_grads, *others = torch.autograd.grad(loss, (texts, images, *learned.values()))
    sizes = [len(pairs.text_ids) for pairs in micro_batches]
    of_pairs = list(zip(text_grads.split(sizes), image_grads.split(sizes), strict=True))
    return WholeBatchGradient(loss.detach(), of_pairs, dict(zip(learned, others, strict=True)))


def positives_of(text_ids: Tensor, image_ids: Tensor) -> Tensor:
    """[T, I] True where a text and an image belong together: of one row, or by the same caption or image."""
    return (text_ids[:, None] == text_ids[None]) | (image_ids[:, None] == image_ids[None])
